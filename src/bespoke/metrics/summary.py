"""A comparison in numbers and in words: does personalization help, by how much, who is hurt, what does it cost.

Conventions: `difference` is method minus baseline in the metric's own units and `relative` is the same in percent of
the baseline; a `gain` is positive where the client is better off, whatever the metric.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bespoke.errors import unknown
from bespoke.metrics import clients as over
from bespoke.metrics import significance
from bespoke.metrics.acceptance import Accepted, acceptances
from bespoke.metrics.against import Against, GroupNumbers, by_group, paired
from bespoke.metrics.clients import OverSeeds
from bespoke.metrics.cost import Cost, cost_of
from bespoke.metrics.folders import Run, Study, load_clients, read_study
from bespoke.metrics.guarantee import guarantees
from bespoke.metrics.significance import Interval
from bespoke.metrics.text import jsonable

if TYPE_CHECKING:
    import pandas as pd

BEFORE = "before personalization"  # stands in as the baseline when there is only one method
FEW_CLIENTS = 20
COLLAPSED = 0.9  # share of the clients in one cluster above which the others hardly exist


@dataclass(frozen=True)
class MethodSummary:
    """Everything about one method."""

    label: str
    title: str
    personal: bool  # whether the tested models differ from the model before personalization
    mean: OverSeeds
    interval: Interval
    weighted_mean: OverSeeds
    deviation: OverSeeds
    deciles: list[OverSeeds]
    worst_tenth: OverSeeds
    richest_tenth: OverSeeds
    before: OverSeeds  # the mean of the same clients before personalization
    other_metrics: dict[str, OverSeeds]
    against: Against | None
    cost: Cost | None
    groups: list[GroupNumbers]
    chosen: dict[str, Any]
    revealed: dict[str, str]  # field that leaves the client -> what the server learns of it
    excluded: dict[str, int]  # client -> rounds in which its update was not finite
    undefined: int  # (seed, client) cells without a finite value
    largest_cluster: OverSeeds | None  # share of the last round's clients that chose it, where there are clusters


@dataclass(frozen=True)
class Summary:
    """The answer to the question, and all it rests on."""

    title: str
    question: str
    metric: str
    lower_is_better: bool
    baseline: str
    baseline_is_shared: bool
    best: str
    seeds: list[int]
    clients: int
    unevaluated: int
    left_out: int
    methods: list[MethodSummary]
    rivals: dict[str, Interval] = field(default_factory=dict)  # best minus the other, in the metric's units
    answer: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    accepted: list[Accepted] = field(default_factory=list)  # the methods under rules of acceptance

    def method(self, label: str) -> MethodSummary:
        return next(method for method in self.methods if method.label == label)

    @property
    def compared(self) -> list[MethodSummary]:
        """The methods that stand against the baseline."""
        return [method for method in self.methods if method.against]

    def to_json(self) -> str:
        """Six significant digits; null where a number is not defined."""
        return json.dumps(jsonable(asdict(self), 6), indent=1, ensure_ascii=False, allow_nan=False)


def summarize(paths: Sequence[Path]) -> Summary:
    """Summarize a comparison folder, or any run folders, as found on disk."""
    return summarize_study(*read(paths))


def read(paths: Sequence[Path]) -> tuple[Study, pd.DataFrame]:
    """The runs and the table of all their clients."""
    study = read_study([Path(path) for path in paths])
    return study, load_clients(run.folder for run in study.runs)


def summarize_study(study: Study, table: pd.DataFrame) -> Summary:
    """From runs and their table of clients to numbers, then to words."""
    metric, lower = str(study.runs[0].result["metric"]), bool(study.runs[0].result["lower_is_better"])
    column = f"query_{metric}"
    baseline = _choose_baseline(study, table, metric)
    tested = with_before(table, metric) if baseline == BEFORE else table
    box = over.cells(tested, column)
    listed = {str(entry["label"]): entry for entry in study.compare.get("methods", [])}

    defined = [label for label in box.methods if np.isfinite(box.of(label)).any()]
    indices = [box.methods.index(label) for label in defined]
    # One client says nothing about others: no interval rather than one of no width.
    resampled = significance.bootstrap_means(box.values[indices]) if len(box.clients) > 1 else np.full((1, 99), np.nan)
    samples = {label: resampled[:, i] for i, label in enumerate(defined)}

    compared = {
        label: over.gains(box.of(label), box.of(baseline), lower)
        for label in defined
        if baseline in defined and label != baseline
    }
    p_values = [significance.wilcoxon(gains.client) for gains in compared.values()]
    corrected = dict(zip(compared, zip(p_values, significance.holm(p_values))))

    methods = []
    for label in box.methods:
        if label == BEFORE:
            continue
        runs = [run for run in study.runs if run.label == label and run.seed in box.seeds]
        values = box.of(label)
        against = None
        if label in compared:
            against = paired(
                box, label, baseline, compared[label], corrected[label], samples[label], samples[baseline], lower
            )
        methods.append(
            MethodSummary(
                label=label,
                title=str(listed.get(label, {}).get("title") or label),
                personal=_is_personal(table, label, metric),
                mean=over.mean(values),
                interval=significance.percentile_interval(samples.get(label, np.full(1, np.nan))),
                weighted_mean=over.weighted_mean(values, box.weights),
                deviation=over.deviation(values),
                deciles=over.deciles(values),
                worst_tenth=over.worst_tenth(values, lower),
                richest_tenth=over.richest_tenth(values, box.examples),
                before=_mean_of(table, label, f"baseline_{metric}", box.seeds),
                other_metrics={
                    name: _mean_of(table, label, f"query_{name}", box.seeds)
                    for name in study.runs[0].result.get("metrics", [])
                    if name != metric
                },
                against=against,
                cost=cost_of(runs),
                groups=by_group(box, label, baseline, compared.get(label), lower),
                chosen=dict(listed.get(label, {}).get("chosen") or runs[0].result.get("chosen") or {}),
                revealed=_revealed(runs),
                excluded=_excluded(runs),
                undefined=box.undefined[label],
                largest_cluster=_largest_cluster(runs),
            )
        )

    ranked = sorted((m for m in methods if math.isfinite(m.mean.value)), key=lambda m: m.mean.value, reverse=not lower)
    best = ranked[0].label if ranked else methods[0].label
    summary = Summary(
        title=str(study.compare.get("title") or ", ".join(study.labels)),
        question=str(study.compare.get("question") or ""),
        metric=metric,
        lower_is_better=lower,
        baseline=baseline,
        baseline_is_shared=baseline == BEFORE or (baseline != "" and not _is_personal(table, baseline, metric)),
        best=best,
        seeds=box.seeds,
        clients=len(box.clients),
        unevaluated=max(int(run.result.get("unevaluated", 0)) for run in study.runs),
        left_out=box.left_out,
        methods=methods,
    )
    from bespoke.metrics import answer as words  # it speaks of summaries, so it is imported after them

    top = words.winner(summary)
    if top:
        others = [label for label in samples if label not in (top.label, baseline)]
        summary.rivals.update(
            {label: significance.percentile_interval(samples[top.label] - samples[label]) for label in others}
        )
    summary.accepted.extend(acceptances(study.runs, table, metric, lower, baseline, study.compare.get("accept") or {}))
    summary.notes.extend(_notes(study, summary, table))
    summary.answer.extend([*words.answer(summary), *private(study, summary)])
    return summary


# ------------------------------------------------------------------------------------------------ parts of a summary


def with_before(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The table with the model before personalization as one more method."""
    import pandas as pd

    before = table.assign(**{"method": BEFORE, f"query_{metric}": table[f"baseline_{metric}"]})
    return pd.concat([before, table], ignore_index=True)


