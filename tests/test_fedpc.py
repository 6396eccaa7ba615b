"""FedPC by hand, its local Adam against torch's, and whole runs: resumed, exported, forgotten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from bespoke import load_personal
from bespoke.api import run as run_experiment
from bespoke.deploy.export import export_personal
from bespoke.deploy.forget import forget_client
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.engine import Choice
from bespoke.method import Cohort
from bespoke.methods import FedPC, SharedPrefix
from bespoke.methods.parts.client_optimizer import adam_start, adam_step
from bespoke.methods.parts.server_optimizer import ServerOptimizer
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.storage import open_arrays
from bespoke.tensors import flatten
from kills import assert_identical, contents
from small_language import CONTEXTS, WIDTH, prefix_world, tiny_model

HOW = Choice(True, 64, 0, 1, "func", "")


@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_local_adam_is_that_of_torch(eps: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start, slopes = torch.randn(4, generator=generator), torch.randn(6, 4, generator=generator)
    theirs = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([theirs], lr=0.01, eps=eps)
    ours: dict[str, Any] = {"p": start}
    state = adam_start(ours)
    for slope in slopes:
        theirs.grad = slope.clone()
        optimizer.step()
        ours, state = adam_step(state, ours, {"p": slope}, 0.01, 1.0, eps)
        still, same = adam_step(state, ours, {"p": slope}, 0.01, 0.0, eps)  # a step that only pads
        assert torch.equal(still["p"], ours["p"])
        assert all(torch.equal(a, b) for a, b in zip(flatten(same).values(), flatten(state).values()))
    torch.testing.assert_close(ours["p"], theirs.detach())


def sent(method: FedPC, uses: list[float], change: float, weight: float) -> Cohort:
    contexts = torch.full((CONTEXTS, 1, WIDTH), change)
    sums = {"delta": {"contexts": {"prefix": contexts}, "anybody": {"prefix": torch.full((1, 1, WIDTH), change)}},
            "uses": torch.tensor(uses), "weight": torch.tensor(weight)}  # fmt: skip
    return Cohort(sums, {}, (0, 1, 2, 3))


@pytest.mark.parametrize(("average", "expected"), [("used", [2.0, 8.0, 0.0]), ("all", [2.0, 2.0, 0.0])])
def test_a_contexts_change_is_averaged_over_those_that_used_it(average: Any, expected: list[float]) -> None:
    """Four clients; the first context was used by all, the second by one, the third by nobody. Sums are 8."""
    method = FedPC(prefix_world().task, average=average, server=ServerOptimizer("sgd"))
    server = method.init_server(prefix_world().task.init(0))
    after = method.server_round(server, sent(method, [4.0, 1.0, 0.0], 8.0, 4.0))
    moved = after["params"]["contexts"]["prefix"] - server["params"]["contexts"]["prefix"]
    np.testing.assert_allclose(moved[:, 0, 0], expected, rtol=1e-5)
    assert float((after["params"]["anybody"]["prefix"] - 1).mean()) == pytest.approx(2.0)  # by all four


def test_an_unused_context_keeps_its_moments() -> None:
    method = FedPC(prefix_world().task)
    server = method.init_server(prefix_world().task.init(0))
    one = method.server_round(server, sent(method, [4.0, 1.0, 2.0], 8.0, 4.0))
    two = method.server_round(one, sent(method, [4.0, 1.0, 0.0], 8.0, 4.0))
    for before, after in ((one["params"], two["params"]), (one["optimizer"], two["optimizer"])):
        rows = [flatten(tree["contexts"]) for tree in (before, after)]
        for name in (name for name, leaf in rows[0].items() if leaf.dim()):
            assert torch.equal(rows[0][name][2], rows[1][name][2])
            assert not torch.equal(rows[0][name][1], rows[1][name][1])


def test_the_product_has_the_gradient_of_the_product_rule() -> None:
    """d/d psi = sum_c phi_c * slope_c and d/d phi_c = psi * slope_c, where slope is that of the task's own prefix."""
    task, columns = prefix_world().task, prefix_world().population.columns
    rows = {**{name: column[:9] for name, column in columns.items()}, "mask": torch.ones(9)}
    generator = torch.Generator().manual_seed(2)
    user = {"prefix": 1 + 0.1 * torch.randn(1, 1, WIDTH, generator=generator)}
    contexts = {"prefix": 0.1 * torch.randn(CONTEXTS, 1, WIDTH, generator=generator)}
    slope = task.gradient({"prefix": user["prefix"] * contexts["prefix"]}, rows)["prefix"]
    method = FedPC(task, tokens=1)
    found = method.slope(
        lambda p: task.loss({"prefix": p["user"] * p["contexts"]}, rows),
        {"user": user["prefix"], "contexts": contexts["prefix"]},
    )
    torch.testing.assert_close(found["contexts"], user["prefix"] * slope)
    torch.testing.assert_close(found["user"], (contexts["prefix"] * slope).sum(0, keepdim=True))


