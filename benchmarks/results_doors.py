"""The chapter of docs/results.md on users' own models: a ResNet-18, and a classifier of transformers."""

import json
import re
from pathlib import Path
from typing import Any

from bespoke.report.result import Result
from bespoke.report.summary import MethodSummary
from bespoke.statistics.significance import Interval

HEADER = """## Models of one's own

These models are modules that are not part of bespoke ([four doors](doors.md)). Nothing was tuned. The runs are small:
they show that such models work with FedAvg, Ditto and FineTune, and the effect of the rules for buffers. They do not
show how good a model can be. Intervals are 95 % intervals over clients. A change is the difference of the mean
accuracy from FedAvg's. Balanced accuracy is the mean over a client's classes: with two classes, a constant answer has
one half. Traffic is that of one client, in both directions.
"""
RESNETS = {
    "doors-resnet-averaged": "averaged: statistics travel with the parameters",
    "doors-resnet-private": "private (FedBN): BatchNorm stays on the client",
}
TEXTS = "doors-tv-questions"


def chapter(runs: Path) -> str:
    """The sections of the experiments that were run; empty if none was."""
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
        f"The task is to tell which lines of Friends are questions, without their punctuation: {data['clients']} "
        f"characters, {data['examples']:,} lines, {_training(about)}. The model is stories15M, a language model of "
        f"children's stories, with a new last layer (`AutoModelForSequenceClassification`, "
        f"`benchmarks/doors/tv_questions.py`). Its last block is trained, {about['model']['parameters']:,} of 15.2 "
        f"million parameters; the other parameters are not sent.",
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
