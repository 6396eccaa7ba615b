"""Finds the best method by each number: mean, worst served clients, spread, clients hurt, other metrics, cost.

Motley (Wu et al., 2022, Section 6): the best method can change with the metric, so that the mean alone is not enough.
Only the mean has a paired test here: methods whose interval against the best includes zero are tied with it. Of the
other numbers only equal values are ties; in how many seeds the best is the best says how far its lead can be relied on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from bespoke.statistics import significance
from bespoke.statistics.clients import Floats, OverSeeds
from bespoke.statistics.formatting import metric_name

if TYPE_CHECKING:
    from bespoke.report.summary import MethodSummary
    from bespoke.statistics.language import LanguageRow

Unit = Literal["metric", "share", "bytes", "steps"]
Value = OverSeeds | float | None


@dataclass(frozen=True)
class BestBy:
    """The method with the best value of one number."""

    what: str
    unit: Unit
    lower_is_better: bool
    label: str
    value: float
    tied: list[str]  # labels of other methods: equal, or, where `tested`, not to be told apart from the best
    tested: bool  # whether ties are by the paired 95 % interval
    seeds: int | None  # in which no other method has a better value; None where the number is not one of each seed


def best_by(
    methods: Sequence[MethodSummary],
    metric: str,
    lower: bool,
    lower_metrics: Collection[str] = (),
    samples: Mapping[str, Floats] | None = None,
    language: Sequence[LanguageRow] = (),
) -> list[BestBy]:
    """A line for each number that the comparison has; empty with fewer than two methods that did not diverge.

    lower_metrics: those of the other metrics of which lower is better. samples: bootstrap means, resampled alike.
    """
    sound = [method for method in methods if not method.diverged and math.isfinite(method.mean.value)]
    if len(sound) < 2:
        return []
    name, found = metric_name(metric), []

    def add(what: str, of: Callable[[MethodSummary], Value], low: bool, unit: Unit = "metric") -> None:
        values = {method.label: value for method in sound if _finite(value := of(method))}
        if len(values) > 1:
            found.append(_best(what, unit, low, values))

    add(f"mean {name} over clients", lambda m: m.mean, lower)
    if found and samples:
        found[0] = _tested(found[0], samples)
    add(f"{name} of the worst served tenth of clients", lambda m: m.worst_tenth, lower)
    add(f"standard deviation of {name} across clients", lambda m: m.deviation, True)
    add("clients hurt against the baseline", lambda m: m.against.hurt if m.against else None, True, "share")
    add("clients hurt beyond chance", lambda m: m.against.hurt_beyond if m.against else None, True, "share")
    add(f"mean {name}, clients weighted by their test examples", lambda m: m.weighted_mean, lower)
    if language:
        whole = language[0].values
        add("perplexity of all sentences together", lambda m: whole[m.label].perplexity, True)
        add("bits per character", lambda m: whole[m.label].bits_per_character, True)
    for other in sound[0].other_metrics:
        add(f"mean {metric_name(other)} over clients", partial(_other, other), other in lower_metrics)
    add("traffic per client", lambda m: m.cost.bytes if m.cost else None, True, "bytes")
    add("local steps per client", lambda m: m.cost.steps if m.cost else None, True, "steps")
    return found


def _other(name: str, method: MethodSummary) -> OverSeeds | None:
    return method.other_metrics.get(name)


def _finite(value: Value) -> bool:
    return value is not None and math.isfinite(_number(value))


def _number(value: Value) -> float:
    return value.value if isinstance(value, OverSeeds) else math.nan if value is None else float(value)


def _best(what: str, unit: Unit, lower: bool, values: Mapping[str, Value]) -> BestBy:
    sign = 1 if lower else -1
    label = min(values, key=lambda key: sign * _number(values[key]))
    best = _number(values[label])
    tied = [key for key, value in values.items() if key != label and _number(value) == best]
    seeds = None
    if all(isinstance(value, OverSeeds) and value.by_seed for value in values.values()):
        by_seed = {key: [sign * number for number in value.by_seed] for key, value in values.items()}  # type: ignore[union-attr]
        if len({len(numbers) for numbers in by_seed.values()}) == 1:
            seeds = sum(own == min(each) for own, *each in zip(by_seed[label], *by_seed.values()))
    return BestBy(what, unit, lower, label, best, tied, False, seeds)


def _tested(line: BestBy, samples: Mapping[str, Floats]) -> BestBy:
    """The same, with ties by the paired intervals of differences to the best."""
    own = samples.get(line.label)
    if own is None:
        return line
    tied = []
    for label, other in samples.items():
        interval = significance.percentile_interval(own - other)
        if not math.isfinite(interval.low):
            return line  # one client: nothing can be resampled
        if label != line.label and interval.side == 0:
            tied.append(label)
    return BestBy(line.what, line.unit, line.lower_is_better, line.label, line.value, tied, True, line.seeds)
