"""Reads what `bespoke analyze` wrote into run folders, averages it over seeds, and states it in words."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Required, TypedDict, cast

from bespoke.plain import JsonObject
from bespoke.statistics.formatting import count, listing, metric_name, number, p_text, percent, signed
from bespoke.statistics.versus_baseline import ALPHA

ANALYSIS_FORMAT = 1
LARGEST = "largest cluster"  # the first candidate of methods with clusters; it is not shared by all clients
# as they are told
ORDER = ("ood", "fewer-examples", "smaller-tests", "examples", "sweep", "per-client", "crossed", "embeddings")


Mean = Any  # over clients: a number, or None if no client has a finite value


class Measured(TypedDict, total=False):
    """The summary numbers of a set of personal models, over clients, and what set them apart from other sets."""

    clients: int
    mean: Mean
    sd: Mean
    shared: Mean  # under the shared model
    hurt: Mean  # the fraction of clients with a worse value than under the shared model
    helped: Mean
    change: Any  # quantiles of the difference to the shared model; None without a client
    examples: float  # mean by client
    fraction: float  # of the examples
    most: int  # examples; 0: all
    value: Any  # of a knob: a number or a text
    validation: Mean
    chosen: str  # the candidate
    candidate: str  # the choice for all, or that of clients without their own
    distinct: int  # candidates chosen by some client


class ChoiceDifference(TypedDict):
    """Each client's own choice against a common one."""

    mean: Mean
    better: Mean
    worse: Mean
    p: Mean


class CrossedColumn(TypedDict, total=False):
    """A mean over clients, and its difference to that of their own models, with an interval."""

    clients: int
    mean: Mean
    difference: Mean
    low: float
    high: float


# `global`, the common choice, is a word of Python's own
_Common = TypedDict("_Common", {"global": Measured}, total=False)


class AnalysisNumbers(_Common, total=False):
    """What an analysis found; each has some of these keys."""

    points: list[Measured]
    curves: list[JsonObject]  # by part or point along an axis
    axis: str | None
    # other clients' rows
    rows: int
    start: str  # what "shared" is of
    shared: dict[str, float | None]  # by part: the clients' own rows, others'
    chosen: dict[str, float | None]
    # a knob
    method: str
    knob: str
    # who chooses
    client: Measured
    size: Measured
    difference: ChoiceDifference
    # models and rows of different clients
    columns: dict[str, CrossedColumn]
    # embeddings
    groups: list[str]
    counts: list[list[int]]  # [group][guess]
    recovered: float
    agreement: float
    by: str
    map: str
    users: int
    contexts: list[str]
    same: Mean
    chance: Mean
    shown: dict[str, float]
    nearest_contexts: list[str]


class AnalysisRecord(AnalysisNumbers, total=False):
    """A file of `analysis/`: what was asked, the run, and what was found."""

    format: int
    analysis: Required[str]
    asked: Required[JsonObject]
    label: Required[str]
    seed: Required[int]
    metric: Required[str]
    lower_is_better: Required[bool]
    clients: int
    protocol: str
    trained: bool
    folder: str


@dataclass(frozen=True)
class Analysis:
    """One analysis of one method: numbers averaged over seeds, and the folders of the tables by client."""

    label: str
    name: str
    seeds: list[int]
    record: AnalysisRecord
    tables: list[Path]

    @property
    def kind(self) -> str:
        return "sweep" if self.name.startswith("sweep-") else self.name

    @property
    def metric(self) -> str:
        return str(self.record["metric"])


def read_analyses(folders: Sequence[Path]) -> list[Analysis]:
    """The analyses in these run folders; those of one method with the same request are averaged."""
    found: dict[tuple[str, str], list[tuple[AnalysisRecord, Path]]] = {}
    for folder in folders:
        for path in sorted((folder / "analysis").glob("*.json")):
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue  # `bespoke analyze` makes unreadable files again; a report skips them
            if isinstance(record, dict) and record.get("format") == ANALYSIS_FORMAT and "analysis" in record:
                key = str(record["label"]), str(record["analysis"])
                found.setdefault(key, []).append((cast(AnalysisRecord, record), path.with_suffix(".parquet")))
    analyses = []
    for (label, name), records in found.items():
        alike = [(r, table) for r, table in records if _shape(r) == _shape(records[0][0])]
        seeds = [int(record["seed"]) for record, _ in alike]
        analyses.append(Analysis(label, name, seeds, combined([r for r, _ in alike]), [table for _, table in alike]))
    return sorted(analyses, key=lambda a: (ORDER.index(a.kind) if a.kind in ORDER else len(ORDER), a.name))


