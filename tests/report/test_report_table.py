"""The table for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bespoke.report.report import summarize
from bespoke.report.terminal import print_summary


def printed(path: list[Path], width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    print_summary(summarize(path), console)
    return console.export_text()


@pytest.fixture
def accuracy(write_comparison: Any, tmp_path: Path) -> Path:
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


def test_hostile_titles_are_not_markup(write_comparison: Any, tmp_path: Path) -> None:
    folder = write_comparison(
        tmp_path, {"fedavg": [[1.0, 2.0]]}, ["[red]x", "y"], compare={"title": "[bold]not bold[/bold]"}
    )
    assert "[bold]not bold[/bold]" in printed([folder], 100)


def test_one_run_alone(toy: Path) -> None:
    assert "there is no other method" in " ".join(printed([toy / "runs" / "fedavg-seed0"], 80).split())
    assert "before personalization" in printed([toy / "runs" / "finetune-seed0"], 80)


WIDE = {"fedavg": 1234.25, "finetune": 1134.25, "local": 98765.4}


@pytest.fixture
def wide(write_comparison: Any, tmp_path: Path) -> Path:
    """Everyone is hurt by one method, numbers are long, and who is hurt beyond chance is known."""
    spread = np.linspace(-1, 1, 30)
    values = {label: [(level + spread).tolist(), (level - spread).tolist()] for label, level in WIDE.items()}
    return write_comparison(
        tmp_path, values, references={"constant": [[2345.0] * 30] * 2, "pooled": [[1230.0] * 30] * 2},
        rows={f"client {i:02d}": [float(i), i + 1.0] for i in range(30)},
        compare={"checks": [{"kind": "leak", "text": "The column x is the target.", "severity": "serious"}]},
    )  # fmt: skip


@pytest.mark.parametrize("width", [60, 72, 80, 100, 140])
def test_every_number_is_readable(wide: Path, width: int) -> None:
    text = printed([wide], width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = " ".join(text.split())
    for shown in ("1,234", "1,134", "98,765", "(100 %)", ">1,000 %", "3.60 kB", "2,345", "1,230", "Constant", "Pooled"):
        assert shown in words
    for heading in ("change", "hurt", "(raw)", "worst", "traffic", "steps"):
        assert heading in words


def test_references_are_dim_and_below(wide: Path) -> None:
    lines = printed([wide], 140).splitlines()
    places = [next(i for i, line in enumerate(lines) if line.strip().startswith(name))
              for name in ("Fedavg", "Finetune", "Local", "Constant", "Pooled")]  # fmt: skip
    assert places == sorted(places)
    console = Console(width=140, record=True, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    print_summary(summarize([wide]), console)
    styled = console.export_text(styles=True)
    [row] = [line for line in styled.splitlines() if "Constant" in line and "±" in line]
    assert "\x1b[2m" in row


def test_concerns_follow_the_answer(wide: Path) -> None:
    text = printed([wide], 100)
    assert text.index("Personalization helps") < text.index("Before you rely on it")
    assert "! The column x is the target." in " ".join(text.split())


def test_a_diverged_method_is_called_so_and_comes_last(write_comparison: Any, tmp_path: Path) -> None:
    folder = write_comparison(tmp_path, {"fedavg": [[1.0] * 8], "local": [[np.inf] + [0.1] * 7], "ditto": [[0.5] * 8]})
    lines = [line.split() for line in printed([folder], 80).splitlines()]
    rows = [words for words in lines if words and words[0] in ("Fedavg", "Local", "Ditto") and len(words) > 3]
    assert [row[0] for row in rows[:3]] == ["Fedavg", "Ditto", "Local"]
    assert rows[2][1] == "diverged"
