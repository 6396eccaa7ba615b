"""A comparison folder in terms of Motley's observations: its table of clients, and the results of `bespoke analyze`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from bespoke.report.summary import MethodSummary, Summary
from bespoke.statistics import clients as over
from bespoke.statistics import significance
from bespoke.statistics.clusters import Clusters, clusters_of
from bespoke.statistics.folders import RunSet
from bespoke.statistics.formatting import number, percent
from bespoke.statistics.significance import Interval
from results_converged import NO_CURVE, NOT_CONVERGED, PAST_ITS_BEST, improvement, reason

DRAWS = 2_000
NAMES = {
    "warm": "HypCluster with a warm start", "cold": "HypCluster from random models", "finetune": "fine-tuning",
    "knn-per": "kNN-Per", "local": "local training", "ensemble": "an ensemble of FedAvg models", "fedavg": "FedAvg",
    "ditto": "Ditto", "mocha": "Mocha", "blend": "fine-tuning with blends",
    "size": "fine-tuning with settings by the number of examples",
}  # fmt: skip


class Untested(Exception):
    """Why an observation cannot be judged on a dataset."""


@dataclass(frozen=True)
class Found:
    """A comparison folder in the terms of the observations."""

    study: RunSet
    table: pd.DataFrame
    summary: Summary

    @property
    def lower(self) -> bool:
        return self.summary.lower_is_better

    @cached_property
    def cells(self) -> over.Cells:
        return over.cells(self.table, f"query_{self.summary.metric}", None, self.lower)

    @cached_property
    def clusters(self) -> dict[str, Clusters]:
        return {found.label: found for found in clusters_of(self.table)}

    def label(self, kind: str) -> str:
        """The comparison's label of a method.

        `warm` and `cold` are HypCluster with and without a warm start, `blend` and `size` fine-tuning with models
        between the shared and the tuned one, or with settings by the client's number of examples.
        """
        entries = self.study.compare.get("methods") or []
        if kind in ("warm", "cold"):
            mine = [e for e in entries if e.get("name", e["label"]) == "hypcluster"]
            mine = [e for e in mine if (len(e.get("stages") or []) > 1) == (kind == "warm")]
        elif kind in ("blend", "size"):
            last = {e["label"]: (e.get("stages") or [{}])[-1] for e in entries}
            flags = {label: "blend" in s if kind == "blend" else s.get("choose") == "size" for label, s in last.items()}
            mine = [e for e in entries if flags[e["label"]]]
        else:
            mine = [e for e in entries if e.get("name", e["label"]) == kind]
            mine = [e for e in mine if e["label"] == kind] or mine
        known = {method.label for method in self.summary.methods}
        if not mine or mine[0]["label"] not in known:
            raise Untested(f"{NAMES.get(kind, kind)} was not run")
        return str(mine[0]["label"])

    def entry(self, label: str) -> dict[str, Any]:
        return next(dict(e) for e in self.study.compare["methods"] if e["label"] == label)

    def improvement(self, label: str) -> float:
        return improvement([run for run in self.study.runs if run.label == label])

    def check(self, label: str) -> None:
        """Raises Untested for a method that diverged or had not converged."""
        method = self.summary.method(label)
        if method.diverged:
            raise Untested(f"{method.title} diverged")
        gain = self.improvement(label)
        if why := reason(gain):
            said = {
                NOT_CONVERGED: "has not converged",
                PAST_ITS_BEST: "is past its best",
                NO_CURVE: "has no validation curve",
            }
            by = f" ({percent(100 * gain)} % in the last fifth)" if math.isfinite(gain) else ""
            raise Untested(f"{method.title} {said[why]}{by}")

    def converged(self) -> list[MethodSummary]:
        kept = []
        for method in self.summary.methods:
            try:
                self.check(method.label)
            except Untested:
                continue
            kept.append(method)
        return kept

    def records(self, label: str, name: str) -> list[dict[str, Any]]:
        """The results of an analysis, one record per seed."""
        paths = [run.folder / "analysis" / f"{name}.json" for run in self.study.runs if run.label == label]
        found = [json.loads(path.read_text()) for path in paths if path.exists()]
        if not found:
            raise Untested(f"no analysis {name} of {label}")
        return found

    def clients_of(self, label: str, name: str) -> list[pd.DataFrame]:
        """The same, for every client."""
        self.records(label, name)
        paths = [run.folder / "analysis" / f"{name}.parquet" for run in self.study.runs if run.label == label]
        return [pd.read_parquet(path) for path in paths if path.exists()]

    def gain(self, a: str, b: str) -> tuple[float, Interval]:
        """The mean gain of clients with a over b, and its paired 95 % interval."""
        sign = -1.0 if self.lower else 1.0
        values = np.stack([self.cells.of(a), self.cells.of(b)])
        drawn = significance.bootstrap_means(values, DRAWS)
        interval = significance.percentile_interval(sign * (drawn[:, 0] - drawn[:, 1]))
        return sign * over.mean(values[0] - values[1]).value, interval

    def mean(self, label: str) -> str:
        return number(self.summary.method(label).mean.value)

    def hurt(self, label: str) -> over.OverSeeds:
        against = self.summary.method(label).against
        if against is None:
            raise Untested(f"{label} is not compared with a baseline")
        return against.hurt
