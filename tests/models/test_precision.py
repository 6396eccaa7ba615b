"""`engine.precision = "bf16"`: products in bfloat16, everything that is kept, sent or scored in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bespoke.federation.choice import choose
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.method import Setting
from bespoke.methods import FedAvg
from bespoke.models.fast.token_loss import Head
from bespoke.models.task import BaseTask
from bespoke.tensors import Params
from command import bespoke, refused
from small_worlds import BATCH, World, world

ROUNDED = 2.0**-8  # bfloat16 has eight significant bits
NETWORKS = ("mlp", "cnn", "lstm")
LOOP = Choice(False, 1, 0, 1, "autograd", "")
ENGINES = {"loop": LOOP, "func": Choice(True, 3, 0, 1, "func", "")}

TOML = """
[data]
source = "digits"
[model]
name = "mlp"
hidden = [16]
[engine]
kind = "looped"
precision = "bf16"
[[stage]]
method = "fedavg"
rounds = 4
lr = 0.1
"""


def rows_of(place: World) -> Params:
    columns = {name: column[:8] for name, column in place.population.columns.items() if name in ("x", "y")}
    return {**columns, "mask": torch.ones(8)}


def in_double(task: BaseTask, params: Params, batch: Params) -> Params:
    """The gradient by the textbook, in float64."""
    live = {name: p.double().requires_grad_() for name, p in params.items()}
    outputs = task.network(live, batch["x"].double() if batch["x"].is_floating_point() else batch["x"])
    y = batch["y"].long()
    counted = (y != 0).double() if y.dim() > 1 else torch.ones(len(y), dtype=torch.float64)
    each = F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none")
    loss = (each * counted.flatten()).sum() / counted.sum()
    return dict(zip(live, torch.autograd.grad(loss, list(live.values()))))


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_a_gradient_is_off_by_the_rounding_of_bfloat16_and_by_no_more(name: str) -> None:
    place = world(name)
    params, batch = place.task.init(5), rows_of(place)
    expected = in_double(place.task, params, batch)
    size = sum(float((g * g).sum()) for g in expected.values()) ** 0.5

    def error(task: BaseTask) -> float:
        found = task.gradient(params, batch)
        assert all(leaf.dtype == torch.float32 for leaf in found.values())
        return sum(float(((found[n].double() - g) ** 2).sum()) for n, g in expected.items()) ** 0.5 / size

    assert error(place.task) < 1e-5
    assert 1e-4 < error(place.task.differentiated("autograd", "bf16")) < 4 * ROUNDED


def test_a_step_of_the_head_by_hand() -> None:
    """Zero weights: all words are equally likely, so the slope is 1/4 but for the target, 1/4 - 1. All are exact."""
    features, targets = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 3])
    head = Head(torch.zeros(4, 2), torch.zeros(4))
    below = head.step(features, targets, torch.ones(2, dtype=torch.bool), rate=2.0, low=True)
    assert below.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert head.weight.tolist() == [[0.0, 0.5], [-1.0, -1.5], [-1.0, -1.5], [2.0, 2.5]]
    assert head.bias.tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_round_is_off_by_rounding_on_every_engine(name: str) -> None:
    """What three rounds change agrees with float32 up to rounding; what is kept and sent is float32."""
    place, changes = world(name), {}
    start = place.task.init(5)
    method = FedAvg(place.task, lr=0.1, batch_size=BATCH)
    for how, choice in ENGINES.items():
        if how == "func" and not place.task.vectorizes:
            continue
        for precision in ("float32", "bf16"):
            with Engine(place.population, replace(choice, precision=precision)) as engine:
                engine.open(ClientWork(method, place.split.train), start)
                server = method.init_server(start, Setting(0, 7))
                for key in range(3):
                    result = engine.round(server, np.arange(7), key)
                    assert result.bytes_up == 7 * 4 * (sum(p.numel() for p in start.values()) + 1)
                    server = method.server_round(server, result.cohort)
            assert all(p.dtype == torch.float32 for p in server["params"].values())
            changes[how, precision] = torch.cat([(p - start[n]).flatten() for n, p in server["params"].items()])
    exact = changes["loop", "float32"]
    for (_, precision), change in changes.items():
        error = float((change - exact).norm() / exact.norm())
        assert error < 1e-4 if precision == "float32" else 1e-4 < error < 32 * ROUNDED  # units near zero flip


@pytest.mark.parametrize("name", NETWORKS)
def test_scores_are_in_float32(name: str) -> None:
    """The same model has the same scores whatever the precision of training, to the last bit."""
    place = world(name)
    method, start, test = FedAvg(place.task), place.task.init(5), place.split.test
    found = []
    for precision in ("float32", "bf16"):
        with Engine(place.population, replace(LOOP, precision=precision)) as engine:
            engine.open(ClientWork(method, place.split.train), start)
            server = method.init_server(start, Setting(0, 7))
            scores = engine.examine(server, test.query.clients, test.support, {"query": test.query}, key=9)
            found.append(scores["query"])
    assert all(np.array_equal(found[0][metric], found[1][metric]) for metric in found[0])


def test_linear_models_stay_in_float32() -> None:
    """They are compiled, or solved: the choice says that it did not do what was asked, and why."""
    place = world("linear")
    work = ClientWork(FedAvg(place.task), place.split.train)
    chosen = choose(place.population, work, place.task.init(0), 3, precision="bf16")
    assert chosen.precision == "float32"
    assert "float32" in chosen.text()


def test_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "low.toml").write_text(TOML)
    (tmp_path / "high.toml").write_text(TOML.replace("bf16", "float32"))
    for name in ("low", "high"):
        assert bespoke("run", tmp_path / f"{name}.toml", "--out", tmp_path / name).code == 0
    assert json.loads((tmp_path / "low/engine.json").read_text())["precision"] == "bf16"
    scores = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("low", "high")]
    assert scores[0] != scores[1]
    (tmp_path / "odd.toml").write_text(TOML.replace("bf16", "fp8"))
    refused(bespoke("run", tmp_path / "odd.toml", "--out", tmp_path / "odd"), "engine.precision", "float32", "bf16")
