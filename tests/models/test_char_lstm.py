"""The paper's word language model: its sizes, its character CNN and its three last layers, against plain PyTorch."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bespoke.data.population import Population
from bespoke.data.splits import everything
from bespoke.errors import UserError
from bespoke.federation.choice import choose
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.methods import FedAvg
from bespoke.models import build_task
from bespoke.models.char_lstm import LONGEST, AdaptiveCharLSTM, CharLSTM, spelled
from bespoke.models.language import LanguageModel
from bespoke.tensors import Params, count, nbytes

WORDS = ("the", "a", "cat", "unbelievably", "b" * 30)
ABOUT = {"task": "language", "input": "tokens", "vocabulary": 9, "words": list(WORDS)}
SMALL = {"embedding": 4, "hidden": 5, "layers": 1, "character": 3}
LOOP = Choice(False, 1, 0, 1, "autograd", "")


def letters(many: int) -> int:
    """Parameters of the character CNN with so many characters of 15 dimensions and vectors of 100."""
    filters = sum(25 * w * (15 * w + 1) for w in range(1, 7))
    return 15 * many + filters + 2 * (525 * 525 + 525) + 525 * 100 + 100


def lstm(inputs: int, hidden: int) -> int:
    return 4 * hidden * (inputs + hidden + 2)


def size(network: Any) -> int:
    return count(dict(network._module.named_parameters()))


def batch(rows: int = 4) -> Params:
    tokens = torch.randint(1, 9, (rows, 7), generator=torch.Generator().manual_seed(4))
    tokens[-1, 3:] = 0
    return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous(), "mask": torch.ones(rows)}


def test_parameters_of_the_papers_sizes() -> None:
    """33,000 words of the letters a to z: 6 characters besides; two LSTM layers of 512 on vectors of 100."""
    words = tuple(f"{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676 % 26)}{'x' * (i // 17576)}"
                  for i in range(33_000))  # fmt: skip
    below = letters(32) + lstm(100, 512) + lstm(512, 512)
    assert size(CharLSTM(words)) == below + 513 * 33_004 == 20_929_802
    assert size(CharLSTM(words, tied=True)) == below + 512 * 100 + 33_004
    clusters = 2_002 * 512 + 128 * (512 + 8_000) + 32 * (512 + 23_004)
    assert size(AdaptiveCharLSTM(words)) == below + clusters == 6_865_822


def test_spelling() -> None:
    """Padding, words, unknown, begin and end: each begins and ends, and what is longer than 20 characters is cut."""
    table, many = spelled(WORDS)
    alphabet = sorted(set("".join(WORDS)))
    assert many == 6 + len(alphabet)
    assert table.shape == (9, LONGEST + 2)
    assert table[0].tolist()[:3] == [1, 2, 0]
    assert table[3].tolist()[:6] == [1, *(6 + alphabet.index(letter) for letter in "cat"), 2, 0]
    assert table[5].tolist() == [1, *[6 + alphabet.index("b")] * 20, 2]
    assert [row[:4] for row in table[6:].tolist()] == [[1, 3, 2, 0], [1, 4, 2, 0], [1, 5, 2, 0]]


def test_word_vectors_are_those_of_kims_network() -> None:
    """Every word by itself, without its padding but for the widest filter's sake, in the order of the paper."""
    network = CharLSTM(WORDS, **SMALL)
    params = {name.removeprefix("features.words."): p for name, p in network.init(3).items()}
    table, _ = spelled(WORDS)
    found = network._part("features.words", network.init(3), torch.arange(9))
    for token, row in enumerate(table):
        seen = params["character.weight"][row].T[None]
        parts = [F.conv1d(seen, params[f"filters.{w}.weight"], params[f"filters.{w}.bias"]) for w in range(6)]
        pooled = torch.cat([part.tanh().max(-1).values for part in parts], -1)[0]
        gate = torch.sigmoid(params["gate.weight"] @ pooled + params["gate.bias"])
        carried = gate * F.relu(params["transform.weight"] @ pooled + params["transform.bias"]) + (1 - gate) * pooled
        torch.testing.assert_close(found[token], params["narrow.weight"] @ carried + params["narrow.bias"])


def test_features_are_a_plain_lstm_on_these_vectors() -> None:
    network, rows = CharLSTM(WORDS, **SMALL), batch()
    params = network.init(0)
    plain = nn.LSTM(4, 5, batch_first=True)
    plain.load_state_dict({n.removeprefix("features.lstm."): p for n, p in params.items() if "lstm" in n})
    vectors = network._part("features.words", params, torch.arange(9))
    torch.testing.assert_close(network.features(params, rows["x"]), plain(vectors[rows["x"]])[0])


