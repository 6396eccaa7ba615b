"""A comparison in numbers and in words: does personalization help, by how much, who is hurt, what does it cost.

Conventions: `difference` is method minus baseline in the metric's own units and `relative` is the same in percent of
the baseline; a `gain` is positive where the client is better off, whatever the metric.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bespoke.errors import unknown
from bespoke.metrics import clients as over
from bespoke.metrics import significance
from bespoke.metrics.clients import Cells, Gains, OverSeeds, Run, Study, load_clients, read_study
from bespoke.metrics.significance import Interval

if TYPE_CHECKING:
    import pandas as pd

BEFORE = "before personalization"  # stands in as the baseline when there is only one method
ALPHA = 0.05
MOST_LISTED = 50  # hurt clients kept by name
FEW_CLIENTS = 20
FINEST_PERCENT = 2  # decimals: nobody minds a change of less than a hundredth of a percent

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
    top = _winner(summary)
    if top:
        others = [label for label in samples if label not in (top.label, baseline)]
        summary.rivals.update(
            {label: significance.percentile_interval(samples[top.label] - samples[label]) for label in others}
        )
    summary.notes.extend(_notes(study, summary, table))
    summary.answer.extend(answer(summary))
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


def _excluded(runs: Sequence[Run]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for run in runs:
        for client, count in (run.result.get("excluded") or {}).items():
            counts[client] = counts.get(client, 0) + int(count)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _notes(study: Study, summary: Summary, table: pd.DataFrame) -> list[str]:
    notes = list(dict.fromkeys(str(note) for run in study.runs for note in run.result.get("notes") or []))
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


# ------------------------------------------------------------------------------------------------ the answer in words


def answer(summary: Summary) -> list[str]:
    """Sentences that answer the question; the first one alone must not mislead."""
    if not math.isfinite(summary.method(summary.best).mean.value):
        return [f"No client has a finite {metric_name(summary.metric)}: there is nothing to say."]
    if not summary.compared:
        return _alone(summary)
    top = _winner(summary) or _ranked(summary)[0]
    return [
        _headline(summary, top),
        _evidence(summary, top),
        *_who_is_hurt(summary, top),
        *_by_group(summary, top),
        *_price(summary, top),
        *_rivals(summary, top),
        *_others(summary, top),
        *_cautions(summary),
    ]


def _ranked(summary: Summary) -> list[MethodSummary]:
    return sorted(summary.compared, key=lambda m: m.mean.value, reverse=not summary.lower_is_better)


def _winner(summary: Summary) -> MethodSummary | None:
    better = [m for m in _ranked(summary) if m.against and m.against.verdict == "better"]
    return better[0] if better else None


def _alone(summary: Summary) -> list[str]:
    method = summary.methods[0]
    reached, low, high = with_interval(method.mean.value, method.interval)
    bounds = f" (95 % interval {low} to {high})" if math.isfinite(method.interval.low) else ""
    sentence = (
        f"{method.title} reaches a mean {metric_name(summary.metric)} of {reached} per client"
        f"{bounds}; there is no other method to compare it with."
    )
    if len(summary.methods) > 1:
        sentence = "Nothing can be compared: the baseline has no finite result."
    return [sentence, *_price(summary, method), *_cautions(summary)]


def _headline(summary: Summary, top: MethodSummary) -> str:
    against, reference = _versus(top), _reference(summary)
    moves = f"{top.title} {_moves(summary, top)}"
    single = len(summary.compared) == 1
    if against.verdict == "better":
        if not (top.personal and summary.baseline_is_shared):
            return f"{top.title} beats {reference}: it {_moves(summary, top)}."
        but = " on average, but most clients lose" if against.hurt.value > 0.5 else ""
        return f"Personalization helps{but}: {moves} against {reference}."
    if _too_few(summary):
        return f"Too few clients to tell: {moves} against {reference}, among {summary.clients} clients."
    if all(_versus(method).verdict == "worse" for method in summary.compared):
        verdict = "Personalization hurts here" if summary.baseline_is_shared else "The baseline is better"
        if single:
            return f"{verdict}: {moves} against {reference}."
        return f"{verdict}: every method is worse than {reference}; the least bad, {moves}."
    if against.verdict == "mixed":
        if _gain(summary, against.difference) > 0:
            return f"Mixed: {moves} against {reference}, but more clients lose than gain."
        return f"Mixed: more clients gain than lose, but {moves} against {reference}."
    if against.p_holm < ALPHA:
        return f"Not clear: {moves} against {reference}; the test over clients sees a change, the mean does not."
    if against.interval.side:
        return f"Not clear: {moves} against {reference}, but the paired test over clients does not confirm it."
    if single:
        return f"{top.title} does not beat {reference} beyond chance: it {_moves(summary, top)}."
    return f"No method beats {reference} here beyond chance: the best, {moves}."


def _evidence(summary: Summary, top: MethodSummary) -> str:
    against = _versus(top)
    base = top.mean.value - against.difference
    over_what = count(summary.clients, "client")
    seeds = f" and {len(summary.seeds)} seeds" if len(summary.seeds) > 1 else ""
    holm = f", Holm-corrected over {len(summary.compared)} comparisons" if len(summary.compared) > 1 else ""
    return (
        f"Over {over_what}{seeds} the mean goes from {number(base)} to {number(top.mean.value)}; "
        f"paired Wilcoxon test over clients: {p_text(against.p_holm)}{holm}."
    )


def _rivals(summary: Summary, top: MethodSummary) -> list[str]:
    tied = [summary.method(label).title for label, interval in summary.rivals.items() if interval.side == 0]
    if not tied:
        return []
    intervals = "interval of their difference contains" if len(tied) == 1 else "intervals of the differences contain"
    return [f"{top.title} cannot be told apart from {_listing(tied)}: the 95 % {intervals} zero."]


def _others(summary: Summary, top: MethodSummary) -> list[str]:
    rest = [m for m in _ranked(summary) if m is not top]
    sentences = []
    words = {
        "better": "also better than the baseline",
        "worse": "worse than the baseline",
        "mixed": "better for most clients or on average, not both",
    }
    for verdict, said in words.items():
        named = [f"{m.title} ({signed_change(summary, m)})" for m in rest if _versus(m).verdict == verdict]
        if named:
            sentences.append(f"{_listing(named)} {'is' if len(named) == 1 else 'are'} {said}.")
    return sentences


def _who_is_hurt(summary: Summary, top: MethodSummary) -> list[str]:
    against = _versus(top)
    base = top.mean.value - against.difference
    sentences = []
    if against.hurt.value == 0:
        sentences.append(f"{top.title} hurts no client.")
    else:
        # With few clients a percentage hides how few they are.
        of = f" ({against.hurt_clients} of {summary.clients} in most seeds)" if summary.clients < 100 else ""
        loss = ""
        if against.hurt_clients:
            part = abs(significance.relative_change(against.mean_loss, base))
            share = f" ({percent(part)} % of the baseline's mean)" if math.isfinite(part) else ""
            loss = f", by {number(against.mean_loss, 2)} on average{share}"
        names = [f"{shorten(row.client)} ({signed(row.difference)})" for row in against.most_hurt[:3]]
        most = f" Hurt most: {', '.join(names)}." if names else ""
        sentences.append(
            f"{top.title} hurts {percent(100 * against.hurt.value)} % of clients{of}{loss}, "
            f"and helps {percent(100 * against.helped.value)} %.{most}"
        )
    base_worst = next((m.worst_tenth.value for m in summary.methods if m.label == summary.baseline), math.nan)
    if math.isfinite(base_worst):
        sentences.append(
            f"For the worst served 10 % of clients the mean goes from {number(base_worst)} "
            f"to {number(top.worst_tenth.value)}."
        )
    if math.isfinite(against.examples_p) and summary.clients >= FEW_CLIENTS:
        rho = f"Spearman {signed(against.examples_correlation, 2)}, {p_text(against.examples_p)}"
        if against.examples_p >= ALPHA:
            sentences.append(f"Who gains does not depend visibly on how many examples a client has ({rho}).")
        else:
            fewer = "less" if against.examples_correlation > 0 else "more"
            sentences.append(f"Clients with fewer examples gain {fewer} ({rho}).")
    return sentences


def _by_group(summary: Summary, top: MethodSummary) -> list[str]:
    groups = [g for g in top.groups if math.isfinite(g.difference)]
    if len(groups) < 2:
        return []
    ordered = sorted(groups, key=lambda g: -_gain(summary, g.difference))
    first, last = ordered[0], ordered[-1]

    def change(group: GroupNumbers) -> str:
        return f"{shorten(group.group)} ({_amount(summary, group.difference, group.relative)})"

    losing = sum(_gain(summary, g.difference) < 0 for g in groups)
    if losing == len(groups):
        return [f"All {len(groups)} groups lose: {change(first)} least and {change(last)} most."]
    worse = f"; the mean gets worse in {losing} of {len(groups)} groups" if losing else ""
    return [f"By group, {top.title} does most for {change(first)} and least for {change(last)}{worse}."]


def _price(summary: Summary, top: MethodSummary) -> list[str]:
    cost = top.cost
    if cost is None:
        return []
    base = next((m.cost for m in summary.methods if m.label == summary.baseline and m is not top), None)
    traffic, steps = size(cost.bytes), f"{cost.steps:,.0f} local steps"
    if base:
        traffic += f" (baseline {size(base.bytes)})"
        steps += f" (baseline {base.steps:,.0f})"
    if cost.personalization_steps >= 0.5:
        steps += f", {cost.personalization_steps:,.0f} of them to personalize"
    who = f"a client in all {cost.rounds:,.0f} rounds" if cost.rounds else "a client"
    return [f"With {top.title}, {who} moves {traffic} and makes {steps}."]


def _cautions(summary: Summary) -> list[str]:
    cautions = []
    if _too_few(summary):
        cautions.append(
            f"With {count(summary.clients, 'client')} and {count(len(summary.compared), 'comparison')} no test can "
            f"reach p < {ALPHA}, however large the difference: this describes these clients and proves nothing."
        )
    elif summary.clients < FEW_CLIENTS:
        cautions.append(f"There are only {summary.clients} clients: take the intervals as rough.")
    if len(summary.seeds) == 1:
        cautions.append("There is only one seed: how much the training itself varies is not in the intervals.")
    diverged = [m.title for m in summary.methods if not math.isfinite(m.mean.value)]
    if diverged:
        cautions.append(f"{_listing(diverged)} gave no finite {metric_name(summary.metric)} for any client.")
    partly = [m.title for m in summary.methods if m.undefined and m.title not in diverged]
    if partly:
        cautions.append(
            f"Left out for every method: {count(summary.left_out, 'client result')}, as {_listing(partly)} gave no "
            f"finite {metric_name(summary.metric)} there, which flatters {'it' if len(partly) == 1 else 'them'}."
        )
    return cautions


def _too_few(summary: Summary) -> bool:
    return bool(summary.compared) and significance.smallest_p(summary.clients, len(summary.compared)) > ALPHA


def _versus(method: MethodSummary) -> Against:
    assert method.against is not None  # only compared methods come here
    return method.against


def _gain(summary: Summary, difference: float) -> float:
    return -difference if summary.lower_is_better else difference


def _reference(summary: Summary) -> str:
    if summary.baseline == BEFORE:
        return "the same model before personalization"
    title = summary.method(summary.baseline).title
    return f"one shared model ({title})" if summary.baseline_is_shared else title


def in_percent(summary: Summary, relative: float) -> bool:
    """Errors shrink in percent; scores such as accuracy, which may be bounded or near zero, move in their own units."""
    return summary.lower_is_better and math.isfinite(relative)


def _moves(summary: Summary, method: MethodSummary) -> str:
    against = _versus(method)
    what = f"the mean {metric_name(summary.metric)} per client"
    if against.difference == 0:
        return f"leaves {what} as it is"
    verb, sign = ("lowers", -1.0) if against.difference < 0 else ("raises", 1.0)
    relative = in_percent(summary, against.relative)
    value, interval = change_of(summary, against)
    shown, low, high = with_interval(abs(value), interval, sign, FINEST_PERCENT if relative else 9)
    unit = " %" if relative else ""
    bounds = f" (95 % interval {low} to {high}{unit})" if math.isfinite(interval.low) else ""
    return f"{verb} {what} by {shown}{unit}{bounds}"


def _amount(summary: Summary, difference: float, relative: float) -> str:
    if in_percent(summary, relative):
        return f"{'+' if relative > 0 else ''}{percent(relative)} %"
    return signed(difference)


def change_of(summary: Summary, against: Against) -> tuple[float, Interval]:
    """The change and its interval, in percent where that makes sense."""
    if in_percent(summary, against.relative):
        return against.relative, against.relative_interval
    return against.difference, against.interval


def signed_change(summary: Summary, method: MethodSummary) -> str:
    """The change against the baseline with its sign, in percent where that makes sense."""
    value, interval = change_of(summary, _versus(method))
    unit, most = (" %", FINEST_PERCENT) if in_percent(summary, _versus(method).relative) else ("", 9)
    return f"{'+' if value > 0 else ''}{with_interval(value, interval, most=most)[0]}{unit}"


# ------------------------------------------------------------------------------------------------ numbers as text

_NAMES = {"mse": "MSE", "rmse": "RMSE", "mae": "MAE", "auc": "AUC", "r2": "R²", "half_mse": "half MSE", "f1": "F1"}
UNDEFINED = "–"


def metric_name(metric: str) -> str:
    return _NAMES.get(metric, metric.replace("_", " "))


def number(value: float, digits: int = 4) -> str:
    """A number with this many significant digits."""
    if not math.isfinite(value):
        return UNDEFINED
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}".replace("-", "−")
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{decimals}f}".replace("-", "−")


def signed(value: float, digits: int = 3) -> str:
    return f"+{number(value, digits)}" if value > 0 else number(value, digits)


def with_interval(value: float, interval: Interval, sign: float = 1.0, most: int = 9) -> tuple[str, str, str]:
    """A number and the ends of its interval (times sign), to two significant digits of the interval's width."""
    width = interval.high - interval.low
    if not math.isfinite(width) or width <= 0:
        return number(value, 3), UNDEFINED, UNDEFINED
    decimals = min(max(1 - math.floor(math.log10(width)), 0), most)
    low, high = sorted((sign * interval.low, sign * interval.high))
    value_text, low_text, high_text = (f"{x:,.{decimals}f}".replace("-", "−") for x in (value, low, high))
    return value_text, low_text, high_text


def percent(value: float) -> str:
    """A percentage without its sign: one decimal, none above 99.5, two significant digits below 0.1."""
    if not math.isfinite(value):
        return UNDEFINED
    if 0 < abs(value) < 0.095:
        return number(value, 1)
    text = f"{value:,.0f}" if abs(value) >= 99.5 or value == 0 else f"{value:.1f}"
    return text.replace("-", "−")


def p_text(p: float) -> str:
    if not math.isfinite(p):
        return "p unknown"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def size(byte_count: float) -> str:
    """Bytes in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if byte_count >= factor:
            return f"{number(byte_count / factor, 3)} {unit}"
    return f"{byte_count:.0f} B"


def count(how_many: int, what: str) -> str:
    return f"{how_many:,} {what}{'' if how_many == 1 else 's'}"


def shorten(text: str, longest: int = 28) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _listing(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "no method"


def jsonable(value: Any, digits: int) -> Any:
    """Round floats to significant digits and turn what JSON cannot say (NaN, infinity) into null."""
    if isinstance(value, dict):
        return {str(key): jsonable(item, digits) for key, item in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, Iterable):
        return [jsonable(item, digits) for item in value]
    return str(value)
