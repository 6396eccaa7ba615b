"""Varies one hyper-parameter of the personal models; the mean and the share of clients hurt may prefer other values.

Motley's Figure 4 (learning rate and epochs of fine-tuning) and Figure 7(a-b) (the mixture of kNN-Per). Values that the
run has candidates for need no new work. For each value the rest is chosen on validation rows, as the method does.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from typing import Any

import numpy as np

from bespoke.analysis.measured import Found, mean, measured
from bespoke.analysis.reopened import Candidates, DoesNotApply, Finished
from bespoke.errors import UserError, unknown
from bespoke.experiment.choosing import Chosen, Floats
from bespoke.experiment.typed import check_knobs
from bespoke.method import Method
from bespoke.plain import JsonObject
from bespoke.statistics.analyses import AnalysisNumbers, Measured
from bespoke.statistics.candidates import axes_of, named, settings_of
from bespoke.storage import Columns

MOST_CURVES = 8  # other settings that are also shown one by one


def parse_sweep(text: str) -> tuple[str, str, tuple[Any, ...]]:
    """'finetune.lrs=0.01,0.1' as (method, knob, values); the method and the values may be left out."""
    knob, equals, listed = text.partition("=")
    method, _, knob = knob.strip().rpartition(".")
    if not knob or (equals and not listed.strip()):
        raise UserError(f"--sweep {text!r}: METHOD.KNOB=VALUES, as in finetune.lrs=0.001,0.01,0.1")
    values = []
    for word in listed.split(",") if equals else []:
        try:
            values.append(tomllib.loads(f"value = {word.strip()}")["value"])
        except tomllib.TOMLDecodeError:
            values.append(word.strip())  # a bare word is a string
    return method, knob, tuple(values)


def check_sweep(run: Finished, text: str) -> None:
    name, knob, values = parse_sweep(text)
    method = run.method
    if name not in ("", method.card.name):
        raise DoesNotApply(f"--sweep {text}: the last stage of {run.path} is {method.card.name}, not {name}")
    if method.trains:
        raise DoesNotApply(
            f"--sweep {text}: {run.path} ({method.card.name}) is trained in rounds, which an analysis does not repeat; "
            "compare its settings with `bespoke compare`, or sweep a method without rounds, such as finetune"
        )
    knobs = [entry.name for entry in fields(method) if entry.name != "task"]
    if knob not in knobs:
        raise unknown("knob", knob, knobs, f"--sweep {text}")
    if not values and len(_known(method.candidates(), _axis(method.candidates(), knob))) < 2:
        raise DoesNotApply(f"--sweep {text}: which values? {run.path} has tried one only; say --sweep {knob}=A,B,C")


def _axis(names: tuple[str, ...], knob: str) -> str | None:
    """The word for this knob in the names of candidates: 'lr' for lrs."""
    return next((word for word in axes_of(names) if knob in (word, f"{word}s")), None)


def _known(names: tuple[str, ...], axis: str | None) -> list[float]:
    return sorted({settings_of(name)[axis] for name in names if axis in settings_of(name)}) if axis else []


def sweep(run: Finished, found: Candidates, text: str) -> Found:
    """(numbers, table of clients) for each value of a knob."""
    _, knob, values = parse_sweep(text)
    method, axis = run.method, _axis(found.names, knob)
    known = _known(found.names, axis)
    sets = _candidate_sets(run, found, knob, axis, tuple(values or known), known)
    metric, lower = run.experiment.metric, run.experiment.lower_is_better
    shared = run.shared(found)
    points: list[Measured] = []
    columns = []
    for value, made, scored in sets:
        allowed = _with(scored.names, axis, value) or run.allowed(made)
        picked = run.choice(scored, getattr(made, "choose", "global"), allowed)
        points.append({"value": value, **_point(scored, picked, shared, metric, lower)})
        points[-1]["chosen"] = scored.names[picked.default]
        columns.append(scored.query.at(picked, metric))
    ids = [run.experiment.population.ids[c] for c in run.clients]
    labels = [str(value) for value, _, _ in sets]
    table: Columns = {
        "client": ids * len(sets), "value": np.repeat(labels, len(ids)).tolist(), "metric": np.concatenate(columns),
        "shared": np.tile(shared, len(sets)),
    }  # fmt: skip
    record: AnalysisNumbers = {
        "method": method.card.name, "knob": knob, "axis": axis or knob, "points": points,
        "curves": _curves(sets, axis, shared, metric, lower),
    }  # fmt: skip
    return record, table


def _candidate_sets(
    run: Finished, found: Candidates, knob: str, axis: str | None, values: tuple[Any, ...], known: list[float]
) -> list[tuple[Any, Method, Candidates]]:
    """For each value the method that has it among its candidates, and their scores."""
    method = run.method
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if axis and numbers and all(any(f"{value:g}" == f"{k:g}" for k in known) for value in values):
        return [(float(value), method, found) for value in values]
    many = isinstance(getattr(method, knob), tuple)
    where = f"--sweep {knob}"
    if many:
        made: Any = replace(method, **check_knobs(type(method), {knob: list(values)}, where))
        scored = run.examined(made, what=f"{knob} {', '.join(map(str, values))}")
        return [(value, made, scored) for value in values]
    sets: list[tuple[Any, Method, Candidates]] = []
    for value in values:
        made = replace(method, **check_knobs(type(method), {knob: value}, where))
        sets.append((value, made, run.examined(made, what=f"{knob} {value}")))
    return sets


def _with(names: tuple[str, ...], axis: str | None, value: Any) -> list[int]:
    """The candidates with this value on the axis."""
    if axis is None:
        return []
    return [k for k, name in enumerate(names) if f"{settings_of(name).get(axis, np.nan):g}" == f"{float(value):g}"]


def _point(scored: Candidates, picked: Chosen, shared: Floats, metric: str, lower: bool) -> Measured:
    validation = mean(scored.held_out.at(picked, metric)) if scored.held_out is not None else None
    return {**measured(scored.query.at(picked, metric), shared, lower), "validation": validation}


def _curves(
    sets: list[tuple[Any, Method, Candidates]], axis: str | None, shared: Floats, metric: str, lower: bool
) -> list[JsonObject]:
    """One curve for each combination of the other settings, without any choice, if there are few combinations."""
    if axis is None:
        return []
    lines: dict[str, list[Measured]] = {}
    for value, _, scored in sets:
        for place in _with(scored.names, axis, value):
            settings = settings_of(scored.names[place])
            settings.pop(axis)
            if settings or not place:
                point: Measured = {"value": value, **_point(scored, Chosen(place, {}), shared, metric, lower)}
                lines.setdefault(named(settings), []).append(point)
    start = lines.pop("", [])  # the shared model is where every curve begins
    if not 1 < len(lines) <= MOST_CURVES:
        return []
    return [{"name": name, "points": [*start, *points]} for name, points in lines.items()]
