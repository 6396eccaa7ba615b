"""The table of a stage: its method, its rounds, and the method's knobs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple, cast

from bespoke.errors import UserError, unknown
from bespoke.experiment.choosing import Acceptance
from bespoke.experiment.config import AUTO, ExperimentConfig
from bespoke.experiment.typed import check_knobs
from bespoke.messages.robust.aggregator import NAME, Aggregator
from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.methods.parts.schedule import Schedule
from bespoke.plain import Knobs, TomlTable


class StageSettings(NamedTuple):
    """A stage's table, checked."""

    method: str
    rounds: int | str  # or "auto"
    accept: Acceptance | None  # when clients take their personal models
    aggregator: Aggregator | None  # how the mean of clients' changes is computed
    knobs: Knobs


def stages_of(config: ExperimentConfig, where: str = "") -> tuple[StageSettings, ...]:
    """The stages of an experiment, checked. Each is checked once in a process."""
    before = f"{where}: " if where else ""
    return config.once_by_stage(lambda place, stage: check_stage(stage, f"{before}stage {place}"))


def check_stage(stage: TomlTable, where: str) -> StageSettings:
    """A stage's table, validated against the method's own dataclass."""
    knobs = dict(stage)
    name = knobs.pop("method", None)
    if name is None:
        raise UserError(f"{where} names no method; say method = ... with one of: {', '.join(sorted(METHODS))}")
    if not isinstance(name, str):
        raise unknown("method", name, METHODS, where)
    method = METHODS.find(name, where)
    rounds = knobs.pop("rounds", 0 if not method.trains else None)
    if rounds != AUTO and (not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 0):
        raise UserError(f"{where}: {name} needs rounds, a whole number of zero or more, or {AUTO!r}; found {rounds!r}")
    if rounds and not method.trains:
        raise UserError(f"{where}: {name} has no training rounds, it only makes personal models; leave rounds out")
    accept = knobs.pop("accept", None)
    if accept is not None:
        accept = check_acceptance(accept, f"{where}: accept")
    aggregator = knobs.pop("aggregator", None)
    if aggregator is not None:
        if not method.trains:
            raise UserError(
                f"{where}: aggregator = {aggregator!r}: {name} has no training rounds and sends nothing; give it to "
                "the stage that trains, or leave it out"
            )
        aggregator = check_aggregator(aggregator, f"{where}: aggregator")
    also = ("method", "rounds", "accept", "aggregator")
    if "optimizer" in knobs and "optimizer" not in {entry.name for entry in fields(method)}:
        others = [other for other, kind in METHODS.items() if "optimizer" in {entry.name for entry in fields(kind)}]
        raise UserError(
            f"{where}: optimizer: {name} has steps of its own, which another optimizer would make something else; "
            f"leave it out. Methods that take one: {', '.join(sorted(others))}"
        )
    checked = _stepping(method, check_knobs(method, knobs, where, also), rounds, where)
    return StageSettings(name, rounds, accept, aggregator, checked)


def _stepping(method: type[Method], knobs: Knobs, rounds: int | str, where: str) -> Knobs:
    """The knobs, with a schedule that knows the stage's rounds. Wrong combinations are refused."""
    try:
        if method.trains and isinstance(schedule := knobs.get("schedule"), Schedule):
            knobs = {**knobs, "schedule": schedule.within(None if rounds == AUTO else int(rounds))}
        if {"optimizer", "schedule"} & set(knobs):
            method(cast(Any, None), **knobs)  # a method itself refuses wrong combinations
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    return knobs


def check_acceptance(table: Any, where: str) -> Acceptance:
    """Checks an acceptance rule: `accept = {min_examples = 20, margin = 0.01}`, one of them or both."""
    if not isinstance(table, dict) or not table:
        raise UserError(f"{where} = {table!r}: a table of min_examples, margin, or both")
    return Acceptance(**check_knobs(Acceptance, table, where))


def check_aggregator(value: Any, where: str) -> Aggregator:
    """Checks an aggregator: "mean", "tff-robust", or a table of name, zeroing and clipping."""
    if not isinstance(value, str | dict):
        raise UserError(f"{where} = {value!r}: a name, 'mean' or {NAME!r}, or a table of name, zeroing and clipping")
    found = Aggregator(**check_knobs(Aggregator, {"name": value} if isinstance(value, str) else value, where))
    if found.name != NAME and isinstance(value, dict) and set(value) != {"name"}:
        raise UserError(f"{where} = {value!r}: zeroing and clipping belong to name = {NAME!r}; give that name as well")
    if not found.zeroing and not found.clipping:
        raise UserError(f"{where} = {value!r}: without zeroing and clipping it is the plain mean; write 'mean'")
    return found
