"""The table of validation curves in docs/results.md, from folders whose curves are known by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bespoke.report.report import read, summarize_study
from results_curves import curves

Write = Callable[..., Path]


def table(folder: Path) -> list[str]:
    study, clients = read([folder])
    return curves(study, summarize_study(study, clients))


def test_one_line_for_methods_with_the_same_curve(write_comparison: Write, tmp_path: Path) -> None:
    """Twenty rounds, one lower in each: fine-tuning has FedAvg's curve, which is not repeated."""
    curve = [30.0 - number for number in range(21)]
    folder = write_comparison(tmp_path / "c", {"fedavg": [[1.0]], "finetune": [[1.0]]}, rounds=20, curve=curve)
    assert table(folder)[3:] == [
        "| method | trained for | 0 % | 20 % | 40 % | 60 % | 80 % | 100 % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| Fedavg | 20 rounds | 30.00 | 26.00 | 22.00 | 18.00 | 14.00 | 10.00 |",
    ]


def test_epochs_at_the_chosen_rate(write_comparison: Write, tmp_path: Path) -> None:
    """Epochs 5, 10 and 20: from 5 on, two fifths of the way is epoch 11, where that of epoch 10 is the last known."""
    scores = {"epoch 0": 9.0, "lr 1, epoch 5": 4.0, "lr 1, epoch 10": 2.0, "lr 1, epoch 20": 1.0, "lr 2, epoch 20": 7.0}
    folder = write_comparison(
        tmp_path / "c", {"fedavg": [[1.0]]}, rounds=0, candidates=scores, chosen={"candidate": "lr 1, epoch 20"}
    )
    assert table(folder)[-1] == "| Fedavg | 20 epochs | 4.000 | 4.000 | 2.000 | 2.000 | 2.000 | 1.000 |"


def test_nothing_without_a_curve(write_comparison: Write, tmp_path: Path) -> None:
    assert table(write_comparison(tmp_path / "c", {"fedavg": [[1.0]]}, rounds=2)) == []
