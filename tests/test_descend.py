"""Gradient descent by hand: one parameter w with the loss w^2 / 2, whose gradient is w itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bespoke.methods.parts.client_optimizer import ClientOptimizer
from bespoke.methods.parts.descend import descend
from bespoke.tensors import Params


class Square:
    """The loss (w^2 + v^2) / 2, whatever the rows are."""

    def gradient(self, params: Params, batch: Params) -> Params:
        return dict(params)

    def stepped(self, params: Params, batch: Params, still: bool = False) -> tuple[Params, Params]:
        return self.gradient(params, batch), {}

    def safe_rate(self, params: Params, batches: Any, lr: float, more: float) -> float:
        return lr

    def descend(self, params: Params, batches: Any, lr: float, *terms: Any) -> Params | None:
        return None


class Steps:
    """Batches without rows; `live` says of each step whether it only pads."""

    def __init__(self, *live: Any) -> None:
        self.lives = live

    def __len__(self) -> int:
        return len(self.lives)

    def __getitem__(self, step: int) -> Params:
        return {}

    def live(self, step: int) -> Any:
        return self.lives[step]


TASK: Any = Square()
ON, OFF = torch.tensor(1.0), torch.tensor(0.0)


def after(*live: Any, start: float = 1.0, momentum: float = 0.0, weight_decay: float = 0.0, **knobs: Any) -> float:
    steps: Any = Steps(*live)
    optimizer = ClientOptimizer().joined(momentum, weight_decay)
    return float(descend(TASK, {"w": torch.tensor([start])}, steps, lr=0.1, optimizer=optimizer, **knobs)["w"])


def test_plain_steps() -> None:
    """Each step leaves nine tenths."""
    assert after(1.0, 1.0, 1.0) == pytest.approx(0.729)


@pytest.mark.parametrize("live", [1.0, ON], ids=["exact", "padded"])
def test_momentum_by_hand(live: Any) -> None:
    """m = 0.5: velocities 1, 0.5 + 0.9 = 1.4, 0.7 + 0.76 = 1.46; so w is 0.9, 0.76, 0.614."""
    assert after(live, momentum=0.5) == pytest.approx(0.9)
    assert after(live, live, momentum=0.5) == pytest.approx(0.76)
    assert after(live, live, live, momentum=0.5) == pytest.approx(0.614)


def test_momentum_is_that_of_torch() -> None:
    w = torch.nn.Parameter(torch.tensor([1.0]))
    theirs = torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.3)
    for _ in range(7):
        w.grad = w.detach().clone()
        theirs.step()
    assert after(*[1.0] * 7, momentum=0.9, weight_decay=0.3) == pytest.approx(w.item(), rel=1e-6)


def test_a_padding_step_moves_neither_parameters_nor_velocity() -> None:
    """The velocity waits: after the padding it goes on as if there had been none."""
    assert after(ON, OFF, OFF, ON, momentum=0.5) == pytest.approx(0.76)
    assert after(ON, OFF) == pytest.approx(0.9)


def test_decay_pull_and_drift_by_hand() -> None:
    """One step of 0.1: the gradient 1, and 0.5 * 1 of decay, 2 (1 - 3) of the pull to 3, 0.7 of drift."""
    anchor, drift = {"w": torch.tensor([3.0])}, {"w": torch.tensor([0.7])}
    assert after(1.0, weight_decay=0.5) == pytest.approx(1 - 0.1 * 1.5)
    assert after(1.0, anchor=anchor, pull=2.0) == pytest.approx(1 - 0.1 * (1 - 4))
    assert after(1.0, drift=drift) == pytest.approx(1 - 0.1 * 1.7)
    together = {"weight_decay": 0.5, "anchor": anchor, "pull": 2.0, "drift": drift}
    assert after(1.0, **together) == pytest.approx(1 - 0.1 * (1 + 0.5 - 4 + 0.7))


def test_only_the_named_parameters_move_and_the_start_is_left_alone() -> None:
    steps: Any = Steps(1.0, 1.0)
    start = {"head.w": torch.tensor([1.0]), "body.w": torch.tensor([1.0])}
    found = descend(TASK, start, steps, lr=0.1, only=("head.",))
    assert float(found["head.w"]) == pytest.approx(0.81)
    assert float(found["body.w"]) == 1.0
    assert float(start["head.w"]) == 1.0


def test_a_task_s_own_descent_is_asked_only_for_what_it_can_do() -> None:
    """Its terms are (decay, anchor, pull); a drift d is a pull of strength one to -d with one less of decay."""
    asked: list[Any] = []

    class Whole(Square):
        answer: Params | None = None

        def descend(self, params: Params, batches: Any, lr: float, *terms: Any) -> Params | None:
            asked.append(terms)
            return self.answer

    task: Any = Whole()
    steps: Any = Steps(1.0)
    w, drift, anchor = {"w": torch.tensor([1.0])}, {"w": torch.tensor([0.7])}, {"w": torch.tensor([3.0])}
    assert float(descend(task, w, steps, lr=0.1)["w"]) == pytest.approx(0.9)  # it declined
    assert asked.pop() == (0.0, None, 0.0)
    descend(task, w, steps, lr=0.1, optimizer=ClientOptimizer(weight_decay=0.2), drift=drift)
    decay, to, strength = asked.pop()
    assert (decay, float(to["w"]), strength) == pytest.approx((-0.8, -0.7, 1.0))
    both = {"drift": drift, "anchor": anchor, "pull": 1.0}
    for knobs in ({"optimizer": ClientOptimizer("momentum")}, {"lr": lambda step: 0.1}, both, {"only": ("v",)}):
        knobs = {"lr": 0.1, **knobs}
        descend(task, w, steps, **knobs)  # type: ignore[arg-type]
    assert not asked
    task.answer = {"w": torch.tensor([42.0])}
    assert float(descend(task, w, steps, lr=0.1, only=("w",))["w"]) == 42.0


def test_a_task_may_bound_the_rate_by_the_curvature_that_the_terms_add() -> None:
    """Decay 0.5 and a pull of 2 add 2.5; a pull without an anchor adds nothing. Half the rate: half the step."""
    asked: list[Any] = []

    class Careful(Square):
        def safe_rate(self, params: Params, batches: Any, lr: float, more: float) -> float:
            asked.append(more)
            return lr / 2

    task: Any = Careful()
    steps: Any = Steps(1.0)
    w = {"w": torch.tensor([1.0])}
    assert float(descend(task, w, steps, lr=0.1)["w"]) == pytest.approx(0.95)
    decay = ClientOptimizer(weight_decay=0.5)
    descend(task, w, steps, lr=0.1, optimizer=decay, anchor={"w": torch.tensor([3.0])}, pull=2.0)
    descend(task, w, steps, lr=0.1, optimizer=decay, pull=2.0)
    assert asked == [0.0, 2.5, 0.5]
