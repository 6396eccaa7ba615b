"""Compares a method with the baseline, paired over clients, overall and by group: who is hurt, who is helped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from bespoke.statistics import clients as over
from bespoke.statistics import significance
from bespoke.statistics.beyond import Beyond
from bespoke.statistics.clients import Cells, Gains, OverSeeds
from bespoke.statistics.significance import Interval

ALPHA = 0.05
MOST_LISTED = 50  # hurt clients kept by name

Verdict = Literal["better", "worse", "mixed", "unclear", "diverged"]


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
    interval: Interval  # 95 %, of the difference, from the client's test rows; NaN where these are not known
    beyond: bool  # hurt (helped) beyond chance


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
    # shares of clients, from their test rows (see beyond.py); NaN where the runs have not kept the rows
    hurt_beyond: float
    helped_beyond: float
    hurt_by_chance: float  # would be worse off if both were equally good: what `hurt` is to be compared with
    helped_by_chance: float
    rows_metric: str  # what the rows are values of, if not the metric itself


@dataclass(frozen=True)
class GroupNumbers:
    """One group of clients under one method."""

    group: str
    clients: int
    mean: float
    difference: float
    relative: float
    hurt: float


def paired(
    box: Cells,
    label: str,
    baseline: str,
    gains: Gains,
    p_values: tuple[float, float],
    samples: over.Floats,
    baseline_samples: over.Floats,
    lower: bool,
    rows: Beyond | None = None,
    metric: str = "",
) -> Against:
    """A method against the baseline; `p_values` as they are and corrected, `samples` of the mean by bootstrap."""
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
        most_hurt=_affected(box, label, baseline, gains, rows, metric, worse=True),
        most_helped=_affected(box, label, baseline, gains, rows, metric, worse=False),
        examples_correlation=rho,
        examples_p=rho_p,
        hurt_beyond=float(rows.hurt.mean()) if rows else math.nan,
        helped_beyond=float(rows.helped.mean()) if rows else math.nan,
        hurt_by_chance=rows.hurt_by_chance if rows else math.nan,
        helped_by_chance=rows.helped_by_chance if rows else math.nan,
        rows_metric=rows.metric if rows and rows.metric != metric else "",
    )


def _verdict(p: float, gained: int, mean_gain: float, gains: Gains) -> Verdict:
    """A verdict needs both the test (typical client) and the interval (mean), on the same side."""
    typical = np.sign(gains.helped.value - gains.hurt.value)
    if p < ALPHA and gained != 0 and gained == typical:
        return "better" if gained > 0 else "worse"
    sure_of_one = p < ALPHA or gained != 0
    return "mixed" if sure_of_one and np.sign(mean_gain) * typical < 0 else "unclear"


def _affected(
    box: Cells, label: str, baseline: str, gains: Gains, rows: Beyond | None, metric: str, worse: bool
) -> list[Affected]:
    found = []
    for i in (gains.hurt_clients if worse else gains.helped_clients)[:MOST_LISTED]:
        pairs = gains.pairs[:, i]
        known = np.isfinite(pairs)
        value, before = fmean(box.of(label)[known, i]), fmean(box.of(baseline)[known, i])
        agreeing = int(((pairs < 0) if worse else (pairs > 0)).sum())
        interval, stands_out = Interval(math.nan, math.nan), False
        if rows is not None:
            stands_out = bool((rows.hurt if worse else rows.helped)[i])
            if rows.metric == metric:  # the interval of a stand-in would be in other units than the difference
                interval = Interval(float(rows.low[i]), float(rows.high[i]))
        found.append(
            Affected(
                box.clients[i], box.groups[i], float(box.examples[i]), before, value, value - before,
                agreeing, int(known.sum()), interval, stands_out,
            )
        )  # fmt: skip
    return found


def by_group(box: Cells, label: str, baseline: str, gains: Gains | None, lower: bool) -> list[GroupNumbers]:
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
