"""Makes one Report from run folders, shared by the terminal, JSON and the page; nothing is computed twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bespoke.errors import unknown
from bespoke.report import wording
from bespoke.report.best import best_by
from bespoke.report.checks import concerns
from bespoke.report.guarantee import all_together, guarantees
from bespoke.report.stopped import stopped_early
from bespoke.report.summary import BEFORE, CONSTANT, POOLED, MethodSummary, Summary, with_before
from bespoke.statistics import clients as over
from bespoke.statistics import significance
from bespoke.statistics.acceptance import acceptances
from bespoke.statistics.beyond import Beyond, beyond, read_rows, rows_metric
from bespoke.statistics.clients import Cells
from bespoke.statistics.converged import last_improvement
from bespoke.statistics.cost import cost_of
from bespoke.statistics.folders import FinishedRun, RunSet, load_clients, read_study
from bespoke.statistics.formatting import metric_name
from bespoke.statistics.harm import cost_of_attack
from bespoke.statistics.language import language_rows
from bespoke.statistics.parts import excluded, is_personal, largest_cluster, mean_of, revealed, unnamed
from bespoke.statistics.versus_baseline import Against, by_group, paired

if TYPE_CHECKING:
    import pandas as pd

ABSURD = 100  # times the mean error of a constant prediction; a method above it has diverged, even if it is finite


@dataclass(frozen=True)
class Report:
    """Finished runs, the table of all their clients, and the summary of both."""

    study: RunSet
    table: pd.DataFrame
    summary: Summary

    @classmethod
    def read(cls, paths: Sequence[Path], name_clients: bool = False) -> Report:
        """Read a comparison folder, or any run folders, once, and summarize them.

        Single clients of runs under [privacy] are named only with `name_clients`.
        """
        study, table = read(paths)
        return cls(study, table, summarize_study(study, table, name_clients))


def summarize(paths: Sequence[Path], name_clients: bool = False) -> Summary:
    """Summarize a comparison folder, or any run folders, as found on disk.

    Single clients of runs under [privacy] are named only with `name_clients`.
    """
    return Report.read(paths, name_clients).summary


def read(paths: Sequence[Path]) -> tuple[RunSet, pd.DataFrame]:
    """The runs and the table of all their clients."""
    study = read_study([Path(path) for path in paths])
    return study, load_clients(study.runs)


def summarize_study(study: RunSet, table: pd.DataFrame, name_clients: bool = False) -> Summary:
    """From runs and their table of clients to numbers, then to words.

    A method that diverged is not compared: an infinite mean is worse than any other without a test, so it is not
    among the comparisons that Holm's correction counts, and it can be neither winner nor rival.
    """
    numbers = _Numbers.of(study, table, name_clients or not study.private)
    box, metric, lower, baseline = numbers.box, numbers.metric, numbers.lower, numbers.baseline
    gains = {
        label: over.gains(box.of(label), box.of(baseline), lower)
        for label in numbers.sound
        if baseline in numbers.sound and label != baseline
    }
    p_values = [significance.wilcoxon(each.client) for each in gains.values()]
    corrected = dict(zip(gains, zip(p_values, significance.holm(p_values))))
    methods = [
        numbers.method(label, [run for run in study.runs if run.label == label and run.seed in box.seeds],
                       gains.get(label), corrected.get(label, (math.nan, math.nan)))
        for label in box.methods if label != BEFORE
    ]  # fmt: skip

    ranked = sorted((m for m in methods if math.isfinite(m.mean.value)), key=lambda m: m.mean.value, reverse=not lower)
    best = ranked[0].label if ranked else methods[0].label
    summary = Summary(
        title=str(study.compare.get("title") or ", ".join(study.labels)),
        question=str(study.compare.get("question") or ""),
        metric=metric,
        lower_is_better=lower,
        baseline=baseline,
        baseline_is_shared=baseline == BEFORE or (baseline != "" and not is_personal(table, baseline, metric)),
        best=best,
        seeds=box.seeds,
        clients=len(box.clients),
        unevaluated=max(int(run.result.get("unevaluated", 0)) for run in study.runs),
        left_out=box.left_out,
        methods=methods,
        references=[numbers.reference(label) for label in box.references],
        names_clients=numbers.named,
        language=language_rows(table, [method.label for method in methods]),
    )
    samples = numbers.samples
    top = wording.winner(summary)
    if top:
        others = [label for label in numbers.sound if label not in (top.label, baseline)]
        summary.rivals.update(
            {label: significance.percentile_interval(samples[top.label] - samples[label]) for label in others}
        )
    for label, above in ((CONSTANT, summary.above_constant), (POOLED, summary.above_pooled)):
        if label in samples:
            above |= {m: significance.percentile_interval(samples[m] - samples[label]) for m in numbers.sound}
    lower_metrics = study.runs[0].result.get("lower") or []
    of_methods = {label: drawn for label, drawn in samples.items() if label in numbers.sound and label != BEFORE}
    summary.best_by.extend(best_by(methods, metric, lower, lower_metrics, of_methods, summary.language))
    sound = table[table["method"].isin(numbers.sound)]
    summary.accepted.extend(acceptances(study.runs, sound, metric, lower, baseline, study.compare.get("accept") or {}))
    summary.notes.extend(_notes(study, summary, table))
    summary.answer.extend([*wording.answer(summary), *private(study, summary)])
    titles = {method.label: method.title for method in summary.methods}
    summary.answer.extend(cost_of_attack(study, metric_name(summary.metric), titles))
    summary.answer.extend(stopped_early(study, titles))
    summary.concerns.extend(concerns(study, summary, table))
    return summary


@dataclass(frozen=True)
class _Numbers:
    """All clients' values under all methods, and the statistics of one method at a time."""

    study: RunSet
    table: pd.DataFrame
    metric: str
    lower: bool
    baseline: str
    box: Cells
    sound: list[str]  # methods that did not diverge
    samples: dict[str, over.Floats]  # bootstrap means of these and of the references, resampled alike
    rows: dict[str, pd.DataFrame | None]  # test rows, where they were kept
    named: bool  # single clients may be named

    @classmethod
    def of(cls, study: RunSet, table: pd.DataFrame, named: bool) -> _Numbers:
        metric, lower = str(study.runs[0].result["metric"]), bool(study.runs[0].result["lower_is_better"])
        baseline = _choose_baseline(study, table, metric)
        tested = with_before(table, metric) if baseline == BEFORE else table
        beside = load_clients(study.references) if study.references else None
        box = _without_absurd(over.cells(tested, f"query_{metric}", None, lower, beside), lower)
        sound = [m for m in box.methods if not box.undefined[m] and np.isfinite(box.of(m)).any()]
        samples = {}
        # One client says nothing about others: no interval rather than one of no width.
        if len(box.clients) > 1:
            finite = {name: values for name, values in box.references.items() if np.isfinite(values).any()}
            sets = [np.stack([box.of(m) for m in sound])] if sound else []
            drawn = significance.bootstrap_together([*sets, *(values[None] for values in finite.values())])
            if sound:
                samples = dict(zip(sound, drawn.pop(0).T))
            samples |= {name: means[:, 0] for name, means in zip(finite, drawn)}
        else:
            samples = {label: np.full(1, np.nan) for label in [*sound, *box.references]}
        runs = [run for run in (*study.runs, *study.references) if run.seed in box.seeds]
        rows = {
            label: read_rows([run for run in runs if run.label == label], metric) for label in [*sound, *box.references]
        }
        return cls(study, table, metric, lower, baseline, box, sound, samples, rows, named)

    def method(
        self, label: str, runs: Sequence[FinishedRun], gains: over.Gains | None, p: tuple[float, float]
    ) -> MethodSummary:
        entry, table, seeds = self.study.entry(label), self.table, self.box.seeds
        against = self._against(label, gains, p) if gains else None
        return MethodSummary(
            label=label,
            title=str(entry.get("title") or label),
            personal=is_personal(table, label, self.metric),
            **self._of_clients(label),
            before=mean_of(table, label, f"baseline_{self.metric}", seeds),
            other_metrics={
                name: mean_of(table, label, f"query_{name}", seeds)
                for name in self.study.runs[0].result.get("metrics", [])
                if name != self.metric
            },
            against=against,
            cost=cost_of(runs),
            groups=by_group(self.box, label, self.baseline, gains, self.lower),
            chosen=dict(entry.get("chosen") or runs[0].result.get("chosen") or {}),
            revealed=revealed(runs),
            excluded=excluded(runs) if self.named else unnamed(excluded(runs)),
            undefined=self.box.undefined[label],
            largest_cluster=largest_cluster(runs),
            verdict="diverged" if self.box.undefined[label] else against.verdict if against else None,
            last_improvement=last_improvement(runs, self.metric, self.lower),
        )

    def reference(self, label: str) -> MethodSummary:
        """A reference beside the methods: no cost, as nothing federated is priced, and a p of its own."""
        listed = {str(entry["label"]): entry for entry in self.study.compare.get("references", [])}
        gains = against = None
        if self.baseline in self.sound and label in self.samples:
            gains = over.gains(self.box.of(label), self.box.of(self.baseline), self.lower)
            p = significance.wilcoxon(gains.client)
            against = self._against(label, gains, (p, p))
        return MethodSummary(
            label=label,
            title=str(listed[label].get("title") or label),
            personal=False,
            **self._of_clients(label),
            before=over.over_seeds([]),
            other_metrics={},
            against=against,
            cost=None,
            groups=by_group(self.box, label, self.baseline, gains, self.lower),
            chosen={},
            revealed={},
            excluded={},
            undefined=0,
            largest_cluster=None,
            verdict=against.verdict if against else None,
            last_improvement=math.nan,
            what=str(listed[label].get("what") or ""),
        )

    def _of_clients(self, label: str) -> dict[str, Any]:
        values = self.box.of(label)
        return {
            "mean": over.mean(values),
            "interval": significance.percentile_interval(self.samples.get(label, np.full(1, np.nan))),
            "weighted_mean": over.weighted_mean(values, self.box.weights),
            "deviation": over.deviation(values),
            "deciles": over.deciles(values),
            "worst_tenth": over.worst_tenth(values, self.lower),
            "richest_tenth": over.richest_tenth(values, self.box.examples),
        }

    def _against(self, label: str, gains: over.Gains, p: tuple[float, float]) -> Against:
        samples = self.samples[label], self.samples[self.baseline]
        found = self._beyond(label)
        against = paired(self.box, label, self.baseline, gains, p, *samples, self.lower, found, self.metric)
        return against if self.named else replace(against, most_hurt=[], most_helped=[])

    def _beyond(self, label: str) -> Beyond | None:
        own, baseline = self.rows.get(label), self.rows.get(self.baseline)
        runs = [[run for run in (*self.study.runs, *self.study.references) if run.label == name]
                for name in (label, self.baseline)]  # fmt: skip
        of = rows_metric(runs[0])
        if own is None or baseline is None or of != rows_metric(runs[1]):
            return None
        return beyond(own, baseline, self.box.clients, of, self.metric, self.lower)


