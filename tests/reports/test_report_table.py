"""The table for the terminal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bespoke.metrics.summary import summarize
from bespoke.reports.table import print_summary


def printed(path: list[Path], width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    print_summary(summarize(path), console)
    return console.export_text()


@pytest.fixture
def accuracy(write_comparison, tmp_path: Path) -> Path:
    """Long titles and long numbers."""
    rng = np.random.default_rng(0)
    base = rng.uniform(0.4, 0.9, 30)
    values = {"fedavg": [base.tolist()], "finetune": [(base + rng.normal(0.05, 0.02, 30)).tolist()],
              "local": [(base - rng.normal(0.1, 0.05, 30)).tolist()]}  # fmt: skip
    methods = [{"label": label, "title": f"FedAvg and then {label} with a long name"} for label in values]
    return write_comparison(tmp_path, values, metric="accuracy", lower=False, compare={"methods": methods})


@pytest.mark.parametrize("width", [80, 100, 140])
def test_nothing_is_cut_off(accuracy: Path, width: int) -> None:
    text = printed([accuracy], width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for heading in ("accuracy", "change", "hurt", "worst", "traffic", "steps"):
        assert heading in text


def test_what_the_toy_shows(toy: Path) -> None:
    text = printed([toy], 100)
    [row] = [line for line in text.splitlines() if line.strip().startswith("Finetune") and "±" in line]
    for cell in ("2.25 ± 1.6", "25 %", "4.75", "3.60 kB", "36"):
        assert cell in row
    assert "baseline" in text
    assert "Too few clients to tell" in text


def test_hostile_titles_are_not_markup(write_comparison, tmp_path: Path) -> None:
    folder = write_comparison(
        tmp_path, {"fedavg": [[1.0, 2.0]]}, ["[red]x", "y"], compare={"title": "[bold]not bold[/bold]"}
    )
    assert "[bold]not bold[/bold]" in printed([folder], 100)


def test_one_run_alone(toy: Path) -> None:
    assert "there is no other method" in " ".join(printed([toy / "runs" / "fedavg-seed0"], 80).split())
    assert "before personalization" in printed([toy / "runs" / "finetune-seed0"], 80)