def _shape(record: AnalysisRecord) -> str:
    """What must agree between seeds: the request, and the values that were tried."""
    points = [point.get("value", point.get("fraction")) for point in record.get("points", [])]
    curves = [(curve["name"], curve.get("at")) for curve in record.get("curves", [])]
    return json.dumps([record["asked"], record["metric"], points, curves])


def combined(values: list[Any]) -> Any:
    """Numbers averaged leaf by leaf; None where a seed has none; a text only where all seeds agree."""
    first = values[0]
    if isinstance(first, dict):
        return {key: combined([value.get(key) for value in values]) for key in first}
    if isinstance(first, list) and all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [combined([value[place] for value in values]) for place in range(len(first))]
    if all(value == first for value in values):
        return first
    if all(isinstance(value, int | float) for value in values):
        return fmean(values)
    return None


# ------------------------------------------------------------------------------------------------ in words


def in_words(analysis: Analysis) -> list[str]:
    """An analysis in a few sentences."""
    how = {
        "ood": _ood, "fewer-examples": _fewer, "smaller-tests": _smaller, "examples": _examples, "sweep": _sweep,
        "per-client": _choosers, "crossed": _crossed, "embeddings": _embeddings,
    }  # fmt: skip
    return how[analysis.kind](analysis)


def starts_untrained(record: AnalysisRecord) -> bool:
    """Whether the first candidate is an untrained model, the start of local training."""
    return not record.get("trained", True)


def _ood(analysis: Analysis) -> list[str]:
    record, name = analysis.record, metric_name(analysis.metric)
    before, after = record["shared"], record["chosen"]
    said = {"own": "the clients' own rows", "others": "other clients' rows", "other groups": "rows of other groups"}
    said = {part: text for part, text in said.items() if part in before}
    if starts_untrained(record) or record.get("start") == LARGEST:
        ends = [f"{_shown(after[part])} on {text}" for part, text in said.items()]
        sentences = [f"As chosen, the mean {name} is {listing(ends)}."]
        if record.get("start") == LARGEST:  # of no use to say what it goes "from": nobody would be served that model
            ends = [f"{_shown(before[part])} on {text}" for part, text in said.items()]
            sentences.append(f"Had everyone taken the largest cluster's model, it would be {listing(ends)}.")
    else:
        moves = [f"from {_shown(before[part])} to {_shown(after[part])} on {text}" for part, text in said.items()]
        sentences = [f"Personalized as chosen, the mean {name} goes {listing(moves)}."]
    for curve in record["curves"][:12]:
        own, others = curve["own"], curve.get("others") or curve.get("other groups")
        if others and own[-1] is not None and others[-1] is not None:
            at = f"{record['axis']} {curve['at'][-1]:g}"
            where = f"{curve['name']}, {at}" if curve["name"] else at
            sentences.append(f"At {where}: own rows {_shown(own[-1])}, others' {_shown(others[-1])}.")
    return sentences


def _fewer(analysis: Analysis) -> list[str]:
    name = metric_name(analysis.metric)
    return [
        f"With {percent(100 * point['fraction'])} % of the examples ({point['examples']:,.0f} a client): mean {name} "
        f"{_shown(point['mean'])}, {_part(point['hurt'])} of clients hurt."
        for point in analysis.record["points"]
    ]


def _smaller(analysis: Analysis) -> list[str]:
    name = metric_name(analysis.metric)
    return [
        f"Tested on {percent(100 * point['fraction'])} % of the rows ({point['examples']:,.0f} a client): nine of ten "
        f"clients' {name} changes by {number(point['change'][0])} or more, one of ten by {number(point['change'][-1])} "
        f"or more; {_part(point['hurt'])} look hurt."
        for point in analysis.record["points"] if point["change"]
    ]  # fmt: skip


def _examples(analysis: Analysis) -> list[str]:
    name = metric_name(analysis.metric)
    return [
        f"With {'at most ' + count(point['most'], 'example') if point['most'] else 'all examples'} "
        f"({point['examples']:,.1f} a client): mean {name} {_shown(point['mean'])}, "
        f"{_part(point['hurt'])} of clients hurt."
        for point in analysis.record["points"]
    ]


