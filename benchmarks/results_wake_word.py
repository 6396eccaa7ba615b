"""The section of docs/results.md on Self-FL's wake word: Tables 2, 4, 5 and 6, the paper's values beside ours.

`section` reads only files: `false_accepts.parquet`, `wake_word.json` and `devices/compare.json`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bespoke.errors import UserError
from results_converged import column, sentence

DEVICES = "ABCDE"
NA = float("nan")
Cells = tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """A line of the paper's table and the runs that are shown beside it."""

    name: str
    label: str  # of our entry
    paper: Cells
    state: str = "normal"
    comparison: str = "devices"


TABLE_2A = (
    Row("Self-FL", "self-fl", (0.92, 0.94, 0.91, 0.91, 1.01)),
    Row("FedAvg-w", "fedavg-w", (8.39, 4.00, 12.80, 8.61, 10.62)),
    Row("FedAvg-e", "fedavg", (0.97, 0.96, 1.00, 0.92, 1.00)),
    Row("DITTO-w", "fedavg-w", (8.38, 4.00, 12.75, 8.61, 10.23)),
    Row("DITTO-e", "ditto", (0.97, 0.95, 1.00, 0.93, 0.99)),
    Row("PerFedAvg", "per-fedavg", (1.06, 0.98, 1.08, 0.93, 1.01)),
)
TABLE_2B = (
    Row("Self-FL", "self-fl", (0.93, 0.91, 0.90, 0.90, 0.99)),
    Row("FedAvg-e", "finetune", (0.95, 0.95, 0.93, 0.91, 0.98)),
    Row("DITTO-e", "ditto", (0.97, 0.96, 0.93, 0.91, 0.96)),
    Row("PerFedAvg", "per-fedavg", (1.02, 1.11, 1.08, 1.00, 0.93)),
)
TABLE_4 = (  # which row is which algorithm: Algorithm 1's is that of Table 2a
    Row("Self-FL (Algorithm 1)", "self-fl.same", (0.92, 0.94, 0.91, 0.91, 1.01)),
    Row("Self-FL (Algorithm 2)", "self-fl-augmented.same", (0.93, 0.94, 0.96, 0.89, 0.98)),
)
TABLE_5 = (
    Row("client-level", "self-fl", (0.91, 0.92, 0.97, 0.91, 0.99), "normal", "quarter"),
    Row("client-level", "self-fl", (0.93, 0.96, 1.80, 1.00, 1.00), "playback", "quarter"),
    Row("client-level", "self-fl", (NA, 0.89, NA, 1.04, 1.00), "alarm", "quarter"),
    Row("cluster-level", "cluster", (0.96, 0.95, 1.00, 0.91, 0.97), "normal", "quarter"),
    Row("cluster-level", "cluster", (0.86, 0.99, 1.00, 0.97, 1.01), "playback", "quarter"),
    Row("cluster-level", "cluster", (NA, 0.89, NA, 1.00, 1.00), "alarm", "quarter"),
)
TABLE_6 = (
    Row("C = 0.25", "self-fl", (0.91, 0.92, 0.97, 0.91, 1.00), "normal", "quarter"),
    Row("C = 0.25", "self-fl", (0.93, 0.96, 1.80, 1.00, 1.00), "playback", "quarter"),
    Row("C = 0.25", "self-fl", (NA, 0.89, NA, 1.04, 1.00), "alarm", "quarter"),
    Row("C = 0.1", "self-fl", (0.95, 0.95, 1.00, 0.91, 0.97), "normal", "tenth"),
    Row("C = 0.1", "self-fl", (0.86, 0.97, 1.00, 0.96, 1.01), "playback", "tenth"),
    Row("C = 0.1", "self-fl", (NA, 0.89, NA, 1.00, 1.00), "alarm", "tenth"),
)

