"""Search spaces: lists of values or ranges for each knob, and how a setting is applied to an experiment."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bespoke.errors import UserError, unknown
from bespoke.experiment.checks import checked
from bespoke.experiment.config import ExperimentConfig
from bespoke.methods import METHODS, label_of
from bespoke.plain import JsonObject, Knobs, TomlTable

KnobValues = Knobs  # knob, with dots -> value
TUNABLE = ("model", "cohort", "transform", "privacy")  # tables that may be tuned besides the methods' knobs


@dataclass(frozen=True)
class Range:
    """All numbers between two bounds; integers if both are."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def to_json(self) -> JsonObject:
        return {"low": self.low, "high": self.high, **({"log": True} if self.log else {})}


Space = dict[str, "list[Any] | Range"]


def read_space(table: Any, where: str) -> Space:
    """A space from nested tables: a list of values, or {low, high, log} for each knob."""
    space: Space = {}
    for key, entry in _flat(table, where):
        if isinstance(entry, dict):
            space[key] = _range(entry, f"{where}.{key}")
        elif entry == []:
            raise UserError(f"{where}.{key} is empty; list the values to try")
        elif isinstance(entry, list):
            space[key] = entry
        else:
            raise UserError(
                f"{where}.{key} = {entry!r}: list the values to try, as in [0.01, 0.1], or give {{low = 0.001, high = "
                "1.0, log = true}"
            )
    return space


def _flat(table: Any, where: str, before: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(table, dict):
        raise UserError(f"{where} = {table!r}: it has to be a table of knobs and the values to try")
    for name, entry in table.items():
        if isinstance(entry, dict) and not {"low", "high"} & set(entry):
            yield from _flat(entry, where, f"{before}{name}.")
        else:
            yield f"{before}{name}", entry


def _range(entry: JsonObject, where: str) -> Range:
    for name in entry:
        if name not in ("low", "high", "log"):
            raise unknown("key", name, ("low", "high", "log"), where)
    low, high, log = entry.get("low"), entry.get("high"), entry.get("log", False)
    numbers = all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in (low, high))
    if not numbers or not isinstance(log, bool) or not low < high or (log and low <= 0):  # type: ignore[operator]
        raise UserError(
            f"{where} = {entry!r}: low and high have to be numbers, low below high"
            f"{', and above zero with log = true' if log else ''}"
        )
    return Range(low, high, log)  # type: ignore[arg-type]


def grid(space: Space, where: str = "the space") -> list[KnobValues]:
    """Every combination, the last knob varying fastest."""
    lists = [entry for entry in space.values() if isinstance(entry, list)]
    if len(lists) < len(space):
        key = next(key for key, entry in space.items() if isinstance(entry, Range))
        raise UserError(f"{where}.{key} is a range, and a grid needs a list of values; ranges are for tune --optuna")
    return [dict(zip(space, values)) for values in itertools.product(*lists)]


def probes(space: Space) -> Iterator[KnobValues]:
    """Settings with every value of every knob once, to check the values."""
    for key, entry in space.items():
        yield from ({key: value} for value in ([entry.low, entry.high] if isinstance(entry, Range) else entry))


def past_the_edge(best: Knobs, tried: list[Knobs]) -> list[Knobs]:
    """Settings one step beyond the edge of a grid, in each knob whose best value is the smallest or largest tried."""
    beyond = []
    for knob, value in best.items():
        values = sorted({setting[knob] for setting in tried if type(setting.get(knob)) is float})
        if type(value) is not float or len(values) < 2 or values[0] <= 0:
            continue
        if value == values[0]:
            beyond.append({**best, knob: float(f"{values[0] ** 2 / values[1]:.6g}")})
        elif value == values[-1]:
            beyond.append({**best, knob: float(f"{values[-1] ** 2 / values[-2]:.6g}")})
    return beyond


def merged(fixed: Knobs, chosen: KnobValues) -> Knobs:
    """Fixed and chosen knobs together; a chosen `server.lr` is put into the table `server`."""
    result = {k: dict(v) if isinstance(v, dict) else v for k, v in fixed.items()}
    for name, value in chosen.items():
        *parents, last = name.split(".")
        node = result
        for parent in parents:
            inner = node.get(parent, {})
            # `server = "adam"` is short for a table with a name
            node[parent] = {"name": inner} if isinstance(inner, str) else dict(inner)
            node = node[parent]
        node[last] = value
    return result


def applied(raw: TomlTable, setting: KnobValues) -> TomlTable:
    """An experiment with these values: `fedavg.lr` is a knob of the stage fedavg, `cohort.size` a key of a table."""
    result = {**raw, "stage": list(raw["stage"])}
    for key, value in setting.items():
        head, _, rest = key.partition(".")
        place = stage_place(raw, head) if head not in TUNABLE else None
        if not rest:
            raise UserError(f"what is to be tried of {head!r}? Name a knob, as in {head}.lr or cohort.size")
        if place is None:
            result[head] = merged(result.get(head, {}), {rest: value})
        else:
            result["stage"][place] = merged(result["stage"][place], {rest: value})
    return result


def stage_place(raw: TomlTable, name: str) -> int:
    """The stage that a knob belongs to: by its method's name, or by its number if a method occurs twice."""
    methods = [called(stage.get("method")) for stage in raw["stage"]]
    if name.isdigit() and int(name) < len(methods):
        return int(name)
    if methods.count(name) > 1:
        numbers = ", ".join(str(place) for place, method in enumerate(methods) if method == name)
        raise UserError(f"{name} is the method of several stages: say which by its number ({numbers})")
    if name not in methods:
        raise unknown("stage or table", name, [*methods, *TUNABLE], "what is to be tried")
    return methods.index(name)


def called(method: Any) -> Any:
    """The name of a stage by its method; a user's own method has the name on its card."""
    outside = isinstance(method, str) and method not in METHODS.built_in and METHODS.knows(method)
    return label_of(method) if outside else method


def check_space(raw: TomlTable, space: Space, where: str) -> ExperimentConfig:
    """Refuses a knob or a value that the experiment does not take, before any data are loaded."""
    for probe in probes(space):
        checked(applied(raw, probe), where)
    return checked(raw, where)


def space_json(space: Space) -> JsonObject:
    return {key: entry.to_json() if isinstance(entry, Range) else entry for key, entry in space.items()}


def text(setting: KnobValues) -> str:
    """A setting as one line of text."""
    return ", ".join(f"{knob} = {json.dumps(value)}" for knob, value in setting.items())