def _without_absurd(box: Cells, lower: bool) -> Cells:
    """The same, where a mean error beyond ABSURD times that of a constant prediction counts as diverged."""
    if not lower or CONSTANT not in box.references:
        return box
    limit = ABSURD * over.mean(box.references[CONSTANT]).value
    values, undefined = box.values.copy(), dict(box.undefined)
    for place, label in enumerate(box.methods):
        if limit > 0 and over.mean(values[place]).value > limit:
            values[place][values[place] > limit] = np.inf
            undefined[label] = int(np.isinf(values[place]).sum())
    return replace(box, values=values, undefined=undefined)


# ------------------------------------------------------------------------------------------------ parts of a summary


def _choose_baseline(study: RunSet, table: pd.DataFrame, metric: str) -> str:
    labels = study.labels
    if len(labels) == 1:
        known = f"baseline_{metric}" in table and bool(np.isfinite(table[f"baseline_{metric}"]).any())
        return BEFORE if known and is_personal(table, labels[0], metric) else labels[0]
    wanted = study.compare.get("baseline")
    if wanted is None:
        return "fedavg" if "fedavg" in labels else labels[0]
    if wanted not in labels:
        raise unknown("baseline", wanted, labels, "compare.json")
    return str(wanted)


def _notes(study: RunSet, summary: Summary, table: pd.DataFrame) -> list[str]:
    notes = [str(note) for note in study.compare.get("notes") or []]
    notes += dict.fromkeys(str(note) for run in study.runs for note in run.result.get("notes") or [])
    if set(table["seed"]) - set(summary.seeds):
        notes.append(
            f"Only seeds {', '.join(map(str, summary.seeds))} were run with every method; the others are left out."
        )
    if not study.compare and len(study.labels) > 1:
        notes.append(f"The runs name no baseline; {summary.baseline} was taken.")
    notes.extend(
        f"{method.title} diverged: {method.undefined} client results are not finite or absurd."
        for method in summary.methods
        if method.diverged
    )
    if summary.left_out:
        notes.append(
            f"{summary.left_out} of {summary.left_out + summary.clients * len(summary.seeds)} client results "
            "were left out for all methods, because the runs of at least one method do not have these clients."
        )
    return notes


def private(study: RunSet, summary: Summary) -> list[str]:
    """A sentence with every method's epsilon, if any run was private."""
    rows = guarantees(study)
    if not rows:
        return []
    listed = "; ".join(f"{summary.method(row['label']).title} {row['epsilon']}" for row in rows)
    aside = "" if all(row["secret"] for row in rows) else " The noise was reproducible: these runs are NOT private."
    deltas = " to ".join(sorted({f"{row['delta']:.2g}" for row in rows}))
    whole = all_together(study.compare.get("spent") or {})
    return [" ".join(filter(None, [f"Privacy of released models, epsilon at delta {deltas}: {listed}.{aside}", whole]))]
