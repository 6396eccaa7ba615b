"""Learning-rate schedules against torch.optim.lr_scheduler, and in whole runs: resumed, vectorized, by hand."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from bespoke.data.splits import everything
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.experiment.stage import check_stage
from bespoke.federation.batches import Orders
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.method import Batching
from bespoke.methods import METHODS, FedAvg, FineTune, Scaffold
from bespoke.methods.parts.descend import descend
from bespoke.methods.parts.schedule import Schedule, at
from bespoke.runs.events import Interrupted
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.tensors import flatten, take
from kills import assert_identical, contents
from small_worlds import SIZES, world

PLACE = world("mlp")
LR = 0.4


def torch_rates(make: Any, many: int) -> list[float]:
    """The rates of a scheduler that is stepped after every round (or step)."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler, rates = make(optimizer), []
    for _ in range(many):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def warmed(after: Any) -> Any:
    """Two rounds of warm-up, a third and two thirds of the rate, and then another schedule."""

    def make(optimizer: Any) -> Any:
        first = lr_scheduler.LinearLR(optimizer, start_factor=1 / 3, total_iters=2)
        return lr_scheduler.SequentialLR(optimizer, [first, after(optimizer)], milestones=[2])

    return make


CASES: list[tuple[Schedule, Any]] = [
    (Schedule("cosine", rounds=12), lambda o: lr_scheduler.CosineAnnealingLR(o, 12)),
    (Schedule("cosine", rounds=12, floor=0.25), lambda o: lr_scheduler.CosineAnnealingLR(o, 12, eta_min=0.25 * LR)),
    (Schedule("linear", rounds=9, floor=0.1), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=9)),
    (Schedule("step", gamma=0.3, every=4), lambda o: lr_scheduler.StepLR(o, 4, gamma=0.3)),
    (Schedule("exponential", gamma=0.8, every=1), lambda o: lr_scheduler.ExponentialLR(o, 0.8)),
    (Schedule("inverse-sqrt", every=3), lambda o: lr_scheduler.LambdaLR(o, lambda t: (1 + t / 3) ** -0.5)),
    (Schedule("cosine", rounds=12, warmup=2), warmed(lambda o: lr_scheduler.CosineAnnealingLR(o, 10))),
    (Schedule("constant", warmup=2), lambda o: lr_scheduler.LinearLR(o, start_factor=1 / 3, total_iters=2)),
]


@pytest.mark.parametrize(("schedule", "theirs"), CASES)
def test_rates_are_those_of_torch(schedule: Schedule, theirs: Any) -> None:
    found = [LR * float(schedule.factor(number)) for number in range(1, 13)]
    np.testing.assert_allclose(found, torch_rates(theirs, 12), rtol=1e-6)


