"""A comparison in the form of Motley's Tables 4 to 7: the paper's numbers for each method, in the paper's order.

Per-client mean and spread, each averaged over seeds and with its own spread over seeds; the clients hurt against the
fedavg run of the same seed; tuned hyper-parameters; practical concerns. Published values come from the comparison's
[expected] table: mean, sd_seeds, sd_clients, sd_clients_seeds, hurt, hurt_seeds, and for clusters clusters, largest,
largest_seeds, by method.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bespoke.plain import Named
from bespoke.records import MethodRecord
from bespoke.report.checks import Concern
from bespoke.report.summary import MethodSummary, Summary
from bespoke.statistics import clients as over
from bespoke.statistics.clients import OverSeeds
from bespoke.statistics.clusters import clusters_of
from bespoke.statistics.converged import improvement, in_words
from bespoke.statistics.folders import RunSet
from bespoke.statistics.formatting import metric_name, number, percent

if TYPE_CHECKING:
    import pandas as pd

ALGORITHMS = {
    "fedavg": "FedAvg",
    "local": "Local training",
    "finetune": "FedAvg + fine-tuning (FT)",
    "hypcluster": "HypCluster / IFCA",
    "ensemble": "Ensemble of k FedAvg models",
    "knn-per": "FedAvg + kNN-Per",
    "ditto": "MTL (Ditto)",
    "mocha": "MTL (Mocha)",
    "mr-mtl": "MTL (MR-MTL)",
}
PARTS = {"all": "all layers", "last": "last layer", "last-then-all": "last layer, then all"}
CONCERNS = {
    "hurt": "may hurt clients",
    "grid": "tuned to the edge of what was tried",
    "collapse": "mode collapse",
    "state": "needs clients that remember",
}


@dataclass(frozen=True)
class TableLine:
    """A line of the table: a number with its spread over seeds, or a text; and what the paper says."""

    label: str
    algorithm: str
    what: str
    ours: OverSeeds | None = None
    text: str = ""
    paper: float | None = None
    paper_spread: float | None = None
    paper_text: str = ""
    fraction: bool = False  # shown in percent

    def shown(self) -> str:
        if self.ours is None:
            return self.text
        value, spread = self.ours.value, self.ours.spread
        if self.fraction:
            return _with(f"{percent(100 * value)} %", f"{percent(100 * spread)} %", spread)
        return _with(number(value, 4), number(spread, 2), spread)

    def published(self) -> str:
        """The digits of the paper, no more."""
        if self.paper is None:
            return self.paper_text
        scale, unit = (100, " %") if self.fraction else (1, "")
        spread = None if self.paper_spread is None else f"{scale * self.paper_spread:g}{unit}"
        return _with(f"{scale * self.paper:g}{unit}", spread, self.paper_spread)


def _with(value: str, spread: str | None, known: float | None) -> str:
    return f"{value} ± {spread}" if known is not None and math.isfinite(known) else value


def motley_lines(study: RunSet, table: pd.DataFrame, summary: Summary, found: Sequence[Concern]) -> list[TableLine]:
    """The table, a method after the other."""
    expected = study.compare.get("expected") or {}
    expected = {label: entry for label, entry in expected.items() if isinstance(entry, dict)}
    lines = []
    for method in summary.methods:
        lines += _of_method(study, table, summary, method, expected, found)
    return lines


def _of_method(
    study: RunSet, table: pd.DataFrame, summary: Summary, method: MethodSummary,
    expected: Named, found: Sequence[Concern],
) -> list[TableLine]:  # fmt: skip
    entry = study.entry(method.label)
    kind = str(entry.get("name") or method.label)
    algorithm = ALGORITHMS.get(kind, method.title)
    if method.label != kind:
        algorithm = f"{algorithm}: {method.label}"
    paper = expected.get(method.label, {})
    name = f"per-client {metric_name(summary.metric)}"

    def line(what: str, **rest: Any) -> TableLine:
        return TableLine(method.label, algorithm, what, **rest)

    lines = []
    tuned = kind == "finetune"
    if tuned:
        before = over.cells(table[table["method"] == method.label], f"baseline_{summary.metric}").of(method.label)
        shared = paper.get("before") or expected.get("fedavg", {})
        lines += _mean_and_spread(line, f"{name}{{}} before FT", over.mean(before), over.deviation(before), shared)
    after = " after FT" if tuned else ""
    lines += _mean_and_spread(line, f"{name}{{}}{after}", method.mean, method.deviation, paper)
    if method.against:
        lines.append(
            line(f'% clients "hurt"{after}', ours=method.against.hurt, fraction=True,
                 paper=paper.get("hurt"), paper_spread=paper.get("hurt_seeds"))
        )  # fmt: skip
    lines += _clustering(line, table, method, entry, paper)
    if tuned:
        single = str((study.compare.get("model") or {}).get("name")) == "Linear"
        layers = PARTS[_knob(entry, "part", "all")]
        if "part" not in (entry.get("chosen") or {}):
            layers = f"not compared ({layers})"
        lines.append(line("FT all layers vs last layer", text="N/A (one layer)" if single else layers,
                          paper_text=str(paper.get("layers", ""))))  # fmt: skip
    chosen = _tuned(study, method, entry)
    if chosen:
        lines.append(line("tuned hyper-parameters", text=chosen, paper_text=str(paper.get("chosen", ""))))
    runs = [run for run in study.runs if run.label == method.label]
    if math.isfinite(gain := improvement(runs, summary.metric, summary.lower_is_better)):
        lines.append(line("still improving on validation", text=in_words(gain)))
    kinds = [concern.kind for concern in found if concern.label == method.label]
    mine = dict.fromkeys(CONCERNS.get(kind, kind) for kind in kinds if kind != "convergence")  # its line stands above
    if mine:
        lines.append(line("practical concerns", text="; ".join(mine)))
    return lines


def _mean_and_spread(line: Any, what: str, mean: OverSeeds, deviation: OverSeeds, paper: Named) -> list[TableLine]:
    return [
        line(what.format(" mean"), ours=mean, paper=paper.get("mean"), paper_spread=paper.get("sd_seeds")),
        line(what.format(" std"), ours=deviation, paper=paper.get("sd_clients"),
             paper_spread=paper.get("sd_clients_seeds")),
    ]  # fmt: skip


def _clustering(
    line: Any, table: pd.DataFrame, method: MethodSummary, entry: MethodRecord, paper: Named
) -> list[TableLine]:
    found = clusters_of(table[table["method"] == method.label])
    if not found:
        return []
    stages = entry.get("stages") or []
    warm = "yes" if len(stages) > 1 else "no"
    k = _knob(entry, "k", len(found[0].names))
    lines = [
        line("no. tuned clusters (k)", text=str(k), paper_text=str(paper.get("clusters", ""))),
        line("% clients largest cluster", ours=found[0].largest, fraction=True, paper=paper.get("largest"),
             paper_spread=paper.get("largest_seeds")),
        line("warm start from FedAvg", text=warm, paper_text=str(paper.get("warm", ""))),
    ]  # fmt: skip
    if found[0].agreement is not None:
        lines.append(line("agreement with known groups (adjusted Rand index)", ours=found[0].agreement))
    return lines


def _knob(entry: MethodRecord, knob: str, default: Any) -> Any:
    stages = entry.get("stages") or [{}]
    return (entry.get("chosen") or {}).get(knob, stages[-1].get(knob, default))


def _tuned(study: RunSet, method: MethodSummary, entry: MethodRecord) -> str:
    """What was chosen on validation data: knobs by trials, and candidates by the runs."""
    parts = [f"{knob} = {_plain(value)}" for knob, value in (entry.get("chosen") or {}).items()]
    results = [run.result.get("chosen") or {} for run in study.runs if run.label == method.label]
    names = Counter(str(result["candidate"]) for result in results if "candidate" in result)
    if any(result.get("by_client") for result in results):
        parts.append("each client for itself")
    elif names:
        most = names.most_common(1)[0]
        parts.append(most[0] if most[1] == len(results) else f"{most[0]} ({most[1]} of {len(results)} seeds)")
    return ", ".join(parts)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
