"""Last layers of a frozen language model: losses and local training against transformers and torch.optim; runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke import load_personal, pretrained
from bespoke.api import run as run_experiment
from bespoke.data.splits import everything
from bespoke.deploy.export import export_personal
from bespoke.deploy.forget import forget_client
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.batches import Orders
from bespoke.federation.choice import choose
from bespoke.federation.engine import Choice
from bespoke.federation.work import ClientWork
from bespoke.methods import FedPCMeta, FedPCSplit
from bespoke.models import frozen
from bespoke.models.head import HeadLM
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.tensors import Params
from kills import assert_identical, contents
from small_language import CONTEXTS, VOCABULARY, WIDTH, prefix_world, tiny_model
from test_fedpc import settings

MODEL = pretrained.language_model
LOOP = Choice(False, 1, 0, 1, "autograd", "")


def task_of(how: Any = "autograd") -> Any:
    return prefix_world().task.with_head().differentiated(how)  # type: ignore[attr-defined]


def rows_of(many: int = 12) -> Params:
    columns = prefix_world().population.columns
    return {**{name: column[:many] for name, column in columns.items()}, "mask": torch.ones(many)}


def heads(seed: int = 0, many: int = CONTEXTS) -> Tensor:
    noise = torch.randn(many, VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(seed))
    return task_of().init(0)["head"] + 0.1 * noise


def by_the_library(head: Tensor, rows: Params, given: int = 0) -> tuple[Tensor, int]:
    """The summed loss, row by row, of the library's own model with its last layer replaced; how many tokens count."""
    model, total, tokens = MODEL(tiny_model()), torch.zeros(()), 0
    for x, y, context in zip(rows["x"].long(), rows["y"].long(), rows["context"]):
        words = model.get_input_embeddings()(x)[None]
        hidden = model.base_model(inputs_embeds=words).last_hidden_state[0]
        logits = F.linear(hidden, head[context if len(head) > 1 else 0])
        total = total + F.cross_entropy(logits[given:], y[given:], ignore_index=-1, reduction="sum")
        tokens += int((y[given:] >= 0).sum())
    return total, tokens


