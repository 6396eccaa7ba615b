"""SCAFFOLD: numbers that can be checked by hand, and what control variates are for.

One row x = 1: weight and bias are equal at all times, u say, and both slopes are 2 u - y.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bespoke.data.splits import cross_device
from bespoke.errors import UserError
from bespoke.experiment.checks import checked
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.method import Cohort, Setting
from bespoke.methods import FedAvg, Scaffold
from bespoke.tensors import norm
from by_hand import TASK, ZERO, batches_of, numbers, rounds
from small_worlds import BATCH, SIZES, world


@pytest.mark.parametrize("option", ["I", "II"])
def test_two_rounds_by_hand(option: Any) -> None:
    """Targets 1 and 3, lr 0.1. First round, no correction yet: y = 0.1 and 0.3, c_k = -1 and -3, x = 0.2, c = -2.

    Second: slopes 0.4 - 1 and 0.4 - 3, corrected -0.6 + 1 - 2 = -2.6 + 3 - 2 = -1.6: both clients go to 0.36. Controls
    are the slopes at 0.2: -0.6 and -2.6, and their mean.
    """
    made = Scaffold(TASK, lr=0.1, option=option)
    batches = {0: batches_of([1.0], [1.0], made), 1: batches_of([1.0], [3.0], made)}
    server, private = rounds(made, batches, 1)
    assert numbers(server["params"]) == pytest.approx((0.2, 0.2))
    assert [numbers(private[k]["control"])[0] for k in (0, 1)] == pytest.approx([-1, -3])
    assert numbers(server["control"]) == pytest.approx((-2, -2))
    server, private = rounds(made, batches, 2)
    assert numbers(server["params"]) == pytest.approx((0.36, 0.36))
    assert [numbers(private[k]["control"])[0] for k in (0, 1)] == pytest.approx([-0.6, -2.6], rel=1e-5)
    assert numbers(server["control"]) == pytest.approx((-1.6, -1.6), rel=1e-5)


def test_options_differ_over_several_steps() -> None:
    """Target 1, two epochs of one step, lr 0.1: y = 0.1, 0.18. I: the slope at 0, -1. II: the mean of -1 and -0.8.

    With weight decay 0.5 the second slope is -0.8 + 0.05: y = 0.175, and II has the mean of -1 and -0.75.
    """
    for option, decay, expected in (("I", 0.0, -1.0), ("II", 0.0, -0.9), ("I", 0.5, -1.0), ("II", 0.5, -0.875)):
        made = Scaffold(TASK, lr=0.1, option=option, epochs=2, weight_decay=decay)  # type: ignore[arg-type]
        _, private = rounds(made, {0: batches_of([1.0], [1.0], made)}, 1)
        assert numbers(private[0]["control"])[0] == pytest.approx(expected)


def test_safe_steps_leave_the_control_right() -> None:
    """Target 1, lr 10: the row's curvature is 2, so the step has the rate 0.5 and ends at u = 0.5. The slope was -1."""
    made = Scaffold(replace(TASK, safe=True), lr=10.0)
    server, private = rounds(made, {0: batches_of([1.0], [1.0], made)}, 1)
    assert numbers(server["params"]) == pytest.approx((0.5, 0.5))
    assert numbers(private[0]["control"]) == pytest.approx((-1, -1))


def test_the_gradient_of_option_one_is_that_of_all_rows() -> None:
    """Of uneven batches too, and with weight decay."""
    made = Scaffold(TASK, option="I", batch_size=2, weight_decay=0.3)
    batches = batches_of([1.0, 2.0, -1.0, 0.5, 3.0], [2.0, 1.0, 0.0, 1.0, 4.0], made).part(1, 2)
    at = {"weight": torch.tensor([[0.4]]), "bias": torch.tensor([-0.2])}
    whole = TASK.gradient(at, batches.rows())
    expected = (whole["weight"].item() + 0.3 * 0.4, whole["bias"].item() - 0.3 * 0.2)
    assert numbers(made.gradient(at, batches)) == pytest.approx(expected)


