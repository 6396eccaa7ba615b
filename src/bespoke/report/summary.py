"""The types of a summary: does personalization help, by how much, who is hurt, what does it cost.

These are the types alone; `report.py` makes them from run folders.

Conventions: `difference` is method minus baseline in the metric's own units and `relative` is the same in percent of
the baseline; a `gain` is positive where the client is better off, whatever the metric.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from bespoke.plain import Knobs
from bespoke.report.best import BestBy
from bespoke.statistics.acceptance import Accepted
from bespoke.statistics.clients import OverSeeds
from bespoke.statistics.cost import Cost
from bespoke.statistics.formatting import jsonable
from bespoke.statistics.language import LanguageRow
from bespoke.statistics.significance import Interval
from bespoke.statistics.versus_baseline import Against, GroupNumbers, Verdict

if TYPE_CHECKING:
    import pandas as pd

    from bespoke.report.checks import Concern

BEFORE = "before personalization"  # stands in as the baseline when there is only one method
FEW_CLIENTS = 20
COLLAPSED = 0.9  # share of the clients in one cluster above which the others hardly exist
CONSTANT, POOLED = "constant", "pooled"  # labels of the references


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
    chosen: Knobs
    revealed: dict[str, str]  # field that leaves the client -> what the server learns of it
    excluded: dict[str, int]  # client -> rounds in which its update was not finite
    undefined: int  # client results, (seed, client) cells, in which it diverged; then the mean is infinite
    largest_cluster: OverSeeds | None  # share of the last round's clients that chose it, where there are clusters
    verdict: Verdict | None  # against the baseline, or "diverged", as the baseline too can be; else None
    last_improvement: float  # of the validation curve in the last fifth of its rounds, relative; NaN if not known
    what: str = ""  # what a reference is

    @property
    def diverged(self) -> bool:
        return self.verdict == "diverged"


@dataclass(frozen=True)
class Summary:
    """The answer to the question, and all numbers behind it."""

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
    references: list[MethodSummary] = field(default_factory=list)  # never ranked, never the best, not in Holm's count
    above_constant: dict[str, Interval] = field(default_factory=dict)  # method minus constant, in the metric's units
    above_pooled: dict[str, Interval] = field(default_factory=dict)
    concerns: list[Concern] = field(default_factory=list)  # the most serious first
    names_clients: bool = True  # by id; under [privacy] only if asked for
    language: list[LanguageRow] = field(default_factory=list)  # of language models: all clients, then each group
    best_by: list[BestBy] = field(default_factory=list)  # the best method by each number; empty with one method

    def method(self, label: str) -> MethodSummary:
        return next(method for method in self.methods if method.label == label)

    def reference(self, label: str) -> MethodSummary | None:
        """The reference of this name, if the comparison has one with a finite mean."""
        found = [reference for reference in self.references if reference.label == label]
        return found[0] if found and math.isfinite(found[0].mean.value) else None

    @property
    def compared(self) -> list[MethodSummary]:
        """The methods that are compared with the baseline: those that have not diverged, if it has not."""
        return [method for method in self.methods if method.against]

    def to_json(self) -> str:
        """Six significant digits; null where a number is not defined."""
        return json.dumps(jsonable(asdict(self), 6), indent=1, ensure_ascii=False, allow_nan=False)


def with_before(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The table with the model before personalization as one more method."""
    import pandas as pd

    before = table.assign(**{"method": BEFORE, f"query_{metric}": table[f"baseline_{metric}"]})
    return pd.concat([before, table], ignore_index=True)
