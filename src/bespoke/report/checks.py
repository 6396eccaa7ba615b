"""Checks a comparison for the practical concerns that Motley warns of."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bespoke.report.summary import BEFORE, COLLAPSED, MethodSummary, Summary, with_before
from bespoke.statistics import clients as over
from bespoke.statistics.candidates import settings_of
from bespoke.statistics.clients import Cells
from bespoke.statistics.converged import PAST_BEST, STILL_IMPROVING
from bespoke.statistics.folders import FinishedRun, RunSet
from bespoke.statistics.formatting import count, listing, percent

if TYPE_CHECKING:
    import pandas as pd

MUCH_HURT = 0.25
SIZEABLE = 20  # test examples from which a client's own number is more than noise
MUCH_BEYOND = 0.1  # the same of clients hurt beyond chance
# as good as free, or as held; the tuned model itself
ENDS = {("pull", 1e-6), ("intercept", 1e-6), ("pull", 1e6), ("intercept", 1e6), ("blend", 1.0)}
PERFECT = 0.005  # of a constant prediction's error: a shared model that leaves less is too good to be true
MANY = 0.5  # of clients at the edge of a grid, where each chooses for itself

Severity = Literal["serious", "note"]


@dataclass(frozen=True)
class Concern:
    """A warning to read before relying on a result; `label` is empty if it concerns the data."""

    label: str
    kind: str  # hurt, small test sets, state, grid, collapse, convergence, rounds, or the kind of a check of the data
    text: str
    severity: Severity = "note"  # serious: the answer itself may be wrong


def concerns(study: RunSet, summary: Summary, table: pd.DataFrame) -> list[Concern]:
    """All concerns: the most serious first, and among equals those about the data first."""
    tested = with_before(table, summary.metric) if summary.baseline == BEFORE else table
    cells = over.cells(tested, f"query_{summary.metric}", lower_is_better=summary.lower_is_better)
    sizes = cells.weights.mean(0)
    found = [_checked(check, summary.names_clients) for check in study.compare.get("checks") or []]
    found += [Concern("", "state", str(note)) for note in study.compare.get("notes") or []]
    found += _small_test_sets(summary, sizes)
    found += _rounds(summary)
    found += _perfect(summary)
    for method in summary.methods:
        runs = [run for run in study.runs if run.label == method.label]
        found += _converged(summary, method)
        found += _hurt(summary, method, cells, sizes)
        found += _collapse(method, table)
        found += _edge_of_grid(study, method)
        found += _edge_of_candidates(method, runs, table)
    return sorted(found, key=lambda concern: concern.severity != "serious")


def _checked(check: dict[str, str], named: bool) -> Concern:
    """What a check of the data found."""
    severity: Severity = "serious" if check.get("severity") == "serious" else "note"
    example = f" For example {check['example']}." if named and check.get("example") else ""
    return Concern("", str(check.get("kind") or "data"), f"{check.get('text') or ''}{example}", severity)


def _perfect(summary: Summary) -> list[Concern]:
    """Warns about a shared model that hardly errs: a column may be the target in disguise."""
    base = next((m for m in summary.methods if m.label == summary.baseline), None)
    plain = next((r for r in summary.references if r.label == "constant"), None)
    if base is None or plain is None or not math.isfinite(base.mean.value) or not math.isfinite(plain.mean.value):
        return []
    # for a score such as accuracy, the error is the distance to one
    errors = [m.mean.value if summary.lower_is_better else 1 - m.mean.value for m in (base, plain)]
    if errors[1] <= 0:
        same = "A constant prediction makes no error: all test rows have the same target, so there is nothing to learn."
        return [Concern("", "constant", same, "serious")]
    if errors[1] < 0.01 * (not summary.lower_is_better) or errors[0] > PERFECT * errors[1]:
        return []
    text = (
        f"{base.title} has only {percent(100 * errors[0] / errors[1])} % of the error of a constant prediction. A "
        "column may contain the target itself; if so, leave it out with --features."
    )
    return [Concern("", "leak", text, "serious")]


def _rounds(summary: Summary) -> list[Concern]:
    """Warns about methods with a different number of rounds of client work than the baseline."""
    base = next((m for m in summary.methods if m.label == summary.baseline), None)
    if base is None or base.cost is None or not base.cost.rounds:
        return []
    rounds = {m.title: m.cost.rounds for m in summary.methods if m.cost and m.cost.rounds}
    other = [f"{title} {given:,.0f}" for title, given in rounds.items() if given != base.cost.rounds]
    if not other:
        return []
    text = f"Clients worked in different numbers of rounds: {base.title} {base.cost.rounds:,.0f}, {listing(other)}."
    return [Concern("", "rounds", text)]


def _converged(summary: Summary, method: MethodSummary) -> list[Concern]:
    """Warns about training that stopped while improving, or continued without improving."""
    overstated = "gains against it may be overstated."
    if method.last_improvement < -PAST_BEST:
        shown = f"{percent(-100 * method.last_improvement)} %"
        text = f"{method.title} was trained for too long: its last fifth of rounds made validation worse by {shown}"
        if method.label != summary.baseline:
            return [Concern(method.label, "convergence", f"{text}; fewer rounds, or rounds = auto, may help it.")]
        return [Concern(method.label, "convergence", f"{text}, so {overstated}", "serious")]
    if not method.last_improvement > STILL_IMPROVING:
        return []
    shown = f"{percent(100 * method.last_improvement)} %"
    text = f"{method.title} has not converged: the last fifth of its rounds still improved validation by {shown}"
    if method.label != summary.baseline:
        return [Concern(method.label, "convergence", f"{text}; more rounds may help it.")]
    return [Concern(method.label, "convergence", f"{text}, so {overstated}", "serious")]


def _small_test_sets(summary: Summary, sizes: over.Floats) -> list[Concern]:
    small = float((sizes < SIZEABLE).mean()) if len(sizes) else 0.0
    if small <= 0.5 or not summary.compared:
        return []
    return [
        Concern(
            "", "small test sets",
            f"{percent(100 * small)} % of clients are tested on fewer than {SIZEABLE} examples (median "
            f"{np.median(sizes):,.0f}): whether one of them is hurt is largely noise; the intervals of the means are "
            "not affected.",
        )
    ]  # fmt: skip


def _hurt(summary: Summary, method: MethodSummary, cells: Cells, sizes: over.Floats) -> list[Concern]:
    """Warns if many clients are hurt, also among those with large test sets."""
    if method.against is None:
        return []
    if math.isfinite(method.against.hurt_beyond):
        if method.against.hurt_beyond <= MUCH_BEYOND:
            return []
        share = percent(100 * method.against.hurt_beyond)
        text = f"{method.title} hurts {share} % of clients beyond chance: let clients accept a personal model only"
        return [Concern(method.label, "hurt", f"{text} where it helps them.", "serious")]
    if method.against.hurt.value <= MUCH_HURT:
        return []
    large = sizes >= SIZEABLE
    enough = int(large.sum()) >= 10
    pairs = over.gains(cells.of(method.label)[:, large], cells.of(summary.baseline)[:, large], summary.lower_is_better)
    everyone = f"{method.title} hurts {percent(100 * method.against.hurt.value)} % of clients"
    if not enough:
        return [
            Concern(
                method.label, "hurt",
                f"{everyone}; too few of them have {SIZEABLE} test examples or more to tell hurt from noise.",
            )
        ]  # fmt: skip
    if pairs.hurt.value <= MUCH_HURT:
        return []
    of = count(int(large.sum()), "client")
    return [
        Concern(
            method.label, "hurt",
            f"{everyone}, and {percent(100 * pairs.hurt.value)} % of the {of} with {SIZEABLE} test examples or more: "
            "let clients accept a personal model only where it helps them.",
        )
    ]  # fmt: skip


def _collapse(method: MethodSummary, table: pd.DataFrame) -> list[Concern]:
    """Warns if one cluster holds nearly all clients."""
    from bespoke.statistics.clusters import clusters_of

    ended = method.largest_cluster.by_seed if method.largest_cluster else []
    high = [share for share in ended if share > COLLAPSED]
    if high:
        where = f"in {len(high)} of {len(ended)} seeds" if len(ended) > 1 else "here"
        text = (
            f"{method.title} collapsed {where}: in the last round one cluster held up to {percent(100 * max(high))} % "
            "of the clients, so the others are hardly trained; a warm start or fewer clusters may help."
        )
        return [Concern(method.label, "collapse", text, "serious")]
    for clusters in clusters_of(table[table["method"] == method.label]):
        if clusters.largest.value > COLLAPSED:
            part = percent(100 * clusters.largest.value)
            text = f"{method.title}: {part} % of clients are in one cluster (mode collapse); a warm start may help."
            return [Concern(method.label, "collapse", text, "serious")]
    return []


def _edge_of_grid(study: RunSet, method: MethodSummary) -> list[Concern]:
    """Warns if a tuned value is the smallest or largest tried: the best value may lie beyond."""
    entry = study.entry(method.label)
    chosen = entry.get("chosen") or {}
    tried = [trial.get("knobs") or {} for trial in entry.get("tuning") or []]
    edges = []
    for knob, value in chosen.items():
        values = sorted({knobs[knob] for knobs in tried if _number(knobs.get(knob))})
        if _number(value) and len(values) > 2 and value in (values[0], values[-1]):
            edges.append(f"{knob} = {value:g} ({'smallest' if value == values[0] else 'largest'} of {len(values)})")
    return [Concern(method.label, "grid", f"{method.title} was tuned to the edge of what was tried: {listing(edges)}. "
                    "The best value may lie beyond.")] if edges else []  # fmt: skip


def _edge_of_candidates(method: MethodSummary, runs: list[FinishedRun], table: pd.DataFrame) -> list[Concern]:
    """The same for what is chosen among candidates, 'lr 0.1, epoch 10': by all together, or by most clients."""
    names = list((runs[0].result.get("candidates") or {}) if runs else {})
    settings = {name: settings_of(name) for name in names}
    words = list(dict.fromkeys(word for found in settings.values() for word in found))
    chosen = Counter(table["candidate"][table["method"] == method.label]) if "candidate" in table else Counter[str]()
    edges = []
    for word in words:
        values = sorted({found[word] for found in settings.values() if word in found and found[word] != 0})
        picked = {name: many for name, many in chosen.items() if word in settings.get(name, {})}
        if len(values) < 3 or not picked:
            continue
        for edge, which in ((values[0], "smallest"), (values[-1], "largest")):
            part = sum(many for name, many in picked.items() if settings[name][word] == edge) / chosen.total()
            if part > MANY and not (which == "smallest" and word == "epoch") and (word, edge) not in ENDS:
                edges.append(f"{word} {edge:g}, the {which} of {len(values)}, by {percent(100 * part)} % of clients")
    return [Concern(method.label, "grid", f"{method.title}: chosen at the edge of what was tried: {listing(edges)}. "
                    "The best value may lie beyond.")] if edges else []  # fmt: skip


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