def _choose_baseline(study: Study, table: pd.DataFrame, metric: str) -> str:
    labels = study.labels
    if len(labels) == 1:
        known = f"baseline_{metric}" in table and bool(np.isfinite(table[f"baseline_{metric}"]).any())
        return BEFORE if known and _is_personal(table, labels[0], metric) else labels[0]
    wanted = study.compare.get("baseline")
    if wanted is None:
        return "fedavg" if "fedavg" in labels else labels[0]
    if wanted not in labels:
        raise unknown("baseline", wanted, labels, "compare.json")
    return str(wanted)


def _is_personal(table: pd.DataFrame, label: str, metric: str) -> bool:
    if f"baseline_{metric}" not in table:
        return label != "fedavg"
    rows = table[table["method"] == label]
    tested, before = rows[f"query_{metric}"].to_numpy(float), rows[f"baseline_{metric}"].to_numpy(float)
    if not np.isfinite(before).any():
        return label != "fedavg"
    both = np.isfinite(tested) & np.isfinite(before)
    return not np.allclose(tested[both], before[both], rtol=1e-6, atol=0.0)


def _mean_of(table: pd.DataFrame, label: str, column: str, seeds: Sequence[int]) -> OverSeeds:
    if column not in table:
        return over.over_seeds([])
    rows = table[table["method"] == label]
    return over.mean(np.vstack([_padded(rows, column, seed) for seed in seeds]))


def _padded(rows: pd.DataFrame, column: str, seed: int) -> over.Floats:
    values = rows[column][rows["seed"] == seed].to_numpy(float)
    return np.pad(values, (0, len(rows) - len(values)), constant_values=np.nan)


def _revealed(runs: Sequence[Run]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in runs[0].lines("ledger.jsonl"):
        fields |= line.get("revealed") or {}
    return fields


def _largest_cluster(runs: Sequence[Run]) -> OverSeeds | None:
    shares = [list(run.largest_shares().values()) for run in runs]
    return over.over_seeds(share[-1] for share in shares if share) if any(shares) else None


def _excluded(runs: Sequence[Run]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for run in runs:
        for client, count in (run.result.get("excluded") or {}).items():
            counts[client] = counts.get(client, 0) + int(count)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _notes(study: Study, summary: Summary, table: pd.DataFrame) -> list[str]:
    notes = [str(note) for note in study.compare.get("notes") or []]
    notes += dict.fromkeys(str(note) for run in study.runs for note in run.result.get("notes") or [])
    if set(table["seed"]) - set(summary.seeds):
        notes.append(
            f"Only seeds {', '.join(map(str, summary.seeds))} were run with every method; the others are left out."
        )
    if not study.compare and len(study.labels) > 1:
        notes.append(f"The runs name no baseline; {summary.baseline} was taken.")
    notes.extend(
        f"{method.title}: {method.undefined} client results were not finite numbers."
        for method in summary.methods
        if method.undefined
    )
    if summary.left_out:
        notes.append(
            f"{summary.left_out} of {summary.left_out + summary.clients * len(summary.seeds)} client results "
            "were left out for all methods, because at least one method had no finite number there."
        )
    return notes


def private(study: Study, summary: Summary) -> list[str]:
    """A sentence with every method's epsilon, where there was privacy."""
    rows = guarantees(study)
    if not rows:
        return []
    listed = "; ".join(f"{summary.method(row['label']).title} {row['epsilon']}" for row in rows)
    aside = "" if all(row["secret"] for row in rows) else " The noise was reproducible: these runs are NOT private."
    deltas = " to ".join(sorted({f"{row['delta']:.2g}" for row in rows}))
    return [f"Privacy of released models, epsilon at delta {deltas}: {listed}.{aside}"]
