"""kNN-Per on a frozen language model: a memory of tokens, held against scipy and the library's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.special import softmax

from bespoke import load_personal, pretrained
from bespoke.api import run as run_experiment
from bespoke.data.splits import everything
from bespoke.deploy.export import export_personal
from bespoke.federation.batches import Orders
from bespoke.federation.choice import choose
from bespoke.federation.work import ClientWork
from bespoke.methods import KNNPer
from bespoke.models.fast.token_loss import head_words
from bespoke.tensors import Params
from small_language import CONTEXTS, VOCABULARY, WIDTH, prefix_world, tiny_model
from test_fedpc import settings

MIX = (0.0, 0.3, 1.0)
K = 500  # all tokens of a memory: texts of a context begin alike, so that of the nearest some are equally near
CLIENT = 5  # has texts in all contexts


def tokens_of(params: Params, rows: Params, given: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Hidden states, the model's probabilities and targets of all tokens after the given ones, row by row."""
    model, found = pretrained.language_model(tiny_model()), []
    for x, y, context in zip(rows["x"].long(), rows["y"].long(), rows["context"]):
        inputs = torch.cat([params["prefix"][context], model.get_input_embeddings()(x)])[None]
        hidden = model.base_model(inputs_embeds=inputs).last_hidden_state[0, params["prefix"].shape[1] :]
        counted = (y >= 0) & (torch.arange(len(y)) >= given)
        found.append((hidden[counted], model.lm_head(hidden[counted]).softmax(-1), y[counted]))
    hidden, shares, targets = (torch.cat(side).detach().double().numpy() for side in zip(*found))
    return hidden, shares, targets.astype(int)


def test_scores_are_those_of_distances_by_another_library() -> None:
    """p = mix * (weights exp(-d) of the neighbours with the word, of their sum) + (1 - mix) * the model's."""
    place = prefix_world()
    method: Any = KNNPer(place.task, k=K, mix=MIX)
    params = {"prefix": 0.1 * torch.randn(CONTEXTS, 1, WIDTH, generator=torch.Generator().manual_seed(1))}
    support = Orders.draw(everything(place.population), np.array([CLIENT]), method.support_batching(), 3).sliced(0)
    columns = {name: column[:25] for name, column in place.population.columns.items()}  # of other clients
    rows = {**columns, "mask": torch.ones(25)}
    keys, _, words = tokens_of(params, support.rows(), 0)
    queries, shares, targets = tokens_of(params, rows, 1)
    weights = softmax(-cdist(queries, keys), 1)
    votes = weights @ np.eye(VOCABULARY)[words]
    models = method.personalize({"params": params}, {}, support)
    for part, outputs in zip(MIX, method.outputs(models, {"query": rows})):
        mixture = part * votes + (1 - part) * shares
        scores = place.task.score(outputs["query"], rows)
        losses = -np.log(np.maximum(mixture[np.arange(len(targets)), targets], 1e-12))
        assert float(scores["loss"]) == pytest.approx(losses.sum(), rel=1e-4)
        assert int(scores["count"]) == len(targets)
        assert float(scores["accuracy"]) == pytest.approx((mixture.argmax(1) == targets).sum(), abs=1)


def test_words_and_the_likeliest_are_those_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bespoke.models.fast.token_loss.HELD", 3 * 7)  # three items at a time
    generator = torch.Generator().manual_seed(0)
    features, head, bias = (torch.randn(n, generator=generator) for n in ((8, 5), (7, 5), (7,)))
    words = torch.randint(7, (8, 3), generator=generator)
    values, best, place = head_words(features, head, bias, words)
    whole = (features @ head.mT + bias).log_softmax(-1)
    torch.testing.assert_close(values, whole.gather(1, words))
    torch.testing.assert_close(best[:, 0], whole.max(1).values)
    assert torch.equal(place[:, 0], whole.argmax(1))


def test_memories_are_held_one_client_at_a_time() -> None:
    place = prefix_world()
    work = ClientWork(KNNPer(place.task), place.split.train)
    chosen = choose(place.population, work, place.task.init(0), 7, workers=0)
    assert (chosen.vectorized, chosen.reason) == (False, "all rows of a client at once")


def test_a_run_after_a_shared_prefix(tmp_path: Path) -> None:
    config = settings(tmp_path)
    config["stage"] = [
        {"method": "shared-prefix", "rounds": 1, "steps": 2},
        {"method": "knn-per", "mix": [0.0, 0.2], "k": 3, "capacity": 6},
    ]
    run_experiment(config, tmp_path / "run")
    assert np.isfinite(pd.read_parquet(tmp_path / "run" / "clients.parquet")["query_perplexity"]).all()
    model = load_personal(export_personal(tmp_path / "run", "carl")["folder"])
    said = model.outputs(torch.tensor([[1, 5, 9]]))
    assert said.shape == (1, 3, VOCABULARY)
    torch.testing.assert_close(said.exp().sum(-1), torch.ones(1, 3), rtol=1e-4, atol=1e-4)
