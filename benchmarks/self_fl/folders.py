"""Comparison folders in terms of Self-FL's paper: accuracies weighted by rows, by round and by client."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bespoke.methods import SelfFL
from results_claim import Claim, in_seeds
from results_converged import unsettled

Floats = NDArray[np.float64]
TITLES = {
    "fedavg": "FedAvg", "ditto": "Ditto", "pfedme": "pFedMe", "per-fedavg": "Per-FedAvg", "self-fl": "Self-FL",
    "self-fl-augmented": "Self-FL, Algorithm 2", "self-fl-clustered": "Self-FL, cluster level",
    "self-fl-learned": "Self-FL, variances learned", "self-fl-scatter": "Self-FL, variances as sums",
    "fedavg-smoothed": "FedAvg, smoothed", "self-fl-all": "Self-FL, all others",
    "self-fl-augmented-all": "Self-FL, Algorithm 2, all others",
    "self-fl-learned-all": "Self-FL, variances learned, all others",
}  # fmt: skip
OTHERS = ("fedavg", "ditto", "pfedme", "per-fedavg")
FIVE = (*OTHERS, "self-fl")
READINGS = ("self-fl", "self-fl-scatter")  # what is a variance: Eq. 18, or Section 3.2
SUMS = {
    "active": 'Self-FL sums over the other active clients (`others = "active"`).',
    "all": 'Self-FL sums over all other clients (`others = "all"`).',
}


@dataclass(frozen=True)
class Compared:
    """A comparison folder that is finished."""

    folder: Path

    @classmethod
    def found(cls, folder: Path) -> Compared | None:
        return cls(folder) if (folder / "compare.json").exists() else None

    @cached_property
    def about(self) -> dict[str, Any]:
        return json.loads((self.folder / "compare.json").read_text())

    @property
    def seeds(self) -> list[int]:
        return self.about["seeds"]

    @property
    def rounds(self) -> int:
        return max(stage["rounds"] for method in self.about["methods"] for stage in method["stages"])

    @property
    def labels(self) -> list[str]:
        return [entry["label"] for entry in self.about["methods"]]

    def chosen(self, label: str) -> dict[str, Any]:
        return next(entry["chosen"] for entry in self.about["methods"] if entry["label"] == label)

    @property
    def others(self) -> str:
        """A sentence for each set of other clients that Self-FL sums over in this folder."""
        stages = [method["stages"][-1] for method in self.about["methods"]]
        with_knob = [stage for stage in stages if stage["method"] in ("self-fl", "self-fl-augmented")]
        found = {stage.get("others", SelfFL.others) for stage in with_knob}
        return " ".join(SUMS[value] for value in sorted(found))

    @property
    def unsettled(self) -> dict[str, str]:
        """Why the place of a method means little, by its title."""
        return unsettled(self.folder, {label: TITLES.get(label, label) for label in self.labels})

    def clients(self, label: str, seed: int) -> pd.DataFrame:
        table = pd.read_parquet(self.folder / "runs" / f"{label}-seed{seed}" / "clients.parquet")
        return table[table["query_accuracy"].notna()]

    def over_seeds(self, label: str, measure: Any) -> Floats:
        return np.array([measure(self.clients(label, seed)) for seed in self.seeds])

    def curve(self, label: str) -> tuple[list[int], Floats]:
        """Rounds, and the accuracy on validation rows, weighted by them, for each seed."""
        curves = []
        for seed in self.seeds:
            path = self.folder / "runs" / f"{label}-seed{seed}" / "rounds.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            curves.append(
                {line["round"]: line["validation"]["weighted_accuracy"] for line in lines if line["validation"]}
            )
        rounds = sorted(set.intersection(*map(set, curves)))
        return rounds, np.array([[curve[number] for number in rounds] for curve in curves])


# -- measures of the per-client table ----------------------------------------------------------------------------------
def weighted(table: pd.DataFrame, column: str = "query_accuracy") -> float:
    """Accuracy of all clients, weighted by their test rows: the paper's client-level accuracy."""
    return float(np.average(table[column], weights=table["query_examples"]))


def of_global(table: pd.DataFrame) -> float:
    """The same of the global model."""
    return weighted(table, "baseline_accuracy")


def top(table: pd.DataFrame) -> float:
    """Table 1: weighted accuracy of the tenth of clients with most rows."""
    many = max(round(len(table) / 10), 1)
    return weighted(table.sort_values("train_examples", ascending=False, kind="stable").head(many))


def worst(table: pd.DataFrame) -> float:
    """Table 1: mean accuracy of the tenth of clients that are served worst."""
    many = max(round(len(table) / 10), 1)
    return float(table["query_accuracy"].sort_values(kind="stable").head(many).mean())


def measures_of(entry: Any) -> dict[str, Any]:
    """What a comparison's table has in its columns."""
    tails = {"top 10 % by samples": top, "worst 10 %": worst} if entry.tails else {}
    return {"weighted": weighted, "global model": of_global, **tails}


# -- claims ------------------------------------------------------------------------------------------------------------
def claim(text: str, methods: tuple[str, ...], holds: list[bool]) -> Claim:
    """Something the paper says of methods, by their labels, and in which seeds it holds here."""
    return Claim(text, tuple(TITLES.get(label, label) for label in methods), "", "", in_seeds(holds))


def highest(study: Compared, label: str, measure: Any, others: tuple[str, ...] = OTHERS) -> list[bool]:
    """In which seeds the method has the highest value."""
    best = np.max([study.over_seeds(name, measure) for name in others], axis=0)
    return (study.over_seeds(label, measure) >= best).tolist()


def numbers(values: Floats, digits: int = 2) -> str:
    """Percent, ± the standard deviation over seeds."""
    spread = f" ± {100 * values.std(ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{100 * values.mean():.{digits}f}{spread}"


def read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
