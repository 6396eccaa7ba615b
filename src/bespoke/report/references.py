"""Sentences that precede the answer: which methods diverged, and how methods compare with constant and pooled fits."""

from __future__ import annotations

import math

from bespoke.report.change import (
    baseline_of,
    gain_of,
)
from bespoke.report.summary import CONSTANT, POOLED, MethodSummary, Summary
from bespoke.statistics import significance
from bespoke.statistics.formatting import (
    count,
    metric_name,
    number,
    percent,
)
from bespoke.statistics.significance import Interval

ABOVE_POOLED = 5.0  # percent of the pooled fit's error: a shared model further away has not converged
BELOW_POOLED = 0.02  # the same for scores, where higher is better, in their own units


def diverged(summary: Summary) -> list[str]:
    """Which methods diverged and by how much; the baseline first."""
    results = summary.clients * len(summary.seeds)
    what = f"of {count(results, 'client result')} have no finite {metric_name(summary.metric)}, or an absurd one"
    sentences = []
    for method in sorted(summary.methods, key=lambda m: m.label != summary.baseline):
        if method.diverged and method.label == summary.baseline:
            sentences.append(
                f"The baseline, {method.title}, diverged: {method.undefined:,} {what}; nothing can be compared with it."
            )
        elif method.diverged:
            sentences.append(f"{method.title} diverged, so it is ranked last: {method.undefined:,} {what}.")
    return sentences


def beats(summary: Summary, method: MethodSummary, reference: MethodSummary, above: dict[str, Interval]) -> bool:
    """Whether the mean is better than the reference's by more than its interval, where there is one."""
    interval = above.get(method.label, Interval(math.nan, math.nan))
    if math.isfinite(interval.low):
        return gain_of(summary, interval.side) > 0
    return gain_of(summary, method.mean.value - reference.mean.value) > 0


def no_better_than_constant(summary: Summary) -> list[str]:
    constant, best = summary.reference(CONSTANT), summary.method(summary.best)
    sound = [method for method in summary.methods if math.isfinite(method.mean.value)]
    if constant is None or any(beats(summary, method, constant, summary.above_constant) for method in sound):
        return []
    beyond = " beyond chance" if gain_of(summary, best.mean.value - constant.mean.value) > 0 else ""
    return [
        f"No method beats a constant prediction{beyond}: the best, {best.title}, has a mean "
        f"{metric_name(summary.metric)} of {number(best.mean.value)}, the constant {number(constant.mean.value)}."
    ]


def baseline_no_better_than_constant(summary: Summary) -> list[str]:
    constant, base = summary.reference(CONSTANT), baseline_of(summary)
    if constant is None or base is None or no_better_than_constant(summary):
        return []
    if beats(summary, base, constant, summary.above_constant):
        return []
    return [
        f"{base.title} itself is no better than a constant prediction (mean {metric_name(summary.metric)} "
        f"{number(base.mean.value)} against {number(constant.mean.value)}): a gain against it says little."
    ]


def above_pooled(summary: Summary) -> list[str]:
    """A shared model that stands clearly behind the same model fitted in one place has not been trained enough."""
    pooled, base = summary.reference(POOLED), baseline_of(summary)
    if pooled is None or base is None or not summary.baseline_is_shared:
        return []
    gap = base.mean.value - pooled.mean.value
    relative = significance.relative_change(gap, pooled.mean.value)
    if summary.lower_is_better and relative > ABOVE_POOLED:
        behind = f"{percent(relative)} % above"
    elif not summary.lower_is_better and -gap > BELOW_POOLED:
        behind = f"{number(-gap, 2)} below"
    else:
        return []
    return [
        f"{base.title} stopped {behind} the same model fitted in one place ({number(base.mean.value)} against "
        f"{number(pooled.mean.value)}): it has not converged, so gains against it are overstated."
    ]
