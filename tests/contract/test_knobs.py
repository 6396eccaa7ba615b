"""A knob that changes nothing is none, and a step that is counted was taken: for every method and every knob."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from battery import LOOP, every_method, method_of, setting, start

from bespoke.config import check_stage
from bespoke.engines.engine import Engine
from bespoke.engines.host import ClientWork
from bespoke.errors import UserError
from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.models.linear_problem import LinearHead
from bespoke.models.task import BaseTask
from bespoke.tensors import flatten
from small_worlds import World, world

COHORT = np.array([3, 4, 5])  # 4, 8 and 11 rows, in batches of 4


@cache
def place_of(name: str) -> World:
    return world(name)


def worlds_of(kind: type[Method]) -> list[World]:
    return [place_of("linear")] if kind.linear_only else [place_of("linear"), place_of("mlp")]


# -- knobs -------------------------------------------------------------------------------------------------------------
def others(hint: Any, value: Any, bounds: dict[str, Any]) -> list[Any]:
    """Other values that a knob may have."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(inner for inner in get_args(hint) if inner is not type(None))
    if get_origin(hint) is Literal:
        return [word for word in get_args(hint) if word != value]
    if hint is bool:
        return [not value]
    if get_origin(hint) is tuple:
        return [tuple(entry * 0.5 for entry in value)]
    tried = (1, 3, 2, 50) if hint is int else (0.37, 3.0, 0.0)
    allowed = {"ge": "__ge__", "gt": "__gt__", "le": "__le__", "lt": "__lt__"}
    return [
        new for new in map(hint, tried)
        if new != value and all(getattr(new, allowed[b])(hint(limit)) for b, limit in bounds.items() if b in allowed)
    ]  # fmt: skip


def variants(made: Any) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """(knob, whether it is a switch, the change) for every knob of a dataclass, nested ones with a dot."""
    hints = get_type_hints(type(made))
    for entry in fields(made):
        value = getattr(made, entry.name)
        if entry.name == "task" or not entry.init:
            continue
        if is_dataclass(value):
            for name, switch, change in variants(value):
                yield f"{entry.name}.{name}", switch, {entry.name: replace(value, **change)}  # type: ignore[type-var]
            continue
        for new in others(hints[entry.name], value, entry.metadata.get("bounds", {})):
            yield entry.name, isinstance(new, str | bool) or value is None, {entry.name: new}


def seen(place: World, made: Method) -> tuple[Any, ...]:
    """What comes of two rounds and of personal models: state, predictions, bytes, steps, who chooses among what."""
    digest, cost, params = hashlib.sha256(), [], start(place)
    with Engine(place.population, LOOP) as engine:
        engine.open(ClientWork(made, place.split.train, (), setting(place)), params)
        server = made.init_server(params, setting(place))
        for number in range(2 if made.trains else 0):
            done = engine.round(server, COHORT, key=number)
            server = made.server_round(server, done.cohort)
            cost.append((done.bytes_up, done.bytes_down, done.steps, done.examples))
        test = place.split.test
        scores = engine.examine(server, np.array([5, 6]), test.support, {"query": test.query}, key=9)
        state = flatten(engine.host.private.read(COHORT)) if engine.host else {}
    for name, leaf in sorted({**flatten(server), **{f"private {n}": leaf for n, leaf in state.items()}}.items()):
        digest.update(name.encode() + leaf.contiguous().numpy().tobytes())
    for values in scores["query"].values():
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest(), cost, made.choose, made.keep_shared, made.candidates(), str(made.uplink)


def matters(kind: type[Method], knob: str) -> bool:
    """Whether some value of a knob changes something: as a method is set in the battery, or with one switch set."""
    for place in worlds_of(kind):
        base = method_of(kind, place)
        switched = [replace(base, **change) for name, switch, change in variants(base) if switch and name != knob]
        for context in (base, *switched):
            try:
                before = seen(place, context)
            except (ValueError, TypeError, AttributeError, RuntimeError):  # a switch that does not fit this world
                continue
            for name, _, change in variants(context):
                if name == knob and seen(place, replace(context, **change)) != before:
                    return True
    return False


@pytest.mark.parametrize("method", METHODS)
def test_every_knob_changes_something(method: str) -> None:
    kind = METHODS[method]
    base = method_of(kind, worlds_of(kind)[0])
    dead = [knob for knob in dict.fromkeys(name for name, *_ in variants(base)) if not matters(kind, knob)]
    assert dead == []


@pytest.mark.parametrize(("method", "knob"), [("fedrep", "steps_per_round"), ("feature-groups", "lr")])
def test_what_is_no_knob_is_refused(method: str, knob: str) -> None:
    with pytest.raises(UserError, match=f"unknown key '{knob}'"):
        check_stage({"method": method, "rounds": 1, knob: 1}, "stage 0")


# -- steps -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["linear", "mlp"])
@pytest.mark.parametrize("method", [name for name, kind in every_method().items() if kind.trains])
def test_steps_counted_are_steps_taken(method: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is a gradient, or a fit to convergence, or a sum of statistics: something made of a batch of rows."""
    kind, place, taken = every_method()[method], place_of(name), 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal taken
            taken += 1
            return function(*args, **kwargs)

        return call

    if place not in worlds_of(kind):
        return
    monkeypatch.setattr(BaseTask, "slopes", counted(BaseTask.slopes))
    monkeypatch.setattr(LinearHead, "problem", counted(LinearHead.problem))
    known = {entry.name for entry in fields(kind) if entry.init}
    for knobs in ({}, {"steps_per_round": 5}, {"drop_last": True}):
        if not known >= set(knobs):
            continue
        made = method_of(kind, place, **knobs)
        with Engine(place.population, LOOP) as engine:
            engine.open(ClientWork(made, place.split.train, (), setting(place)), start(place))
            server, taken = made.init_server(start(place), setting(place)), 0
            done = engine.round(server, COHORT, key=1)
        assert done.steps == taken, knobs
