"""Metrics of one's own: shown the rows that count, in the target's units, one client at a time on every engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bespoke
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.methods import FineTune
from bespoke.models.language import LanguageModel
from bespoke.models.networks import LSTM, Linear
from bespoke.models.own_metric import Metric
from bespoke.models.task import Regression
from small_worlds import world


@bespoke.metric(better="lower", name="furthest")
def furthest(outputs: Tensor, y: Tensor) -> float:
    """The largest error: no mean over rows, and no tensor."""
    return max(abs(float(a) - float(b)) for a, b in zip(outputs, y))


def examined(metrics: tuple[Metric, ...], vectorized: bool, centre: float = 0.0) -> dict[str, np.ndarray[Any, Any]]:
    place = world("linear")
    task = place.task.with_metrics(metrics, centre)
    method = FineTune(task, lrs=(0.1,), epochs=2)
    choice = Choice(vectorized, 3, 0, 1, "func" if vectorized else "autograd", "")
    with Engine(place.population, choice) as engine:
        engine.open(ClientWork(method, place.split.train, ()), task.init(5))
        test = place.split.test
        parts: Any = {"query": test.query}
        server = method.init_server(task.init(5))
        return engine.examine(server, test.query.clients, test.support, parts, key=9)["query"]


def test_in_units_and_the_same_where_clients_are_stacked() -> None:
    shown: list[Tensor] = []

    @bespoke.metric(better="higher")
    def many(outputs: Tensor, y: Tensor) -> int:
        shown.append(y)
        return len(outputs)

    alone, stacked = examined((furthest, many), False, 10.0), examined((furthest, many), True, 10.0)
    assert alone.keys() == stacked.keys()
    for name, values in alone.items():
        np.testing.assert_allclose(stacked[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
    assert (stacked["many"] == stacked["count"]).all()  # padding is not shown
    place = world("linear")  # candidate 0 is the start: its error by hand, with the task's unit of 2
    start = place.task.init(5)
    for at, client in enumerate(place.split.test.query.clients):
        own, _ = place.split.test.query.of(np.array([client]))
        x, y = (place.population.columns[name][own] for name in ("x", "y"))
        error = 2.0 * (x @ start["weight"].T + start["bias"])[:, 0] - 2.0 * y
        assert stacked["furthest"][at, 0] == pytest.approx(float(error.abs().max()), rel=1e-4)
    known = 2.0 * place.population.columns["y"] + 10.0
    assert all(bool(torch.isclose(known, value, atol=1e-4).any()) for y in shown for value in y)


@bespoke.metric(better="lower")
def absolute(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).abs().mean()  # of a column and a row this would be a matrix


def test_a_regressions_outputs_have_the_shape_of_its_targets() -> None:
    found = examined((absolute,), True)
    known = found["mae"] / found["count"]
    np.testing.assert_allclose(found["absolute"], known, rtol=1e-4)
    draw = np.random.default_rng(0)
    people = bespoke.population({"a": (draw.standard_normal((40, 2)), draw.standard_normal(40) * 9 + 50)})
    net = bespoke.model(
        lambda: nn.Linear(2, 1), metrics={"absolute": absolute}, loss=lambda o, y: ((o - y) ** 2).mean()
    )
    stage = {"method": "fedavg", "rounds": 1}
    made = build(checked({"data": {"population": "x"}, "model": {"name": net.name()}, "stage": [stage]}, "t"), people)
    batch = {name: people.columns[name] for name in ("x", "y")} | {"mask": torch.ones(40)}
    params = made.task.init(1)
    sums = made.task.score(made.task.predict(params, batch), batch)
    assert float(sums["absolute"]) == pytest.approx(float(sums["mae"] / 40), rel=1e-5)
    outputs = nn.functional.linear(batch["x"], params["weight"], params["bias"])[:, 0]
    by_hand = float(((outputs - batch["y"]) ** 2).mean())
    assert float(made.task.loss(params, batch)) == pytest.approx(by_hand, rel=1e-5)


def test_what_is_refused() -> None:
    task = Regression(Linear(3))
    assert task.with_metrics((furthest,)).lower_is_better[-1] == "furthest"
    with pytest.raises(UserError, match="'mse' is the name of two metrics"):
        task.with_metrics((replace(furthest, name="mse"),))
    with pytest.raises(UserError, match="cannot be called 'rows'"):
        task.with_metrics((replace(furthest, name="rows"),))
    with pytest.raises(UserError, match="too many to be held"):
        LanguageModel(LSTM(7, 3, 4, 1)).with_metrics((furthest,))
    with pytest.raises(UserError, match="unknown direction 'up'"):
        bespoke.metric(better="up")
    with pytest.raises(UserError, match="has to return a number"):
        Metric("text", lambda outputs, y: "much", "lower")(torch.zeros(2, 1), torch.zeros(2))
    with pytest.raises(UserError, match=r"fails on a client's 2 rows: ZeroDivisionError.*NaN"):
        Metric("ratio", lambda outputs, y: 1 / 0, "lower")(torch.zeros(2, 1), torch.zeros(2))
