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
import torch
from battery import LOOP, every_method, method_of, setting, start

from bespoke.data.population import Population
from bespoke.data.splits import cross_silo
from bespoke.declarations import Reveal, reveals
from bespoke.errors import UserError
from bespoke.experiment.stage import check_stage
from bespoke.federation.engine import Engine
from bespoke.federation.work import ClientWork
from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.methods.parts.local_adam import LocalAdam
from bespoke.methods.parts.schedule import Schedule
from bespoke.models.linear_problem import LinearHead
from bespoke.models.task import BaseTask
from bespoke.tensors import flatten
from small_language import prefix_world
from small_worlds import FRACTIONS, SIZES, World, owners, world


@cache
def place_of(name: str) -> World:
    """A small world whose rows are of two kinds: some knobs are about them."""
    plain = prefix_world() if name == "prefix" else world(name)
    columns = {**plain.population.columns, "kind": torch.arange(sum(SIZES)) % 3 % 2}
    population = Population.build(columns, owners(), about=plain.population.about)
    return World(name, replace(plain.task, kinds=2), population, cross_silo(population, FRACTIONS, seed=3))


def worlds_of(kind: type[Method]) -> list[World]:
    if issubclass(kind, LocalAdam):  # some knobs are about prefixes and contexts
        return [place_of("linear"), place_of("mlp"), place_of("prefix")]
    return [place_of("linear")] if kind(place_of("linear").task).needs.linear else [place_of("linear"), place_of("mlp")]


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
    tried = (1, 3, 2, 50) if hint is int else (0.37, 3.0, 0.0, 0.99)
    allowed = {"ge": "__ge__", "gt": "__gt__", "le": "__le__", "lt": "__lt__"}
    return [
        new for new in map(hint, tried)
        if new != value and all(getattr(new, allowed[b])(hint(limit)) for b, limit in bounds.items() if b in allowed)
    ]  # fmt: skip


def altered(made: Any, change: dict[str, Any]) -> Any:
    """The same with a knob changed; None where it says itself that they do not go together."""
    try:
        return replace(made, **change)
    except ValueError:
        return None


def variants(made: Any) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(knob, 2 for a word, 1 for another switch, the change) for every knob of a dataclass, nested ones with a dot.

    The change is empty where the other knobs do not allow it.
    """
    hints = get_type_hints(type(made))
    for entry in fields(made):
        value = getattr(made, entry.name)
        if entry.name == "task" or not entry.init:
            continue
        if is_dataclass(value):
            for name, switch, change in variants(value):
                inner = altered(value, change)
                yield f"{entry.name}.{name}", switch, {entry.name: inner} if change and inner is not None else {}
            continue
        for new in others(hints[entry.name], value, entry.metadata.get("bounds", {})):
            change = {entry.name: new}
            allowed = altered(made, change) is not None
            yield (
                entry.name,
                2 * isinstance(new, str) or isinstance(new, bool) or value is None,
                change if allowed else {},
            )


def seen(place: World, made: Method) -> tuple[Any, ...] | None:
    """What comes of two rounds and of personal models: state, predictions, bytes, steps, who chooses among what.

    None: this does not go together, as a method without groups that is told to use them.
    """
    digest, cost, params = hashlib.sha256(), [], start(place)
    each = made.needs.everyone or Reveal.EACH in reveals(made.uplink).values()  # it looks for clusters: of all clients
    cohort = np.arange(len(place.population)) if each else np.array([4, 5])
    try:
        with Engine(place.population, LOOP) as engine:
            engine.open(ClientWork(made, place.split.train, (), setting(place)), params)
            server = made.init_server(params, setting(place))
            for number in range(2 if made.trains else 0):
                done = engine.round(server, cohort, key=number, number=number + 1)
                server = made.server_round(server, done.cohort)
                cost.append((done.bytes_up, done.bytes_down, done.steps, done.examples))
            test = place.split.test
            scores = engine.examine(server, np.array([5, 6]), test.support, {"query": test.query}, key=9)
            state = flatten(engine.host.private.read(cohort)) if engine.host else {}
    except (UserError, ValueError, TypeError, AttributeError, RuntimeError):
        return None
    for name, leaf in sorted({**flatten(server), **{f"private {n}": leaf for n, leaf in state.items()}}.items()):
        digest.update(name.encode() + leaf.contiguous().numpy().tobytes())
    for values in scores["query"].values():
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest(), cost, made.choosing, made.candidates(), str(made.uplink)


class Looks:
    """What is seen of a method in many settings, each looked at once."""

    def __init__(self, kind: type[Method], place: World) -> None:
        # so many rounds, or those that end would need another knob besides
        scheduled = any(entry.name == "schedule" for entry in fields(kind))
        knobs = {"schedule": Schedule(rounds=4)} if scheduled else {}
        self.place, self.base, self.known = place, method_of(kind, place, **knobs), dict[str, Any]()

    def of(self, made: Method) -> Any:
        key = repr([getattr(made, entry.name) for entry in fields(made) if entry.name != "task"])
        if key not in self.known:
            self.known[key] = seen(self.place, made)
        return self.known[key]

    def changes(self, context: Method, knob: str) -> bool:
        """Whether some value of a knob changes something, the others set so."""
        before = self.of(context)
        values = [change for name, _, change in variants(context) if name == knob and change] if before else []
        changed = (altered(context, change) for change in values)
        return any(made is not None and self.of(made) not in (before, None) for made in changed)

    def contexts(self, knob: str) -> Iterator[Method]:
        """The method with one more change, the likeliest to make a knob matter first: a switch, of the same part."""
        rest = [entry for entry in variants(self.base) if entry[0] != knob]
        part = knob.rpartition(".")[0]
        rest.sort(key=lambda entry: (entry[0].rpartition(".")[0] != part, -entry[1]))
        made = (altered(self.base, change) for _, _, change in rest if change)
        return (context for context in made if context is not None)


def matters(looks: list[Looks], knob: str) -> bool:
    """Whether a knob changes something: as the battery sets a method, or with one more change."""
    if any(at.changes(at.base, knob) for at in looks):
        return True
    return any(at.changes(context, knob) for at in looks for context in at.contexts(knob))


@cache
def first_with(nested: type) -> str:
    """The method whose test sees to all knobs of a part that several have: a server optimizer."""
    owns = (name for name, kind in METHODS.items() for hint in get_type_hints(kind).values() if hint is nested)
    return next(owns)


@pytest.mark.parametrize("method", METHODS)
def test_every_knob_changes_something(method: str) -> None:
    """No knob is there for nothing. Of a part that several methods have, the others see to one knob."""
    kind = METHODS[method]
    looks = [Looks(kind, place) for place in worlds_of(kind)]
    asked: dict[str, list[str]] = {}
    for name, *_ in variants(looks[0].base):
        outer, dot, _ = name.partition(".")
        shared = bool(dot) and first_with(type(getattr(looks[0].base, outer))) != method
        names = asked.setdefault(outer if shared else name, [])
        names += [] if name in names else [name]
    dead = [knob for knob, names in asked.items() if not any(matters(looks, name) for name in names)]
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
            done = engine.round(server, np.array([3, 4, 5]), key=1)  # of 4, 8 and 11 rows, in batches of 4
        assert done.steps == taken, knobs
