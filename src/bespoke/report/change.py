"""States a change against the baseline in words, in percent where percent makes sense."""

from __future__ import annotations

import math

from bespoke.report.summary import BEFORE, MethodSummary, Summary
from bespoke.statistics.formatting import (
    FINEST_PERCENT,
    MOST_PERCENT,
    metric_name,
    signed,
    signed_percent,
    with_interval,
)
from bespoke.statistics.significance import Interval
from bespoke.statistics.versus_baseline import Against


def versus(method: MethodSummary) -> Against:
    assert method.against is not None  # only compared methods come here
    return method.against


def gain_of(summary: Summary, difference: float) -> float:
    return -difference if summary.lower_is_better else difference


def baseline_of(summary: Summary) -> MethodSummary | None:
    return next((m for m in summary.methods if m.label == summary.baseline and math.isfinite(m.mean.value)), None)


def baseline_in_words(summary: Summary) -> str:
    if summary.baseline == BEFORE:
        return "the same model before personalization"
    title = summary.method(summary.baseline).title
    return f"one shared model ({title})" if summary.baseline_is_shared else title


def in_percent(summary: Summary, relative: float) -> bool:
    """Whether a metric's change is given in percent: yes for errors; no for scores that are bounded or near zero."""
    return summary.lower_is_better and math.isfinite(relative)


def moved(summary: Summary, method: MethodSummary) -> str:
    against = versus(method)
    what = f"the mean {metric_name(summary.metric)} per client"
    if against.difference == 0:
        return f"leaves {what} as it is"
    verb, sign = ("lowers", -1.0) if against.difference < 0 else ("raises", 1.0)
    relative = in_percent(summary, against.relative)
    value, interval = change_of(summary, against)
    finest, cap = (FINEST_PERCENT, MOST_PERCENT) if relative else (9, math.inf)
    shown, low, high = with_interval(abs(value), interval, sign, finest, cap)
    unit = " %" if relative else ""
    bounds = f" (95 % interval {low} to {high}{unit})" if math.isfinite(interval.low) else ""
    return f"{verb} {what} by {shown}{unit}{bounds}"


def amount(summary: Summary, difference: float, relative: float) -> str:
    if in_percent(summary, relative):
        return signed_percent(relative)
    return signed(difference)


def change_of(summary: Summary, against: Against) -> tuple[float, Interval]:
    """The change and its interval, in percent where that makes sense."""
    if in_percent(summary, against.relative):
        return against.relative, against.relative_interval
    return against.difference, against.interval


def signed_change(summary: Summary, method: MethodSummary) -> str:
    """The change against the baseline with its sign, in percent where that makes sense."""
    value, interval = change_of(summary, versus(method))
    unit, most, cap = "", 9, math.inf
    if in_percent(summary, versus(method).relative):
        unit, most, cap = " %", FINEST_PERCENT, MOST_PERCENT
    return f"{'+' if 0 < value <= cap else ''}{with_interval(value, interval, 1.0, most, cap)[0]}{unit}"
