"""Attacks x robust rules on exam results of 65 schools: the cost to honest clients, as a table in docs/robust.md.

    python benchmarks/robust.py [--out runs/robust]

Three seeds each. Every run has its own folder, and the table is made from these folders: a second call runs only what
is missing. Takes about a minute of one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args

import torch

from bespoke.cli.exit_codes import program
from bespoke.experiment.build import build, to_toml
from bespoke.experiment.checks import checked
from bespoke.experiment.loading import load_population
from bespoke.messages.robust.settings import AttackKind, RuleName
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.storage import write_text

PAGE = Path(__file__).parents[1] / "docs" / "robust.md"
BEGIN, END = "<!-- robust table -->", "<!-- end -->"
RULES = ("mean", *get_args(RuleName))
ATTACKS = ("none", *(kind for kind in get_args(AttackKind) if kind != "none"))
SEEDS = (0, 1, 2)
DIVERGED = 1e3  # an MSE of standardized targets beyond it says nothing more


def experiment(rule: str, kind: str, seed: int) -> dict[str, Any]:
    """FedAvg on a linear model, a fifth of the schools attacking."""
    return {
        "label": rule, "seed": seed, "data": {"source": "exam"}, "engine": {"workers": 0},
        "attack": {"kind": kind, "clients": 0.2}, **({} if rule == "mean" else {"robust": {"rule": rule}}),
        "stage": [{"method": "fedavg", "rounds": 40, "lr": 0.1}],
    }  # fmt: skip


def run_all(out: Path) -> None:
    population = None
    for kind in ATTACKS:
        for rule in RULES:
            for seed in SEEDS:
                config = checked(experiment(rule, kind, seed), "benchmark")
                folder = RunFolder.create(out / f"{kind}-{rule}-seed{seed}", to_toml(config))
                if folder.result() is None:
                    population = load_population(config) if population is None else population
                    Run(build(config, population), folder).run()
        print(f"{kind}: {len(RULES) * len(SEEDS)} runs")


def table(out: Path) -> str:
    """Mean MSE of honest clients over seeds, from result.json of every run."""
    lines = ["| attack by 13 of 65 clients | " + " | ".join(RULES) + " |", "|---" * (len(RULES) + 1) + "|"]
    for kind in ATTACKS:
        cells = []
        for rule in RULES:
            paths = [out / f"{kind}-{rule}-seed{seed}" / "result.json" for seed in SEEDS]
            values = [json.loads(path.read_text(encoding="utf-8"))["query"] for path in paths]
            fine = all(value is not None and value < DIVERGED for value in values)
            cells.append(f"{sum(values) / len(values):.3f}" if fine else "diverged")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/robust"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    run_all(out)
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    write_text(PAGE, f"{before}{BEGIN}\n{table(out)}\n{END}{rest.split(END)[1]}")
    print(table(out))


if __name__ == "__main__":
    program(main)