DIFFERS = """What differs from the paper:

- Its data are 39,000 hours of Amazon's own recordings. Ours are {clips} clips of one second, the test set of Speech
  Commands. A cell is therefore based on few false accepts (the baseline has {accepts} per device type and seed on
  average). Compare methods by the last column, all types together. ± is the standard deviation over {seeds} seeds.
- Its five device types are products. Ours are groups of speakers whose recordings sound alike when nobody speaks. Its
  devices play music and ring alarms. For ours, background noise is mixed in, 10 dB below the word or as loud as it.
- Its network has 3M parameters, ours {parameters:,}. Its baseline was trained elsewhere; ours is trained by {warm}
  rounds of FedAvg.
- It does not say how many wake words the baseline rejects. Here both models reject {rejects:.0%} of each type's.
- It uses one learning rate for all methods. Here the rate is chosen on validation rows, or is {same} for all methods.
- Ditto's shared model equals FedAvg's at every step, so DITTO-w is not trained again. DITTO-e's rate is chosen for
  its personal models, by validation loss.
"""


def section(folder: Path) -> str:
    """Markdown, from the files of a folder."""
    try:
        counts = pd.read_parquet(folder / "false_accepts.parquet")
        about = json.loads((folder / "wake_word.json").read_text())
        compared = json.loads((folder / "devices" / "compare.json").read_text())
    except FileNotFoundError:
        raise UserError(
            f"{folder} lacks files of the experiment: run benchmarks/self_fl/wake_word.py --out {folder}"
        ) from None
    devices = about["comparisons"]["devices"]
    usual = counts[(counts["comparison"] == "devices") & (counts["state"] == "normal")]
    words = DIFFERS.format(
        clips=f"{compared['data']['examples']:,}",
        accepts=f"{usual['baseline_accepts'].mean():.0f}",
        seeds=about["seeds"],
        parameters=devices["model"]["parameters"],
        warm=sum(about["settings"]["warm"].values()),
        rejects=about["settings"]["rejects"],
        same=about["settings"]["same"],
    )
    parts = [
        "## Wake word (Self-FL, Tables 2, 4, 5 and 6)",
        "Source: Chen et al., Self-Aware Personalized Federated Learning (2022), Section 4.3, Appendices G.2, G.4 and "
        "G.5. The tables show false accepts relative to the warm start, where both reject equally many wake words. "
        "Below one is better.\n"
        "Command: `python benchmarks/self_fl/wake_word.py`",
        words.strip(),
        f"### Table 2a: global models\n\n{both(counts, TABLE_2A, 'global')}",
        order(counts, TABLE_2A, "global"),
        f"### Table 2b: personal models\n\n{both(counts, TABLE_2B, 'personal')}",
        order(counts, TABLE_2B, "personal"),
        f"### Table 4: Algorithms 1 and 2, global models, one learning rate\n\n{table(counts, TABLE_4, 'global')}",
        "### Table 5: four clients of each type, a quarter in a round, global models\n\n"
        f"{table(counts, TABLE_5, 'global')}",
        f"### Table 6: activity rates, global models\n\n{table(counts, TABLE_6, 'global')}",
        "Chosen on validation rows: "
        + "; ".join(f"{label} {knobs_text(knobs)}" for label, knobs in devices["chosen"].items())
        + ".",
        *(f"{name.capitalize()}: {sentence(column(folder / name))}" for name in about["comparisons"]),
    ]
    return "\n\n".join(parts)


def knobs_text(knobs: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in knobs.items())


# -- numbers -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Value:
    """False accepts over the baseline's: mean and standard deviation over seeds."""

    value: float
    deviation: float

    def text(self) -> str:
        return "n/a" if np.isnan(self.value) else f"{self.value:.2f} ± {self.deviation:.2f}"