def test_tied_words_are_one_tensor() -> None:
    """No table of words travels, and the loss moves the characters from both ends."""
    network, rows = CharLSTM(WORDS, tied=True, **SMALL), batch()
    params = network.init(0)
    assert not any(p.shape[0] == network.vocabulary and p.dim() == 2 for p in params.values())
    assert nbytes(params) == nbytes(CharLSTM(WORDS, **SMALL).init(0)) + 4 * (5 * 4 + 9) - 4 * 9 * (5 + 1)
    vectors = network._part("features.words", params, torch.arange(9))
    expected = network.features(params, rows["x"]) @ params["head.narrow.weight"].T @ vectors.T + params["head.bias"]
    torch.testing.assert_close(network(params, rows["x"]), expected)


def adaptive(params: Params) -> nn.AdaptiveLogSoftmaxWithLoss:
    plain = nn.AdaptiveLogSoftmaxWithLoss(5, 9, [4])
    plain.load_state_dict({n.removeprefix("head.softmax."): p for n, p in params.items() if n.startswith("head.")})
    return plain


def test_adaptive_softmax_is_pytorchs() -> None:
    """Unknown, begin and end are the first classes, so that frequent tokens are in the first cluster."""
    network, rows = AdaptiveCharLSTM(WORDS, **SMALL), batch()
    params = network.init(0)
    features = network.features(params, rows["x"]).flatten(0, 1)
    plain = adaptive(params).log_prob(features)
    found = network(params, rows["x"]).flatten(0, 1)
    torch.testing.assert_close(found[:, [6, 7, 8, 0, 1, 2, 3, 4, 5]], plain)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(len(found)))
    y = rows["y"].flatten()
    expected = adaptive(params)(features, torch.tensor([3, 4, 5, 6, 7, 8, 0, 1, 2])[y]).output
    torch.testing.assert_close(network.item_losses(params, features, y), -expected)


NETWORKS = {
    "full": CharLSTM(WORDS, **SMALL), "tied": CharLSTM(WORDS, tied=True, **SMALL),
    "adaptive": AdaptiveCharLSTM(WORDS, **SMALL),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_loss_gradient_and_score_are_the_textbooks(name: str) -> None:
    """Against autograd through all outputs and cross-entropy; clusters without a target have a gradient of zero."""
    task, rows = LanguageModel(NETWORKS[name]), batch()
    params = task.init(0)
    live = {n: p.clone().requires_grad_() for n, p in params.items()}
    counted = rows["y"].flatten() > 0
    loss = F.cross_entropy(task.predict(live, rows).flatten(0, 1)[counted], rows["y"].flatten()[counted])
    found = task.gradient(params, rows)
    for n, expected in zip(live, torch.autograd.grad(loss, list(live.values()))):
        torch.testing.assert_close(found[n], expected, rtol=1e-4, atol=1e-6)
    sums = task.scored(params, rows)
    torch.testing.assert_close(sums["loss"] / sums["count"], loss.detach())
    empty = {**rows, "mask": torch.zeros(4)}
    assert all(bool((g == 0).all()) for g in task.gradient(params, empty).values())


@pytest.mark.parametrize("name", NETWORKS)
def test_it_trains_in_the_loop_and_says_so(name: str) -> None:
    """A round moves the model as plain SGD does; vectorization is refused; workers get the words with the task."""
    columns = {n: column for n, column in batch(8).items() if n != "mask"}
    population = Population.build(columns, np.repeat(["a", "b"], 4))
    task: Any = pickle.loads(pickle.dumps(LanguageModel(NETWORKS[name])))
    method = FedAvg(task, lr=0.5, batch_size=4, shuffle=False)
    work, start = ClientWork(method, everything(population)), task.init(0)
    with pytest.raises(UserError, match="vectorized"):
        choose(population, work, start, 2, kind="vectorized")
    with Engine(population, LOOP) as engine:
        engine.open(work, start)
        server = method.init_server(start)
        server = method.server_round(server, engine.round(server, np.arange(2), 1).cohort)
    halves = [{n: column[i : i + 4] for n, column in batch(8).items()} for i in (0, 4)]
    slopes = [task.gradient(start, half) for half in halves]
    for n, p in start.items():
        torch.testing.assert_close(server["params"][n], p - 0.5 * (slopes[0][n] + slopes[1][n]) / 2)


def test_models_by_name() -> None:
    full = build_task(ABOUT, "char-lstm", tied=True, hidden=6).network
    assert full == CharLSTM(WORDS, hidden=6, tied=True)
    assert build_task(ABOUT, "char-lstm-adaptive").network == AdaptiveCharLSTM(WORDS)
    with pytest.raises(UserError, match="not words; use 'lstm'"):
        build_task({**ABOUT, "words": []}, "char-lstm")
    with pytest.raises(UserError, match="tied = 1"):
        build_task(ABOUT, "char-lstm", tied=1)
    with pytest.raises(UserError, match="tied"):
        build_task(ABOUT, "char-lstm-adaptive", tied=True)
