"""The methods that the battery is played with; it is bespoke.testing, which methods of others go through, too."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.methods.finetune import FineTune
from bespoke.methods.parts.local_adam import LocalAdam
from bespoke.methods.parts.schedule import Schedule
from bespoke.methods.parts.server_optimizer import ServerOptimizer
from bespoke.testing.play import (
    IN_PROCESS,
    LINEAR_ONLY,
    LOOP,
    ROUNDS,
    Play,
    assert_close,
    assert_same,
    play,
    private_state,
    setting,
    start,
)
from bespoke.testing.worlds import BATCH, World

__all__ = [
    "IN_PROCESS",
    "LINEAR_ONLY",
    "LOOP",
    "ROUNDS",
    "Play",
    "assert_close",
    "assert_same",
    "every_method",
    "method_of",
    "play",
    "private_state",
    "setting",
    "start",
]


def method_of(kind: type[Method], world: World, drop_last: bool = False, **knobs: Any) -> Method:
    """The method with settings under which all paths are taken: several epochs, small batches, all extra terms."""
    settings: dict[str, Any] = {
        "batch_size": BATCH, "drop_last": drop_last, "epochs": 2, "lr": 0.1, "weight_decay": 0.02,
        "lam": 0.4, "private_lr": 0.05, "private_epochs": 3, "adapt_epochs": 2, "relate_every": 2,
        "k": 3, "mix": (0.0, 0.3, 1.0), "capacity": 0.7, "alpha": 0.3, "steps": 3, "personal_lr": 0.2, "inner_steps": 2,
        "max_steps": 7, "local_steps": 4, "exact_steps": True,
        "size": 3, "embedding_lr": 0.05, "head_epochs": 2, "iterations": 3, "eps1": 3.0,
        "anybody_every": 2, "tune_steps": 2, "schedule": Schedule("exponential", gamma=0.7, every=2, warmup=1),
    }  # fmt: skip
    if issubclass(kind, FineTune):
        settings |= {"epochs": 3, "every": 2, "lrs": (0.1, 0.02)}
    if issubclass(kind, LocalAdam):  # steps that are not made of rounding: Adam divides by the size of a slope
        settings |= {"lr": 0.01, "eps": 1e-3, "server": ServerOptimizer("adam", 0.01, eps=1e-3)}
    if knobs.get("solver", getattr(kind, "solver", "")) == "exact":
        settings.pop("schedule")  # no step is taken
    known = {entry.name for entry in fields(kind) if entry.init}
    return kind(world.task, **{name: value for name, value in settings.items() if name in known} | knobs)


def every_method() -> dict[str, type[Method]]:
    from small_methods import SMALL_METHODS

    return {**METHODS.built_in, **{method.card.name: method for method in SMALL_METHODS}}