@pytest.mark.parametrize("many", [1, CONTEXTS])
@pytest.mark.parametrize("how", ["autograd", "func"])
def test_loss_gradient_and_scores_are_those_of_the_library(how: str, many: int) -> None:
    task, rows, head = task_of(how), rows_of(), heads(many=many)
    live = head.clone().requires_grad_()
    total, tokens = by_the_library(live, rows)
    slope = torch.autograd.grad(total / tokens, live)[0]
    torch.testing.assert_close(task.loss({"head": head}, rows), (total / tokens).detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(task.gradient({"head": head}, rows)["head"], slope, rtol=1e-4, atol=1e-6)
    total, tokens = by_the_library(head, rows, given=1)
    for scores in (task.scored({"head": head}, rows), task.score(task.predict({"head": head}, rows), rows)):
        assert int(scores["count"]) == tokens
        torch.testing.assert_close(scores["loss"], total.detach(), rtol=1e-5, atol=1e-5)


def test_the_pretrained_head_is_the_model_itself() -> None:
    rows = rows_of()
    said = MODEL(tiny_model())(rows["x"].long()).logits
    torch.testing.assert_close(task_of().predict(task_of().init(3), rows), said, rtol=1e-4, atol=1e-5)


def test_what_lies_below_the_head_is_computed_once_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever head asks, whatever texts come beside; when memory is short the oldest is dropped, and found again."""
    calls: list[int] = []
    body = frozen._body

    def counted(name: str, prefix: Tensor, x: Tensor) -> Tensor:
        calls.append(len(x))
        return body(name, prefix, x)

    monkeypatch.setattr(frozen, "_body", counted)
    monkeypatch.setattr(frozen, "_MEMORY", frozen._Memory())
    task, rows, others = task_of(), rows_of(8), {**rows_of(20), "mask": torch.ones(20)}
    first = [task.loss({"head": heads(seed)}, rows) for seed in (0, 1)]
    assert calls == [1] * 8  # a text at a time
    backwards = {name: column.flip(0) for name, column in rows.items()}
    torch.testing.assert_close(task.loss({"head": heads(0)}, backwards), first[0])
    seen = [task.network.seen(part["x"], part["y"].long()) for part in (rows, backwards)]
    assert torch.equal(seen[0].flip(0), seen[1])
    assert len(calls) == 8
    monkeypatch.setattr(frozen, "MEMORY", 1000)
    task.loss({"head": heads(0)}, others)
    assert frozen._MEMORY.bytes <= 1000
    assert torch.equal(task.loss({"head": heads(0)}, rows), first[0])
    assert len(calls) > 8 + 12  # eight of the twenty others had been there
    assert not torch.equal(*first)
    monkeypatch.setattr(frozen, "MEMORY", 0)
    calls.clear()
    torch.testing.assert_close(task.loss({"head": heads(0)}, rows), first[0])
    assert calls == [8]  # nothing is remembered: all at once


# -- local training, once more by torch.optim --------------------------------------------------------------------------
CLIENT = 5  # its rows have all three contexts
KNOBS: dict[str, Any] = {"lr": 0.01, "steps": 4, "batch_size": 4, "mu": 0.5, "tune_steps": 3}


def batches_of(method: Any, client: int = CLIENT) -> Any:
    population = prefix_world().population
    return Orders.draw(everything(population), np.array([client]), method.batching(), 7).sliced(0)


def descended(parts: dict[str, Tensor], joined: Any, pulled: dict[str, Tensor], batches: Any) -> dict[str, Tensor]:
    """K steps of torch's Adam on the library's loss and FedProx's term."""
    live = {name: leaf.clone().requires_grad_() for name, leaf in parts.items()}
    optimizer = torch.optim.Adam(list(live.values()), lr=KNOBS["lr"])
    for step in range(len(batches)):
        optimizer.zero_grad()
        total, tokens = by_the_library(joined(live), batches[step])
        pull = sum(((live[name] - start) ** 2).sum() for name, start in pulled.items())
        (total / tokens + KNOBS["mu"] / 2 * pull).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in live.items()}


