"""The part of docs/results.md on Self-FL: its figures and tables in numbers, beside those that the paper prints.

`section(runs)` reads the folders runs/self-fl-* (see benchmarks/self_fl) and leaves out what has not been run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from self_fl import claims
from self_fl.folders import (
    FIVE,
    TITLES,
    Claim,
    Compared,
    measures_of,
    numbers,
    read_json,
    top,
    weighted,
    worst,
)
from self_fl.synthetic import ACTIVITY, CASES

# what the paper prints; its figures have no numbers
TABLE_1 = {
    "fedavg": ("70.48 (0.07)", "0 (0)"), "ditto": ("70.58 (0.14)", "0 (0)"), "pfedme": ("72.76 (0.28)", "17.97 (1.23)"),
    "per-fedavg": ("74.95 (0.56)", "24.51 (1.55)"), "self-fl": ("76.24 (0.07)", "37.01 (1.57)"),
}  # fmt: skip
FORTY = {"ditto 40 steps": "71.33", "pfedme 40 steps": "68.87", "per-fedavg 40 steps": "71.08", "self-fl": "76.93"}

HEADER = """## Self-FL

Source: Chen et al., *Self-Aware Personalized Federated Learning* (NeurIPS 2022). Accuracies are in percent, weighted by
the clients' test rows, of personal models unless said otherwise; ± is the standard deviation over seeds. The paper's
figures have no printed values: of them, the order that it claims is checked. All figures on one page:
`python benchmarks/self_fl page`."""


def table(head: list[str], rows: list[list[str]]) -> str:
    rule = "| --- |" + " ---: |" * (len(head) - 1)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def verdicts(found: list[Claim]) -> str:
    rows = [[claim.text, claim.verdict] for claim in found]
    return "\n".join(
        ["| the paper's claim | ours, in how many seeds |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows)]
    )


def titled(label: str) -> str:
    return TITLES.get(label, label)


def synthetic(runs: Path) -> list[str]:
    found = read_json(runs / "self-fl-synthetic" / "synthetic.json")
    if not found:
        return []
    lines = pd.DataFrame([line for study in found for line in study["lines"]])
    parts = [
        "### Synthetic clients (Figures 4, 5, 6)",
        "Command: `python benchmarks/self_fl synthetic`",
        f"20 clients, {found[0]['repeats']} repeats, drawn {len(found)} times; absolute errors after "
        f"{found[0]['rounds']} rounds of the Gaussian model, learning rate 1e-4 for all. Algorithm 2 is with known "
        "variances, and what clients reach alone goes into its global parameter; \"variances learned\" is Algorithm "
        "1 as it is used for networks.",
    ]  # fmt: skip
    for case in CASES:
        bounds = {name: np.mean([study["bounds"][case][name] for study in found]) for name in found[0]["bounds"][case]}
        rows = []
        for label in dict.fromkeys(lines["method"]):
            for part in ("global", "local"):
                mine = lines[(lines["case"] == case) & (lines["method"] == label)].groupby("activity")[part].mean()
                rows.append([titled(label), part, *(f"{mine[a]:.4f}" for a in ACTIVITY)])
        parts.append(
            f"{case.capitalize()}; at best (Eq. 2) {bounds['global']:.4f} global; local "
            f"{bounds['local alone']:.4f} alone, {bounds['local given all']:.4f} given all:"
        )
        parts.append(table(["method", "error", *(f"rate {a:g}" for a in ACTIVITY)], rows))
    return [*parts, verdicts(claims.synthetic(found))]


def compared(runs: Path, entry: claims.Entry) -> list[str]:
    """A comparison: final accuracies and claims; of tuned ones, what was chosen."""
    study = Compared.found(runs / f"self-fl-{entry.name}")
    if study is None:
        return []
    measures, about = measures_of(entry), study.about
    rows = [
        [titled(label), *(numbers(study.over_seeds(label, m)) for m in measures.values())] for label in study.labels
    ]
    rounds = max(stage["rounds"] for method in about["methods"] for stage in method["stages"])
    chosen = {titled(label): study.chosen(label) for label in study.labels if study.chosen(label)}
    told = "; ".join(f"{name}: {', '.join(f'{k} = {v:g}' for k, v in knobs.items())}" for name, knobs in chosen.items())
    facts = (
        f"{entry.about} {about['data']['clients']} clients, {about['cohort']} a round, {rounds} rounds, "
        f"{len(study.seeds)} seeds, {about['model']['name']} of {about['model']['parameters']:,} parameters."
    ).strip()
    return [
        f"### {entry.title}",
        f"Command: `{entry.command}`",
        facts + (f" Chosen on validation rows: {told}." if told else ""),
        table(["method", *measures], rows),
        verdicts(entry.claims(study)),
    ]


def table_1(runs: Path) -> list[str]:
    study = Compared.found(runs / "self-fl-five-classes")
    if study is None:
        return []
    rows = [
        [titled(label), TABLE_1[label][0], numbers(study.over_seeds(label, top)), TABLE_1[label][1],
         numbers(study.over_seeds(label, worst))]
        for label in FIVE
    ]  # fmt: skip
    forty = [[titled(label), value, numbers(study.over_seeds(label, weighted))] for label, value in FORTY.items()]
    return [
        "Table 1 (standard errors in the paper's brackets; its data are FEMNIST, ours the stand-in):",
        table(["method", "top 10 % by samples, paper", "ours", "worst 10 %, paper", "ours"], rows),
        "The others with 40 local steps:",
        table(["method", "paper", "ours"], forty),
    ]


def steps(runs: Path) -> list[str]:
    path = runs / "self-fl-mnist-steps" / "steps.parquet"
    if not path.exists():
        return []
    found = pd.read_parquet(path)
    rows = []
    for number in (50, 100, 150, 200):
        here = found[found["round"] == number]["computed"]
        if len(here):
            quantiles = here.quantile([0.1, 0.5, 0.9]).tolist()
            rows.append(
                [str(number), str(len(here)), *(f"{q:.3g}" for q in quantiles), f"{100 * (here > 40).mean():.0f} %"]
            )
    return [
        "### Local steps that Self-FL computes (Figures 11, 12)",
        "Command: `python benchmarks/self_fl steps benchmarks/self_fl/mnist.toml`",
        "Eq. 8's l of the active clients of a round whose uncertainty is known, before it is made a whole number from "
        "1 to 40. With 1,000 clients it asks for less than a step: what all others say counts for more than a client's "
        "own rows. The paper's Figure 12 shows fewer steps after round 150.",
        table(["round", "clients", "a tenth up to", "median", "a tenth from", "above 40"], rows),
    ]


def section(runs: Path) -> str:
    """The whole part, from what is there."""
    parts = [HEADER, *synthetic(runs)]
    for entry in claims.COMPARISONS:
        parts += compared(runs, entry)
        if entry.name == "mnist-sparse":
            parts += steps(runs)
        if entry.name == "five-classes":
            parts += table_1(runs)
    return "\n\n".join(parts)