def test_several_embeddings_before_a_text() -> None:
    for kind in (FedPC, SharedPrefix):
        made = kind(prefix_world().task, tokens=3)
        leaves = flatten(made.init_server(prefix_world().task.init(0))["params"])
        assert all(leaf.shape[-2:] == (3, WIDTH) for leaf in leaves.values())
    private = FedPC(prefix_world().task, tokens=3).init_private(prefix_world().task.init(0))
    assert private["user"]["prefix"].shape == (1, 3, WIDTH)


# -- whole runs --------------------------------------------------------------------------------------------------------
def settings(folder: Path, rounds: int = 2) -> dict[str, Any]:
    random = np.random.default_rng(1)
    rows = [
        {"who": who, "show": show, "line": " ".join(f"w{i}" for i in random.integers(0, 60, random.integers(4, 9)))}
        for who, show in (("anna", "x"), ("bert", "y"), ("carl", "x"), ("carl", "y"), ("dora", "y")) for _ in range(12)
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(folder / "lines.csv", index=False)
    return {
        "data": {"table": str(folder / "lines.csv"), "client": "who", "text": "line", "context": "show"},
        "model": {"name": "frozen", "pretrained": tiny_model(), "given": 1},
        "stage": [{"method": "fedpc", "rounds": rounds, "steps": 2, "tune_steps": 2, "lr": 0.01}],
        "engine": {"workers": 0},
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fedpc")
    run_experiment(settings(folder), folder / "run")
    return folder / "run"


def test_a_run_says_how_it_was_executed_and_holds_no_weights(finished: Path) -> None:
    assert json.loads((finished / "engine.json").read_text())["vectorized"]
    table = pd.read_parquet(finished / "clients.parquet")
    assert set(table["client"]) == {"anna", "bert", "carl", "dora"}
    assert np.isfinite(table["query_perplexity"]).all()
    model = open_arrays(Path(tiny_model()) / "model.safetensors")[0]
    weight = model["model.layers.0.mlp.up_proj.weight"][0].numpy().tobytes()
    files = [path for path in finished.rglob("*") if path.is_file()]
    assert not any(weight in path.read_bytes() for path in files)
    rounds = [json.loads(line) for line in (finished / "rounds.jsonl").read_text().splitlines()]
    assert rounds[-1]["observed"]["uses"] == [2, 3]


def test_an_exported_user_speaks_by_its_embedding_and_can_be_forgotten(finished: Path) -> None:
    written = export_personal(finished, "carl")
    model = load_personal(written["folder"])
    assert written["parameters"] == 2 * WIDTH  # an embedding for each context
    assert model.about["contexts"] == ["x", "y"]
    x = np.array([[1, 5, 9]])
    assert model.outputs(x).shape == (1, 3, 64)
    assert model.predict(["w2 w6"])[0] in [f"w{i}" for i in range(61)] + ["<s>", "</s>", "<unk>", ""]
    receipt = forget_client(finished, "carl")
    assert receipt["traces_left"] == 0
    assert any(name.startswith("private/") for name in receipt["deleted"])


def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """The user's embedding and Adam's moments come back from the client's private state."""
    place = prefix_world()
    method = FedPC(place.task, steps=2, tune_steps=1, batch_size=4)
    experiment = Experiment(
        "small", place.population, place.split, place.task, (Stage(method, 3),), "perplexity", cohort=5
    )

    def run(name: str, after_round: Any) -> Path:
        path = tmp_path / name
        folder = RunFolder.existing(path) if path.exists() else RunFolder.create(path, "")
        Run(experiment, folder, how=HOW, checkpoint_seconds=0.0, after_round=after_round).run()
        return path

    def stop(stage: int, number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    whole = run("whole", lambda stage, number: None)
    with pytest.raises(KeyboardInterrupt):
        run("stopped", stop)
    assert not (tmp_path / "stopped" / "result.json").exists()
    assert_identical(contents(run("stopped", lambda stage, number: None)), contents(whole), "stopped after round 2")