def _sweep(analysis: Analysis) -> list[str]:
    record, name = analysis.record, metric_name(analysis.metric)
    points = [p for p in record["points"] if p["mean"] is not None and p["hurt"] is not None and p["value"] != 0]
    if not points:
        return [f"{record['knob']}: no value has a finite mean."]
    sign = 1.0 if record["lower_is_better"] else -1.0
    best = min(points, key=lambda p: sign * p["mean"])
    # what diverges for some clients may well help the others: nobody would use it
    sane = [
        p for p in points if (p["mean"] <= 2 * best["mean"] if sign > 0 else 2 * p["mean"] >= best["mean"])
    ] or points
    gentle = min(sane, key=lambda p: (p["hurt"], sign * p["mean"]))

    def of(point: Measured) -> str:
        value = f"{point['value']:g}" if isinstance(point["value"], int | float) else point["value"]
        return f"{record['axis']} {value} (mean {name} {_shown(point['mean'])}, {_part(point['hurt'])} hurt)"

    tried = f"Of {count(len(points), 'value')} of {record['axis']}"
    if best is gentle:
        said = f"{tried} the same has the best mean on test rows and hurts fewest clients: {of(best)}."
    else:
        said = f"{tried} the mean on test rows is best at {of(best)}; fewest clients are hurt at {of(gentle)}."
    judged = [p for p in points if p.get("validation") is not None]
    if not judged:
        return [said]
    chosen = min(judged, key=lambda p: sign * p["validation"])  # the best on test rows is known only afterwards
    return [said, "Validation chooses the same as is best." if chosen is best else f"Validation chooses {of(chosen)}."]


def _choosers(analysis: Analysis) -> list[str]:
    record, name = analysis.record, metric_name(analysis.metric)
    together, alone, difference = record["global"], record["client"], record["difference"]
    chosen = f" ({together['candidate']})" if together["candidate"] else ""
    sentence = (
        f"Chosen for all together{chosen}: mean {name} {_shown(together['mean'])}, {_part(together['hurt'])} hurt; "
        f"chosen by each client for itself: {_shown(alone['mean'])}, {_part(alone['hurt'])} hurt."
    )
    if difference["mean"] is None:
        return [sentence]
    gains = -difference["mean"] if record["lower_is_better"] else difference["mean"]
    known = len(analysis.seeds) == 1 and difference["p"] is not None
    p = f", paired Wilcoxon {p_text(difference['p'])}" if known else ""
    changes = f"({signed(difference['mean'])}{p})"
    if not gains:
        return [sentence, "Choosing for itself makes no difference on average."]
    if not known:  # the p of one seed cannot be averaged over seeds: the mean is told, nothing is claimed
        return [sentence, f"Choosing for itself changes the mean by {signed(difference['mean'])}."]
    if difference["p"] >= ALPHA:
        return [sentence, f"Whether choosing for itself is better or worse cannot be told {changes}."]
    return [sentence, f"Choosing for itself is {'better' if gains > 0 else 'worse'} on average {changes}."]


CROSSED = {
    "own": "its own model", "other": "another client's", "stranger": "another client's, without a common context",
    "anybody": "the shared model", "wrong": "its own in another of its contexts",
    "foreign": "its own in a context that it never has", "none": "no prefix",
}  # fmt: skip


def _crossed(analysis: Analysis) -> list[str]:
    name, columns = metric_name(analysis.metric), analysis.record["columns"]
    said = [f"Mean {name} of a client's rows under its own model: {_shown(columns['own']['mean'])}."]
    for column, values in columns.items():
        if column == "own":
            continue
        between = f" ({signed(values['low'])} to {signed(values['high'])})" if values.get("low") is not None else ""
        what = CROSSED[column]
        said.append(f"Under {what}: {_shown(values['mean'])}, {signed(values['difference'])} against own{between}.")
    return said


def _embeddings(analysis: Analysis) -> list[str]:
    record = analysis.record
    if "map" in record:
        return _map(record)
    return [
        f"The group is guessed right from the embedding for {_part(record['recovered'])} of clients (by "
        f"{record['by']}; adjusted Rand index {_shown(record['agreement'])}, 1: the same division, 0: chance)."
    ]


def _map(record: AnalysisRecord) -> list[str]:
    """The map's text; users' names are only in the table, because reports under privacy name no client."""
    shown = record["shown"]
    sentences = [
        f"Embeddings of {count(record['users'], 'user')} and {count(len(record['contexts']), 'context')}; the planes "
        f"show {_part(shown['users'])} and {_part(shown['contexts'])} of their variance."
    ]
    if record["same"] is not None and record["chance"] is not None:
        sentences.append(
            f"The user with the nearest embedding has the same context for {_part(record['same'])} of users, any other "
            f"user for {_part(record['chance'])}."
        )
    near = [f"{a}: {b}" for a, b in zip(record["contexts"], record["nearest_contexts"] or []) if b]
    return [*sentences, *([f"Nearest contexts: {'; '.join(near)}."] if len(near) > 2 else [])]


def _shown(value: float | None) -> str:
    return number(math.nan if value is None else value)


def _part(value: float | None) -> str:
    return f"{percent(100 * value)} %" if value is not None else number(math.nan)
