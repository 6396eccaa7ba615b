"""Every method with a client optimizer and with schedules: one client at a time, and many at once, with padding."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from battery import IN_PROCESS, LINEAR_ONLY, LOOP, Play, assert_same, method_of, play

from bespoke.federation.engine import Engine
from bespoke.methods import METHODS
from bespoke.methods.parts.client_optimizer import ClientOptimizer
from bespoke.methods.parts.schedule import Schedule
from small_worlds import World, world

ADAMW = ClientOptimizer("adamw", eps=0.1, weight_decay=0.02)
OPTIMIZERS = {"adamw": ADAMW, "nesterov": ClientOptimizer("nesterov", momentum=0.5)}
BY_STEP = Schedule("exponential", gamma=0.5, every=1, warmup=1, by_step=True)


def having(knob: str) -> list[str]:
    return [name for name, kind in METHODS.items() if knob in {entry.name for entry in fields(kind)}]


def on(place: World, method: str, engine: str, **knobs: Any) -> Play:
    kind = METHODS[method]
    own = {"weight_decay": 0.0} if "optimizer" in knobs and "weight_decay" in {e.name for e in fields(kind)} else {}
    with Engine(place.population, {"loop": LOOP, **IN_PROCESS, **LINEAR_ONLY}[engine]) as running:
        return play(running, place, method_of(kind, place, **own, **knobs))


@pytest.mark.parametrize("method", having("optimizer"))
def test_optimizers_agree_on_every_engine(method: str) -> None:
    place = world("linear")
    for name, optimizer in OPTIMIZERS.items():
        expected = on(place, method, "loop", optimizer=optimizer)
        engines = ("func, chunk 3", "fused, chunk 64") if name == "adamw" else ("closed form, chunk 64",)
        for engine in engines:
            assert_same(on(place, method, engine, optimizer=optimizer), expected)


@pytest.mark.parametrize("method", [name for name in having("schedule") if not name.startswith("self-fl")])
def test_schedules_by_step_agree_on_every_engine(method: str) -> None:
    """Those by round are part of what the battery plays."""
    place = world("linear")
    expected = on(place, method, "loop", schedule=BY_STEP)
    assert_same(on(place, method, "fused, chunk 64", schedule=BY_STEP), expected)