def by_seed(counts: pd.DataFrame, row: Row, model: str, device: str = "") -> pd.DataFrame:
    """False accepts of a model and of the baseline, of one device type or of all together."""
    same = (counts["comparison"] == row.comparison) & (counts["label"] == row.label)
    mine = counts[same & (counts["model"] == model) & (counts["state"] == row.state)]
    if device:
        mine = mine[mine["device"] == device]
    return mine.groupby("seed")[["accepts", "baseline_accepts"]].sum()


def measured(counts: pd.DataFrame, row: Row, model: str, device: str = "") -> Value:
    found = ratios(by_seed(counts, row, model, device))
    return Value(float(found.mean()), spread(found)) if len(found) else Value(NA, NA)


def ratios(found: pd.DataFrame) -> pd.Series:
    """The ratio of each seed; none if the baseline has no false accepts."""
    return (found["accepts"] / found["baseline_accepts"].where(found["baseline_accepts"] > 0)).dropna()


def spread(values: pd.Series) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def lines(counts: pd.DataFrame, row: Row, model: str, ours: str = "ours") -> list[str]:
    name = row.name if row.comparison == "devices" else f"{row.name}, {row.state}"
    known = [f"{cell:.2f}" if not np.isnan(cell) else "NA" for cell in row.paper]
    if not ((counts["comparison"] == row.comparison) & (counts["label"] == row.label)).any():
        return [f"| {name} | paper | {' | '.join(known)} | |", f"| | {ours}: not run |{' |' * (len(DEVICES) + 1)}"]
    cells = [measured(counts, row, model, device).text() for device in DEVICES]
    overall = measured(counts, row, model).text()
    return [
        f"| {name} | paper | {' | '.join(known)} | |",
        f"| | {ours} | {' | '.join(cells)} | {overall} |",
    ]


HEAD = f"| FL method | | {' | '.join(DEVICES)} | all |\n| --- | --- |{' ---: |' * (len(DEVICES) + 1)}"


def table(counts: pd.DataFrame, rows: tuple[Row, ...], model: str) -> str:
    return "\n".join([HEAD, *(line for row in rows for line in lines(counts, row, model))])


def both(counts: pd.DataFrame, rows: tuple[Row, ...], model: str) -> str:
    """A table with two lines of ours: rates chosen on validation rows, and one rate for all."""
    found = [HEAD]
    for row in rows:
        found += lines(counts, row, model, "ours, tuned")
        found.append(lines(counts, at_common_rate(row), model, "ours, one rate")[1])
    return "\n".join(found)


def at_common_rate(row: Row) -> Row:
    return Row(row.name, f"{row.label}.same", row.paper, row.state, row.comparison)


def order(counts: pd.DataFrame, rows: tuple[Row, ...], model: str) -> str:
    """Whether the paper's order of methods is reproduced: its means over types, and ours over all types together."""
    published = sorted(rows, key=lambda row: np.mean(row.paper))
    told = [f"the paper's means over types: {' < '.join(f'{row.name} {np.mean(row.paper):.2f}' for row in published)}"]
    for ours, change in (("tuned", lambda row: row), ("one rate", at_common_rate)):
        values = {row.name: measured(counts, change(row), model).value for row in rows}
        ranked = sorted(values, key=lambda name: values[name])
        best = rows[0].name
        rival = next(row for name in ranked for row in rows if row.name == name != best)
        apart = ratios(by_seed(counts, change(rows[0]), model)) - ratios(by_seed(counts, change(rival), model))
        if abs(apart.mean()) <= 2 * spread(apart) / max(len(apart), 1) ** 0.5:
            verdict = f"does not differ beyond chance from the best of the others, {rival.name}"
        else:
            verdict = f"is {'better' if apart.mean() < 0 else 'worse'} than the best of the others, {rival.name}"
        told.append(
            f"ours, {ours}: {' < '.join(f'{name} {values[name]:.2f}' for name in ranked)}; {best} {verdict} "
            f"({apart.mean():+.2f} ± {spread(apart):.2f} by seed)"
        )
    return "Order:\n\n" + "\n".join(f"- {line}" for line in told)
