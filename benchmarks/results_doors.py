"""The chapter of docs/results.md on models of the user's own: a ResNet-18, and a classifier of transformers."""

import json
import re
from pathlib import Path
from typing import Any

from bespoke.report.result import Result
from bespoke.report.summary import MethodSummary
from bespoke.statistics.significance import Interval

HEADER = """## Models of one's own

Modules that are no part of bespoke ([four doors](doors.md)), with nothing tuned. These runs are small: they show that
such models go through FedAvg, Ditto and FineTune, and what their rules for buffers do. They say nothing of how good a
model can be. Intervals are 95 % over clients; a change is that of the mean accuracy against FedAvg. Balanced accuracy
is the mean over a client's classes: a constant answer has one half of two classes. Traffic is a client's, both ways.
"""
RESNETS = {
    "doors-resnet-averaged": "averaged: statistics travel with the parameters",
    "doors-resnet-private": "private (FedBN): BatchNorm stays on the client",
}
TEXTS = "doors-tv-questions"


def chapter(runs: Path) -> str:
    """The sections of what was run; empty if nothing was."""
    resnets = {name: rule for name, rule in RESNETS.items() if (runs / name / "compare.json").exists()}
    found = [resnet(runs, resnets)] if resnets else []
    if (runs / TEXTS / "compare.json").exists():
        found.append(texts(runs / TEXTS))
    return "\n\n".join([HEADER.strip(), *found]) + "\n" if found else ""


def resnet(runs: Path, rules: dict[str, str]) -> str:
    about = [json.loads((runs / name / "compare.json").read_text(encoding="utf-8")) for name in rules]
    data = about[0]["data"]
    lines = [
        "### A ResNet-18 with BatchNorm on CIFAR-10",
        "",
        f"{data['clients']} clients, {data['examples']:,} photographs, {_training(about[0])}. The network of "
        "`benchmarks/doors/resnet_cifar10.py` with an eighth of the paper's channels.",
        _commands(about),
        "",
        "| BatchNorm | parameters that travel | method | accuracy | change | balanced accuracy | traffic per round |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for (name, rule), said in zip(rules.items(), about):
        travel = f"{said['model']['parameters']:,}"
        lines += [_row([rule, travel, *_cells(method)]) for method in Result.read(runs / name).methods]
    return "\n".join(lines)


def texts(folder: Path) -> str:
    about = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    data = about["data"]
    lines = [
        "### A classifier of transformers on lines of a TV series",
        "",
        f"Which lines of Friends are questions, without their punctuation: {data['clients']} characters, "
        f"{data['examples']:,} lines, {_training(about)}. stories15M, a language model of children's stories, with "
        f"a new last layer (`AutoModelForSequenceClassification`, `benchmarks/doors/tv_questions.py`): its last block "
        f"is trained, {about['model']['parameters']:,} of 15.2 million parameters; the others do not travel.",
        _commands([about]),
        "",
        "| method | accuracy | change | balanced accuracy | traffic per round |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(_row(_cells(method)) for method in Result.read(folder).methods),
    ]
    return "\n".join(lines)


def _cells(method: MethodSummary) -> list[str]:
    mean = f"{method.mean.value:.3f} ({_between(method.interval)})"
    against, cost = method.against, method.cost
    change = f"{against.difference:+.3f} ({_between(against.interval)})" if against else "baseline"
    moved = cost.bytes_down_round + cost.bytes_up_round if cost and cost.rounds else 0.0
    balanced = f"{method.other_metrics['balanced_accuracy'].value:.3f}"
    return [method.title, mean, change.replace("-", "−"), balanced, f"{moved / 1e6:.2f} MB" if moved else "–"]


def _training(about: dict[str, Any]) -> str:
    rounds = max(stage.get("rounds") or 0 for method in about["methods"] for stage in method["stages"])
    return ", ".join(
        f"{n} {what}{'s' if n > 1 else ''}" for n, what in ((rounds, "round"), (len(about["seeds"]), "seed"))
    )


def _commands(about: list[dict[str, Any]]) -> str:
    said = [re.sub(r" --jobs[ =]\S+", "", str(record["command"])) for record in about]
    return f"Command{'s' if len(said) > 1 else ''}: " + ", ".join(f"`{command}`" for command in said)


def _between(interval: Interval) -> str:
    return f"{interval.low:.3f} to {interval.high:.3f}".replace("-", "−")


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
