"""Is bespoke right? Four questions, answered from the files of bespoke and of the oracle.

sign    If bespoke claims a gain by personalization: right if the whole interval of the oracle's gain is a gain. If it
        claims none: right if that interval contains zero or is a loss, or if the gain is below 1 %.
close   the error of the method that bespoke recommends is at most 1.1 times that of the oracle's best linear fit.
size    the oracle's gain lies in bespoke's 95 % interval.
alarm   bespoke claims a gain on a table whose client column was shuffled.

The oracle's gain is that of its best personalized linear fit (on test rows) over its pooled fit. Its interval (95 %,
bootstrap over clients) covers only the sampling of clients. It is widened for the choice among k fits (Bonferroni).
bespoke recommends the best method that it calls better than the shared model, or the shared model if there is none.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from benchmarks.trust.oracle import FITS, LINEAR, PERSONAL
from benchmarks.trust.tables import Table

from bespoke.errors import UserError

NEAR = 1.1
SMALL = 1.0  # percent
DRAWS = 10_000


@dataclass(frozen=True)
class Oracle:
    """The oracle's numbers for one table in one metric: means over clients, then over seeds."""

    about: dict[str, Any]
    metric: str
    means: dict[str, float]  # by fit, on test rows
    personal: str  # the best personalized linear fit
    change: float  # personal minus pooled
    relative: float  # in percent
    interval: tuple[float, float]  # of `change`
    relative_interval: tuple[float, float]

    @property
    def lower_is_better(self) -> bool:
        return self.metric != "accuracy"

    @property
    def gain(self) -> tuple[float, float]:
        """The interval of the gain: positive is better."""
        low, high = self.interval
        return (-high, -low) if self.lower_is_better else (low, high)

    def error(self, value: float) -> float:
        return value if self.lower_is_better else 1.0 - value

    @property
    def best_error(self) -> float:
        """The least error of a linear fit."""
        return min(self.error(self.means[fit]) for fit in LINEAR if fit in self.means)


def read_oracle(table: Table, folder: Path, answer: Answer | None = None) -> Oracle | None:
    """What the oracle says of a table, in the metric and seeds of bespoke's answer; None if it was not asked yet."""
    path = folder / "oracle" / f"{table.slug}.json"
    if not path.exists():
        return None
    about, scores = json.loads(path.read_text()), pd.read_parquet(path.with_suffix(".parquet"))
    if answer is None:
        return measured(about, scores)
    if unseen := set(answer.seeds) - set(scores["seed"]):
        raise UserError(f"{table.name}: the oracle has not seen the seeds {sorted(unseen)}, with which bespoke was run")
    return measured(about, scores[scores["seed"].isin(answer.seeds)], answer.metric)


def measured(about: dict[str, Any], scores: pd.DataFrame, metric: str | None = None) -> Oracle:
    """Means, the best personalized fit and its gain over the pooled one."""
    known = [name for name in ("mse", "accuracy", "loss") if name in scores]
    metric = metric or known[0]
    if metric not in known:
        raise UserError(f"the oracle knows no {metric!r}, by which bespoke compared; it knows {', '.join(known)}")
    test = scores[scores["part"] == "test"]
    means = test.groupby(["fit", "seed"])[metric].mean().groupby("fit").mean()
    own_fits = means[[fit for fit in PERSONAL if fit in means]]
    personal = str(own_fits.idxmax() if metric == "accuracy" else own_fits.idxmin())
    clients = test.groupby(["fit", "client"])[metric].mean().unstack("fit")[["pooled", personal]].dropna().to_numpy()
    change = means[personal] - means["pooled"]
    random = np.random.default_rng(0)
    drawn = random.integers(0, len(clients), (DRAWS, len(clients)))
    pooled, own = clients[drawn, 0].mean(1), clients[drawn, 1].mean(1)
    return Oracle(
        about, metric, {fit: float(means[fit]) for fit in FITS if fit in means}, personal, float(change),
        float(100 * change / abs(means["pooled"])), _interval(own - pooled, len(own_fits)),
        _interval(100 * (own - pooled) / np.abs(pooled), len(own_fits)),
    )  # fmt: skip


def _interval(samples: Any, choices: int) -> tuple[float, float]:
    low, high = np.quantile(samples, [0.025 / choices, 1 - 0.025 / choices])
    return float(low), float(high)


@dataclass(frozen=True)
class Answer:
    """What bespoke says of a table."""

    metric: str
    baseline: float
    claims: bool  # that personalization helps
    recommended: str
    value: float  # of what is recommended
    best: str  # the personal method with the best mean, recommended or not
    interval: tuple[float, float]  # of its change: in percent where lower is better, else in the metric's units
    sentence: str
    seeds: tuple[int, ...]


def read_answer(folder: Path) -> Answer | None:
    """From a comparison's summary.json; None if it is not finished."""
    path = folder / "summary.json"
    return understood(json.loads(path.read_text())) if path.exists() else None


def understood(summary: dict[str, Any]) -> Answer:
    methods = {method["label"]: method for method in summary["methods"]}
    sign = 1 if summary["lower_is_better"] else -1

    def value(method: dict[str, Any]) -> float:
        found = method["mean"]["value"]
        return math.nan if found is None else float(found)

    def rank(method: dict[str, Any]) -> float:
        return math.inf if math.isnan(value(method)) else sign * value(method)

    baseline = methods[summary["baseline"]]
    personal = sorted((m for m in methods.values() if m["personal"] and m["against"]), key=rank)
    claims = any(sentence.startswith("Personalization helps") for sentence in summary["answer"])  # as its reader would
    winners = [m for m in personal if claims and m["against"]["verdict"] == "better"]
    chosen = winners[0] if winners else baseline
    spoken = (winners or personal or [None])[0]
    name = "relative_interval" if summary["lower_is_better"] else "interval"
    interval = spoken["against"][name] if spoken else {"low": None, "high": None}
    low, high = (math.nan if interval[end] is None else float(interval[end]) for end in ("low", "high"))
    return Answer(
        summary["metric"], value(baseline), claims, chosen["title"], value(chosen),
        spoken["title"] if spoken else "", (low, high), (summary["answer"] or [""])[0], tuple(summary["seeds"]),
    )  # fmt: skip


@dataclass(frozen=True)
class Judgement:
    """The first three questions for one table."""

    sign: bool
    close: bool
    size: bool
    ratio: float  # the recommended method's error to the best linear fit's


def judge(answer: Answer, oracle: Oracle) -> Judgement:
    low = oracle.gain[0]
    helps = low > 0
    sign = helps if answer.claims else not helps or abs(oracle.relative) < SMALL
    ratio = oracle.error(answer.value) / oracle.best_error if oracle.best_error else math.inf
    change = oracle.relative if oracle.lower_is_better else oracle.change
    return Judgement(sign, ratio <= NEAR, answer.interval[0] <= change <= answer.interval[1], ratio)


def alarms(folder: Path) -> tuple[list[str], int]:
    """The shuffled tables on which bespoke claims a gain, and how many were run."""
    found = {path.parent.name: read_answer(path.parent) for path in sorted(folder.glob("shuffled/*/summary.json"))}
    return [name for name, answer in found.items() if answer and answer.claims], len(found)