def test_by_step_a_round_of_five_steps_is_five_steps_of_torch() -> None:
    """Three rounds of five steps are a cosine over fifteen; a tensor of parts gives the same."""
    schedule = Schedule("cosine", rounds=3, by_step=True)
    expected = torch_rates(lambda o: lr_scheduler.CosineAnnealingLR(o, 15), 15)
    found = [LR * schedule.factor(1 + place // 5, place % 5 / 5) for place in range(15)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    parts = torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8])
    np.testing.assert_allclose(LR * schedule.factor(2, parts), expected[5:10], rtol=1e-5)


def test_after_its_rounds_a_schedule_stays_at_its_floor() -> None:
    assert [Schedule(name, rounds=3, floor=0.2).factor(9) for name in ("linear", "cosine")] == pytest.approx([0.2, 0.2])
    assert Schedule("exponential", gamma=0.1, every=1, floor=0.05).factor(4) == pytest.approx(0.05)


def test_padding_takes_no_time() -> None:
    """Clients of different sizes, each over its own steps: padded under vmap they train as they do alone."""
    schedule = Schedule("linear", rounds=2, by_step=True)
    drawn = Orders.draw(everything(PLACE.population), np.arange(len(SIZES)), Batching(4, 2), key=3)
    drawn = Orders(drawn.layout, drawn.columns, drawn.rows, drawn.own, 2)
    start, stacked = PLACE.task.init(1), drawn.stacked(np.arange(len(SIZES)))
    task = PLACE.task.differentiated("func")

    def run(mine: Any) -> Any:
        batches = stacked.of_client(mine)
        return descend(task, start, batches, lr=schedule.of(LR, batches))

    together = torch.func.vmap(run)(stacked.mapped())
    for client in range(len(SIZES)):
        batches = drawn.sliced(client)
        rate = schedule.of(LR, batches)
        assert at(rate, 0) == pytest.approx(LR / 2)  # half of all steps are behind
        alone = descend(PLACE.task, start, batches, lr=rate)
        torch.testing.assert_close(take(together, client), alone, rtol=1e-4, atol=1e-5)


# -- in rounds ---------------------------------------------------------------------------------------------------------
HOW = {"looped": Choice(False, 1, 0, 1, "autograd", ""), "fused": Choice(True, 64, 0, 1, "fused", "")}


@pytest.mark.parametrize("how", HOW)
def test_a_round_is_trained_at_its_rate(how: str) -> None:
    """Round 3 of a schedule is a round at its rate without one, compiled too; personal models are made at full rate."""
    place = world("linear")
    factor = (1 + math.cos(math.pi / 2)) / 2
    found = []
    for made in (
        FedAvg(place.task, lr=0.2, schedule=Schedule("cosine", rounds=4)),
        FedAvg(place.task, lr=0.2 * factor),
    ):
        with Engine(place.population, HOW[how]) as engine:
            engine.open(ClientWork(made, place.split.train), place.task.init(5))
            done = engine.round(made.init_server(place.task.init(5)), np.arange(7), key=1, number=3)
        found.append((flatten(done.cohort.sums), done.bytes_up, done.bytes_down))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]  # nothing more travels
    assert Schedule("cosine", rounds=4).factor(0) == 1.0


def test_scaffold_s_control_is_the_mean_gradient_whatever_the_rates() -> None:
    """One row, a gradient that is the same everywhere (a hinge beyond its kink): the control is that gradient."""
    place = world("linear")
    for by_step in (False, True):
        made = Scaffold(place.task, lr=1e-4, epochs=3, schedule=Schedule("linear", rounds=4, by_step=by_step))
        batches = Orders.draw(place.split.train, np.array([6]), made.batching(), 1)
        batches = Orders(batches.layout, batches.columns, batches.rows, batches.own, 2)
        start = place.task.init(1)
        down = {"params": start, "control": {name: torch.zeros_like(p) for name, p in start.items()}}
        private, _ = made.client_round(down, made.init_private(start), batches.sliced(0))
        expected = place.task.gradient(start, batches.sliced(0).rows())
        torch.testing.assert_close(private["control"], expected, rtol=0.02, atol=2e-3)


def test_fine_tuning_counts_epochs() -> None:
    """Cosine over three epochs: full, three quarters, one quarter of the rate."""
    made = FineTune(PLACE.task, lrs=(LR,), epochs=3, schedule=Schedule("cosine"))
    batches = Orders.draw(PLACE.split.train, np.array([6]), made.support_batching(), 1).sliced(0)
    start = PLACE.task.init(1)
    _, *found = made.personalize({"params": start}, {}, batches)
    expected = start
    for model, part, epoch in zip(found, (1.0, 0.75, 0.25), batches.epochs()):
        expected = descend(PLACE.task, expected, epoch, lr=LR * part)
        torch.testing.assert_close(model, expected)


# -- in whole runs -----------------------------------------------------------------------------------------------------
CONFIG = """
evaluate_every = 100
[data]
source = "digits"
[cohort]
size = 5
[engine]
kind = "looped"
[[stage]]
method = "fedavg"
rounds = 6
lr = 0.3
optimizer = { name = "adamw", weight_decay = 0.01 }
schedule = { name = "cosine", warmup = 2, by_step = true }
"""


def test_a_resumed_run_has_the_same_bytes(tmp_path: Path) -> None:
    """Stopped after the third round, within the cosine; the schedule has the stage's six rounds."""
    experiment = build(checked(tomllib.loads(CONFIG), "here"))
    assert experiment.stages[0].method.schedule == Schedule("cosine", rounds=6, warmup=2, by_step=True)  # type: ignore[attr-defined]
    folders = [RunFolder.create(tmp_path / name / "run", "") for name in ("whole", "stopped")]
    Run(experiment, folders[0]).run()
    calls = iter([False, False, True])
    with pytest.raises(Interrupted):
        Run(experiment, folders[1], stop=lambda: next(calls, False)).run()
    Run(experiment, folders[1]).run()
    assert_identical(contents(folders[1].path), contents(folders[0].path), "stopped after three rounds")


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"rounds": "auto", "schedule": "cosine"}, "needs rounds where the stage has as many as it takes"),
        ({"rounds": 20, "schedule": {"name": "linear", "rounds": 10}}, "there are 20 rounds.*rate of zero"),
        ({"rounds": 5, "schedule": {"name": "cosine", "warmup": 5}}, "warmup = 5 leaves nothing of 5 rounds"),
        ({"rounds": 5, "schedule": {"name": "cosine", "rounds": 4, "warmup": 9}}, "warmup = 9 leaves nothing"),
        ({"rounds": 5, "schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"rounds": 5, "schedule": {"floor": 2.0}}, "floor = 2.0"),
        ({"method": "self-fl", "rounds": 5, "schedule": {"name": "step", "by_step": True}}, "one rate for all of a"),
        ({"method": "finetune", "epochs": 9, "schedule": {"name": "linear", "rounds": 3}}, "there are 9 epochs"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(stage: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_stage({"method": "fedavg", **stage}, "stage 0")


def test_a_schedule_takes_its_rounds_from_the_stage() -> None:
    for stage in ({"rounds": 7, "schedule": "cosine"}, {"rounds": "auto", "schedule": {"name": "cosine", "rounds": 7}}):
        schedule = check_stage({"method": "fedavg", **stage}, "stage 0").knobs["schedule"]
        assert schedule == Schedule("cosine", rounds=7)
    assert all("schedule" in set(kind.__dataclass_fields__) for kind in METHODS.values() if hasattr(kind, "lr"))
