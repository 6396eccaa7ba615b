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
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bespoke.errors import unknown
from bespoke.metrics import clients as over
from bespoke.metrics import significance
from bespoke.metrics.acceptance import Accepted, acceptances
from bespoke.metrics.clients import Cells, Gains, OverSeeds, Run, Study, load_clients, read_study
from bespoke.metrics.guarantee import guarantees
from bespoke.metrics.significance import Interval
from bespoke.metrics.text import jsonable

if TYPE_CHECKING:
    import pandas as pd

BEFORE = "before personalization"  # stands in as the baseline when there is only one method
ALPHA = 0.05
MOST_LISTED = 50  # hurt clients kept by name
FEW_CLIENTS = 20
COLLAPSED = 0.9  # share of the clients in one cluster above which the others hardly exist

Verdict = Literal["better", "worse", "mixed", "unclear"]


@dataclass(frozen=True)
class Affected:
    """A client that is hurt or helped: its values averaged over its seeds."""

    client: str
    group: str
    examples: float
    baseline: float
    value: float
    difference: float
    seeds_agreeing: int  # in how many of its seeds the client is hurt (helped)
    seeds: int


@dataclass(frozen=True)
class Against:
    """A method against the baseline, paired over clients."""

    difference: float
    interval: Interval
    relative: float
    relative_interval: Interval
    p: float
    p_holm: float
    verdict: Verdict
    hurt: OverSeeds
    helped: OverSeeds
    same: OverSeeds
    hurt_clients: int
    helped_clients: int
    mean_loss: float
    mean_gain: float
    most_hurt: list[Affected]
    most_helped: list[Affected]
    examples_correlation: float  # Spearman, of a client's gain with its examples
    examples_p: float


@dataclass(frozen=True)
class Cost:
    """What a method costs: medians over seeds. `per client` means one that takes part in every round."""

    rounds: float
    bytes_down: float  # per client
    bytes_up: float
    bytes_down_round: float  # per client and round, median over rounds
    bytes_up_round: float
    bytes_down_total: float
    bytes_up_total: float
    steps: float  # per client, training and personalization
    steps_total: float
    personalization_steps: float  # per tested client
    personalization_bytes: float

    @property
    def bytes(self) -> float:
        """Down and up, per client."""
        return self.bytes_down + self.bytes_up


@dataclass(frozen=True)
class GroupNumbers:
    """One group of clients under one method."""

    group: str
    clients: int
    mean: float
    difference: float
    relative: float
    hurt: float


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
            against = _against(
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
                cost=_cost(runs),
                groups=_groups(box, label, baseline, compared.get(label), lower),
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


def _against(
    box: Cells,
    label: str,
    baseline: str,
    gains: Gains,
    p_values: tuple[float, float],
    samples: over.Floats,
    baseline_samples: over.Floats,
    lower: bool,
) -> Against:
    at_baseline = over.mean(box.of(baseline)).value
    difference = over.mean(box.of(label) - box.of(baseline)).value
    interval = significance.percentile_interval(samples - baseline_samples)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = 100.0 * (samples - baseline_samples) / np.abs(baseline_samples)
    gained = -interval.side if lower else interval.side
    rho, rho_p = significance.spearman(box.examples, gains.client)
    return Against(
        difference=difference,
        interval=interval,
        relative=significance.relative_change(difference, at_baseline),
        relative_interval=significance.percentile_interval(ratios),
        p=p_values[0],
        p_holm=p_values[1],
        verdict=_verdict(p_values[1], gained, -difference if lower else difference, gains),
        hurt=gains.hurt,
        helped=gains.helped,
        same=gains.same,
        hurt_clients=len(gains.hurt_clients),
        helped_clients=len(gains.helped_clients),
        mean_loss=gains.mean_loss,
        mean_gain=gains.mean_gain,
        most_hurt=_affected(box, label, baseline, gains, gains.hurt_clients, worse=True),
        most_helped=_affected(box, label, baseline, gains, gains.helped_clients, worse=False),
        examples_correlation=rho,
        examples_p=rho_p,
    )


def _verdict(p: float, gained: int, mean_gain: float, gains: Gains) -> Verdict:
    """The test speaks of the typical client, the interval of the mean: a verdict needs both, on the same side."""
    typical = np.sign(gains.helped.value - gains.hurt.value)
    if p < ALPHA and gained != 0 and gained == typical:
        return "better" if gained > 0 else "worse"
    sure_of_one = p < ALPHA or gained != 0
    return "mixed" if sure_of_one and np.sign(mean_gain) * typical < 0 else "unclear"


def _affected(
    box: Cells, label: str, baseline: str, gains: Gains, positions: Sequence[int], worse: bool
) -> list[Affected]:
    rows = []
    for i in positions[:MOST_LISTED]:
        pairs = gains.pairs[:, i]
        known = np.isfinite(pairs)
        value, before = fmean(box.of(label)[known, i]), fmean(box.of(baseline)[known, i])
        agreeing = int(((pairs < 0) if worse else (pairs > 0)).sum())
        rows.append(
            Affected(
                box.clients[i], box.groups[i], float(box.examples[i]), before, value, value - before,
                agreeing, int(known.sum()),
            )
        )  # fmt: skip
    return rows


def _groups(box: Cells, label: str, baseline: str, gains: Gains | None, lower: bool) -> list[GroupNumbers]:
    """Per group, if groups say more than the ids do."""
    names = sorted(set(box.groups))
    if len(names) < 2 or len(names) == len(box.clients):
        return []
    groups = np.array(box.groups)
    values, shared = box.of(label), box.of(baseline) if baseline in box.methods else None
    rows = []
    for name in names:
        inside = groups == name
        difference = relative = hurt = math.nan
        if gains is not None and shared is not None:
            difference = over.mean(values[:, inside] - shared[:, inside]).value
            relative = significance.relative_change(difference, over.mean(shared[:, inside]).value)
            hurt = over.gains(values[:, inside], shared[:, inside], lower).hurt.value
        rows.append(
            GroupNumbers(name, int(inside.sum()), over.mean(values[:, inside]).value, difference, relative, hurt)
        )
    return rows


def _cost(runs: Sequence[Run]) -> Cost:
    costs = [_cost_of(run) for run in runs]
    return Cost(**{name: float(median(getattr(cost, name) for cost in costs)) for name in Cost.__dataclass_fields__})


def _cost_of(run: Run) -> Cost:
    down: list[float] = []
    up: list[float] = []
    steps = personal_steps = personal_bytes = 0.0
    tested = max(int(run.result.get("clients", 0)), 1)
    for line in run.lines("ledger.jsonl"):
        if line.get("round") is None:
            personal_steps += line.get("steps", 0) / (line.get("contacted") or tested)
            personal_bytes += line.get("bytes_down", 0) / (line.get("contacted") or tested)
        elif line.get("contacted"):
            reported = line.get("reported") or line["contacted"]
            down.append(line.get("bytes_down", 0) / line["contacted"])
            up.append(line.get("bytes_up", 0) / reported)
            steps += line.get("steps", 0) / reported
    result = run.result
    return Cost(
        rounds=result.get("rounds", len(down)),
        bytes_down=math.fsum(down) + personal_bytes,
        bytes_up=math.fsum(up),
        bytes_down_round=median(down) if down else 0.0,
        bytes_up_round=median(up) if up else 0.0,
        bytes_down_total=result.get("bytes_down", 0),
        bytes_up_total=result.get("bytes_up", 0),
        steps=steps + personal_steps,
        steps_total=result.get("steps", 0),
        personalization_steps=personal_steps,
        personalization_bytes=personal_bytes,
    )


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