@pytest.mark.parametrize(("join", "part"), [("mean", 0.5), ("sum", 1.0)])
def test_a_round_of_split_learning(join: Any, part: float) -> None:
    """The user's head and the contexts' learn from the same texts; the user's is not pulled and does not leave."""
    method = FedPCSplit(prefix_world().task, join=join, **KNOBS)
    shared, user, batches = heads(1), heads(2, 1), batches_of(method)
    expected = descended(
        {"user": user, "contexts": shared}, lambda p: part * (p["user"] + p["contexts"]), {"contexts": shared}, batches
    )
    kept, up = method.client_round({"params": {"head": shared}}, {"user": {"head": user}}, batches)
    torch.testing.assert_close(kept["user"]["head"], expected["user"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(up["delta"]["head"], expected["contexts"] - shared, rtol=1e-3, atol=1e-5)
    assert set(up) == {"delta", "uses", "weight"}
    assert up["uses"].tolist() == [1, 1, 1]


def test_contexts_that_a_user_has_not_stay_as_they_are() -> None:
    method = FedPCSplit(prefix_world().task, **KNOBS)
    shared, batches = heads(1), batches_of(method, 4)  # all of this client's texts are in the first context
    kept, up = method.client_round({"params": {"head": shared}}, {"user": {"head": heads(2, 1)}}, batches)
    assert up["uses"].tolist() == [1, 0, 0]
    assert not up["delta"]["head"][1:].any()
    assert up["delta"]["head"][0].any()
    expected = descended(
        {"user": heads(2, 1), "contexts": shared}, lambda p: 0.5 * (p["user"] + p["contexts"]), {"contexts": shared},
        batches,
    )  # fmt: skip
    torch.testing.assert_close(kept["user"]["head"], expected["user"], rtol=1e-4, atol=1e-5)


def test_a_round_of_meta_learning_and_its_tuning() -> None:
    method = FedPCMeta(prefix_world().task, **KNOBS)
    shared, batches = heads(1, 1), batches_of(method)
    expected = descended({"head": shared}, lambda p: p["head"], {"head": shared}, batches)["head"]
    private, up = method.client_round({"params": {"head": shared}}, {}, batches)
    torch.testing.assert_close(up["delta"]["head"], expected - shared, rtol=1e-3, atol=1e-5)
    assert private == {}
    plain, tuned = method.personalize({"params": {"head": shared}}, {}, batches)
    assert torch.equal(plain["head"], shared)  # what was sent is not written on
    torch.testing.assert_close(tuned["head"], expected, rtol=1e-4, atol=1e-5)


def test_a_new_user_begins_with_the_pretrained_head() -> None:
    method, start = FedPCSplit(prefix_world().task), prefix_world().task.init(0)
    pretrained_head = MODEL(tiny_model()).get_output_embeddings().weight
    assert torch.equal(method.init_private(start)["user"]["head"][0], pretrained_head)
    assert torch.equal(method.init_server(start)["params"]["head"], pretrained_head.expand(CONTEXTS, -1, -1))


def test_heads_are_trained_one_client_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk would hold heads of millions of numbers for each of its clients."""
    monkeypatch.setattr(HeadLM, "work", lambda self, x: 15_000_000 * x.shape[-1])
    place = prefix_world()
    work = ClientWork(FedPCSplit(place.task), place.split.train)
    chosen = choose(place.population, work, place.task.init(0), 7, workers=0)
    assert (chosen.vectorized, chosen.gradient) == (False, "autograd")


# -- whole runs --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["fedpc-split", "fedpc-meta"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    config = settings(folder)
    config["stage"][0]["method"] = request.param
    run_experiment(config, folder / "run")
    return folder / "run"


def test_an_exported_head_predicts_and_can_be_forgotten(finished: Path) -> None:
    written = export_personal(finished, "carl")
    model = load_personal(written["folder"])
    split = written["candidate"] == "tuned" and model.method.card.name == "fedpc-split"
    assert written["parameters"] == (2 if split else 1) * VOCABULARY * WIDTH
    x = torch.tensor([[1, 5, 9]])
    hidden = MODEL(tiny_model()).base_model(x).last_hidden_state
    torch.testing.assert_close(model.outputs(x), hidden @ model.params["head"][0].mT, rtol=1e-4, atol=1e-5)
    receipt = forget_client(finished, "carl")
    assert receipt["traces_left"] == 0
    assert any(name.startswith("private/") for name in receipt["deleted"]) == split


@pytest.mark.parametrize("kind", [FedPCSplit, FedPCMeta])
def test_a_stopped_run_goes_on_to_the_same_bytes(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though what lies below the heads is not known any more, and is computed in another order."""
    place = prefix_world()
    method = kind(place.task, steps=2, tune_steps=1, batch_size=4)
    experiment = Experiment(
        "small", place.population, place.split, place.task, (Stage(method, 3),), "perplexity", cohort=5
    )

    def run(name: str, stopped: int = 0) -> Path:
        def after_round(stage: int, number: int) -> None:
            if number == stopped:
                raise KeyboardInterrupt

        monkeypatch.setattr(frozen, "_MEMORY", frozen._Memory())
        path = tmp_path / name
        folder = RunFolder.existing(path) if path.exists() else RunFolder.create(path, "")
        Run(experiment, folder, how=LOOP, checkpoint_seconds=0.0, after_round=after_round).run()
        return path

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("stopped", 2)
    assert_identical(contents(run("stopped")), contents(whole), "stopped after round 2")
