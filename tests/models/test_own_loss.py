"""Losses of one's own: on every kind of model, as by hand, and never beside a closed form of another loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bespoke
import own_losses
from bespoke.data.population import Population
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.experiment.experiment import Experiment, engine_choice
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.imported import handed_over
from bespoke.models import build_task
from bespoke.tensors import Params

LOOP = Choice(False, 1, 0, 1, "autograd", "")
STACKED = Choice(True, 3, 0, 1, "func", "")
FEDAVG = {"method": "fedavg", "rounds": 1, "lr": 0.5, "batch_size": 1000, "epochs": 1}


@pytest.fixture(scope="module")
def numbers() -> Population:
    """A regression with a centre and a unit of its own, in clients of unequal size."""
    draw = np.random.default_rng(3)

    def rows(many: int) -> tuple[Any, Any]:
        x = draw.standard_normal((many, 2))
        return x, 40 + 7 * (x @ [1.0, -2.0] + draw.standard_normal(many))

    return bespoke.population({f"c{i}": rows(20 + 9 * i) for i in range(4)}, task="regression")


@pytest.fixture(scope="module")
def classes() -> Population:
    draw = np.random.default_rng(4)
    rows = {f"c{i}": (draw.standard_normal((20 + 9 * i, 3)), np.arange(20 + 9 * i) % 3) for i in range(4)}
    return bespoke.population(rows, task="classification")


def experiment(people: Population, loss: Any, *stages: dict[str, Any], **more: Any) -> Experiment:
    named = loss if isinstance(loss, str) else handed_over(loss)
    model = {"name": "linear", **more.pop("model", {}), "loss": named}
    stage = list(stages) or [FEDAVG]
    return build(checked({"data": {"population": "here"}, "model": model, "stage": stage, **more}, "test"), people)


def a_round(made: Experiment, clients: list[int], choice: Choice, start: Params) -> Params:
    method = made.stages[0].method
    with Engine(made.population, choice) as engine:
        engine.open(ClientWork(method, made.split.train, ()), start)
        server = method.init_server(start, made.setting(0))
        done = engine.round(server, np.array(clients), 7)
        return method.params(method.server_round(server, done.cohort))


@pytest.mark.parametrize("choice", [LOOP, STACKED], ids=["loop", "stacked"])
@pytest.mark.parametrize("safe", [False, True])
def test_a_step_of_the_absolute_error_is_the_mean_of_signs(numbers: Population, choice: Choice, safe: bool) -> None:
    """By hand: the gradient is mean(sign(w'x + b - y) (x, 1)) on a client's rows; closed forms are of the square."""
    made = experiment(numbers, own_losses.absolute, safe_steps=safe)
    assert not made.task.has_closed_form
    assert made.task.linear() is None
    start = {"weight": torch.tensor([[0.3, 0.1]]), "bias": torch.tensor([0.2])}
    moved, sizes = [], []
    for client in (1, 3):
        rows, _ = made.split.train.of(np.array([client]))
        x, y = (made.population.columns[name][rows].double().numpy() for name in ("x", "y"))
        sign = np.sign(x @ [0.3, 0.1] + 0.2 - y)
        slope = np.append((sign[:, None] * x).mean(0), sign.mean())
        moved.append(np.array([0.3, 0.1, 0.2]) - 0.5 * slope)
        sizes.append(len(y))
    wanted = np.average(moved, axis=0, weights=sizes)
    found = a_round(made, [1, 3], choice, start)
    together = np.append(found["weight"].numpy()[0], found["bias"].numpy())
    np.testing.assert_allclose(together, wanted, rtol=1e-4, atol=1e-5)


def test_how_it_is_executed(numbers: Population) -> None:
    """No kernel and no closed form; what vmap cannot run, or what padding would spoil, goes client by client."""
    plain = build(
        checked({"data": {"population": "here"}, "model": {"name": "linear"}, "stage": [FEDAVG]}, "t"), numbers
    )
    assert engine_choice(plain).gradient in ("fused", "closed-form")
    chosen = engine_choice(experiment(numbers, own_losses.absolute))
    assert chosen.gradient == ("func" if chosen.vectorized else "autograd")
    for loss, why in ((own_losses.stubborn, "vmap cannot run"), (own_losses.logarithm, "targets of zero")):
        made = experiment(numbers, loss)
        chosen = engine_choice(made)
        assert (chosen.vectorized, chosen.gradient) == (False, "autograd")
        assert why in chosen.reason
        with pytest.raises(UserError, match=why):
            engine_choice(experiment(numbers, loss, engine={"kind": "vectorized"}))


def test_focal_loss_is_trained_and_scored(classes: Population) -> None:
    """By NumPy: (1 - p)^2 (-log p) of the right class, of a network and as the metric `loss`."""
    made = experiment(classes, own_losses.focal, model={"name": "mlp", "hidden": [4]}, metric="loss")
    params = made.task.init(3)
    batch = {name: classes.columns[name][:9] for name in ("x", "y")} | {"mask": torch.ones(9)}
    outputs = made.task.predict(params, batch).double().numpy()
    p = (np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True))[np.arange(9), batch["y"].numpy()]
    by_hand = (1 - p) ** 2 * -np.log(p)
    assert float(made.task.loss(params, batch)) == pytest.approx(by_hand.mean(), rel=1e-5)
    assert float(made.task.score(torch.from_numpy(outputs).float(), batch)["loss"]) == pytest.approx(
        by_hand.sum(), rel=1e-5
    )
    np.testing.assert_allclose(made.task.row_values(torch.from_numpy(outputs), batch, "loss"), by_hand, rtol=1e-5)
    loop, stacked = (a_round(made, [0, 2, 3], choice, params) for choice in (LOOP, STACKED))
    for name, leaf in loop.items():
        torch.testing.assert_close(stacked[name], leaf, rtol=1e-4, atol=1e-5)


def test_the_median_comes_of_the_absolute_error() -> None:
    """A constant under |error| is the median of all rows, where the square would give the mean."""
    draw = np.random.default_rng(0)
    y = draw.exponential(10.0, 400)
    people = bespoke.population({"a": (np.zeros((400, 1)), y)}, task="regression")
    made = experiment(people, own_losses.absolute)
    task: Any = made.task
    params = task.init(0)
    for rate in (0.3, 0.1, 0.03, 0.01):
        for _ in range(60):
            batch = {name: made.population.columns[name] for name in ("x", "y")} | {"mask": torch.ones(400)}
            slope = task.gradient(params, batch)
            params = {name: p - rate * slope[name] for name, p in params.items()}
    unit, centre = task.unit, float(made.population.about.get("centre", 0.0))
    assert float(params["bias"]) * unit + centre == pytest.approx(np.median(y), abs=0.02 * unit)
    assert abs(np.median(y) - y.mean()) > 0.2 * unit


def test_a_users_own_model_takes_one_too(numbers: Population) -> None:
    model = bespoke.model(lambda: nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)))
    made = experiment(numbers, own_losses.absolute, model={"name": model.name()})
    batch = {name: numbers.columns[name][:5] for name in ("x", "y")} | {"mask": torch.ones(5)}
    params = made.task.init(1)
    outputs = batch["x"] @ params["0.weight"][0] + params["0.bias"]
    assert float(made.task.loss(params, batch)) == pytest.approx(float((outputs - batch["y"]).abs().mean()), rel=1e-5)
    both = bespoke.model(lambda: nn.Linear(2, 1), loss=own_losses.absolute)
    with pytest.raises(UserError, match="has a loss already"):
        experiment(numbers, own_losses.absolute, model={"name": both.name()})


def column(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[:, None] - y).abs().mean(1)  # a matrix by mistake


def mean(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).abs().mean()


def probability(outputs: Tensor, y: Tensor) -> Tensor:
    return -torch.log(outputs) * y


def detached(outputs: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(np.abs(outputs.detach().numpy() - y.numpy()))


def broken(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs.argmax(5)


def infinite_slope(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs - outputs.detach()) ** 2 + 0 * y).sqrt()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (mean, r'of shape \(\) for 4 rows.*reduction="none"'),
        (column, "beside other rows than alone"),
        (probability, r"the loss .*probability is (nan|inf|-inf) for the outputs"),
        (detached, "no gradient.*NumPy"),
        (broken, r"broken fails on 4 rows with outputs of shape \(4,\)"),
        (infinite_slope, "gradient that is not finite"),
        (lambda outputs, y: (outputs - y) ** 2, "lambda"),
    ],
)
def test_what_does_not_fit(numbers: Population, loss: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        experiment(numbers, loss)


def test_where_it_does_not_fit(numbers: Population, classes: Population) -> None:
    two = bespoke.population({"a": (np.eye(20), np.arange(20) % 2)}, task="classification")
    with pytest.raises(UserError, match=r"'svm' is the one with the hinge"):
        experiment(two, own_losses.focal, model={"name": "svm"})
    with pytest.raises(UserError, match=r"shared needs .*cannot solve the loss own_losses:absolute"):
        experiment(numbers, own_losses.absolute, {"method": "shared", "rounds": 1})
    with pytest.raises(UserError, match=r"mixed needs .*cannot solve the loss own_losses:absolute"):
        experiment(numbers, own_losses.absolute, {"method": "mixed", "rounds": 1})
    with pytest.raises(UserError, match="solver = 'exact' needs"):
        experiment(numbers, own_losses.absolute, {"method": "local", "solver": "exact"})
    with pytest.raises(UserError, match="unknown loss 'huber'"):
        experiment(numbers, "huber")
    with pytest.raises(UserError, match="is not a loss, a function of"):
        experiment(numbers, nn.HuberLoss)
    about: Any = {"task": "language", "input": "tokens", "vocabulary": 9, "name": "t"}
    with pytest.raises(UserError, match="the next word is predicted"):
        build_task(about, "lstm", rows=dict, loss=handed_over(own_losses.focal))
