"""Perplexities of FedPC's tables as arrays (seeds, users), read from run folders, and differences of them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bespoke.statistics.significance import Interval, bootstrap_means, percentile_interval

Floats = NDArray[np.float64]
SAMPLES = ("1", "5", "15", "all")
ALIKE = 0.05  # of the perplexity: what stays within it is called the same


@dataclass(frozen=True)
class Table:
    """Perplexity by method and number of samples: (seeds, users); a method that uses no samples has "all" alone."""

    users: list[str]
    values: dict[tuple[str, str], Floats]

    def at(self, method: str, samples: str) -> Floats | None:
        return self.values.get((method, samples), self.values.get((method, "all")) if method in FIXED else None)

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for method, _ in self.values))


FIXED = ("fedpc-frozen", "shared-prefix", "none")  # the same whatever the number of samples


def read_table(folder: Path) -> Table | None:
    """The table of a part; None where nothing has been run."""
    if not (folder / "compare.json").exists():
        return None
    about = json.loads((folder / "compare.json").read_text())
    found: dict[tuple[str, str], list[pd.Series]] = {}
    for label in (entry["label"] for entry in about["methods"]):
        for seed in about["seeds"]:
            run = folder / "runs" / f"{label}-seed{seed}"
            whole = pd.read_parquet(run / "clients.parquet").set_index("client")["query_perplexity"]
            found.setdefault((label, "all"), []).append(whole)
            if (run / "analysis" / "examples.parquet").exists():
                table = pd.read_parquet(run / "analysis" / "examples.parquet")
                for most, part in table.groupby("most"):
                    found.setdefault((label, str(most)), []).append(part.set_index("client")["value"])
            if (run / "untuned.json").exists():
                frozen = pd.Series(json.loads((run / "untuned.json").read_text()))
                found.setdefault(("fedpc-frozen", "all"), []).append(frozen)
            if label == "fedpc" and (run / "analysis" / "crossed.parquet").exists():
                crossed = pd.read_parquet(run / "analysis" / "crossed.parquet").set_index("client")
                found.setdefault(("none", "all"), []).append(crossed["none"])
    users = sorted(set.intersection(*(set(column.index) for columns in found.values() for column in columns)))
    seeds = len(about["seeds"])
    values = {
        key: np.array([column[users].to_numpy(float) for column in columns])
        for key, columns in found.items()
        if len(columns) == seeds
    }
    return Table(users, values)


def read_crossed(folder: Path, label: str) -> tuple[list[str], dict[str, Floats]] | None:
    """(users, perplexities by column as (seeds, users)) of `bespoke analyze --crossed`."""
    tables = [pd.read_parquet(path).set_index("client")
              for path in sorted(folder.glob(f"runs/{label}-seed*/analysis/crossed.parquet"))]  # fmt: skip
    if not tables:
        return None
    users = list(tables[0].index)
    return users, {name: np.array([table.loc[users, name] for table in tables]) for name in tables[0].columns}


@dataclass(frozen=True)
class Change:
    """The mean over users of log(a / b), as a relative change of the perplexity, with its interval."""

    value: float
    interval: Interval

    @property
    def side(self) -> int:
        """-1: lower beyond chance, 1: higher beyond chance, 0: cannot be told."""
        return self.interval.side

    @property
    def alike(self) -> bool:
        """Whether all of the interval is within 5 %."""
        return max(abs(self.interval.low), abs(self.interval.high)) <= ALIKE

    def text(self) -> str:
        parts = (f"{100 * v:+.1f}".replace("-", "−") for v in (self.value, self.interval.low, self.interval.high))
        value, low, high = parts
        return f"{value} % ({low} to {high})"


def change(a: Floats, b: Floats) -> Change:
    """How much lower or higher a is than b, paired by seed and user; users and seeds are resampled."""
    logs = np.log(a) - np.log(b)
    between = percentile_interval(bootstrap_means(logs[None])[:, 0])
    return Change(
        math.expm1(float(np.nanmean(logs))), Interval(math.expm1(between.low), math.expm1(between.high))
    )  # fmt: skip


def over_seeds(values: Floats) -> tuple[float, float]:
    """The mean over users and seeds, and the standard deviation over seeds of the users' mean; NaN with one seed."""
    means = values.mean(1)
    return float(means.mean()), float(means.std(ddof=1)) if len(means) > 1 else math.nan