@pytest.mark.parametrize("setting", [Setting(0, 4), Setting(0, 10, 4)])
def test_the_common_control_counts_all_clients_that_may_train(setting: Setting) -> None:
    """Two of four take part: c = (-1 - 3) / 4; the six that are held out for tests do not count."""
    made = Scaffold(TASK, lr=0.1)
    server = made.init_server(ZERO, setting)
    sent = [
        made.client_round(made.broadcast(server), made.init_private(ZERO), batches_of([1.0], [y], made))[1]
        for y in (1.0, 3.0)
    ]
    sums = {n: torch.utils._pytree.tree_map(lambda *a: sum(a), *[up[n] for up in sent]) for n in sent[0]}
    server = made.server_round(server, Cohort(sums, {}, (0, 1)))
    assert numbers(server["control"]) == pytest.approx((-1, -1))
    assert numbers(server["params"]) == pytest.approx((0.2, 0.2))  # the mean is that of those who came


def test_a_run_tells_how_many_clients_may_train() -> None:
    place = world("linear")
    made = Scaffold(place.task)
    split = cross_device(place.population, (0.2, 0.3), 0.5, seed=3)
    experiment = Experiment("x", place.population, split, place.task, (Stage(made, 1),), "mse")
    found = experiment.setting(0)
    assert (found.clients, found.training) == (7, len(split.train.clients))
    assert 0 < found.training < 7
    assert made.init_server(place.task.init(1), found)["clients"] == found.training


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize(
    "choice", [Choice(False, 1, 0, 1, "autograd", ""), Choice(True, 64, 0, 1, "fused", "")], ids=["loop", "fused"]
)
def test_the_common_control_is_the_mean_of_all(option: Any, choice: Choice) -> None:
    """At all times, whoever is sampled."""
    place = world("linear")
    made = Scaffold(place.task, lr=0.05, option=option, epochs=2, batch_size=BATCH)
    params = place.task.init(5)
    server = made.init_server(params, Setting(0, len(SIZES)))
    with Engine(place.population, choice) as engine:
        engine.open(ClientWork(made, place.split.train), params)
        for key, cohort in enumerate(((1, 3, 6), (3, 5), (0, 1, 2, 3, 4, 5, 6), (2, 6))):
            server = made.server_round(server, engine.round(server, np.array(cohort), key=key).cohort)
            assert engine.host is not None
            kept = engine.host.private.read(range(7))["control"]
            for name, leaf in server["control"].items():
                torch.testing.assert_close(leaf, kept[name].mean(0), rtol=1e-4, atol=1e-5)


def test_it_goes_where_averages_of_long_local_training_do_not() -> None:
    """Two clients of different curvature: FedAvg of 20 steps stops short, SCAFFOLD at the minimum of the mean loss."""
    rows = {0: ([1.0, 0.5], [1.0, 2.0]), 1: ([3.0, -1.0], [0.0, 1.0])}
    slope = {}
    for kind in (FedAvg, Scaffold):
        made = kind(TASK, lr=0.05, epochs=20, weighting="uniform")
        batches = {client: batches_of(*xy, made) for client, xy in rows.items()}
        server, _ = rounds(made, batches, 300)
        each = [TASK.gradient(server["params"], mine[0]) for mine in batches.values()]
        slope[kind] = float(norm({name: (each[0][name] + each[1][name]) / 2 for name in ZERO}))
    assert slope[Scaffold] < 1e-4
    assert slope[FedAvg] > 0.02


def test_weights_by_examples_are_refused() -> None:
    stage = {"method": "scaffold", "rounds": 1, "weighting": "examples"}
    with pytest.raises(UserError, match=r"weighting.*uniform"):
        checked({"data": {"source": "school"}, "stage": [stage]}, "test")
