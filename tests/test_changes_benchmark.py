"""What benchmarks/fedembed/changes.py reads off its runs: by hand, on a folder of two points and two changes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
OPTIONS = "[data.options]\nnumber = 300\nchange = 0.25\nchange_after = 2\nlate = 2\nlate_after = 4\n"
STAYED, CHANGED, LATE = "0-00000", "0to3-00001", "9-00002"

Watched = dict[str, float]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("results_changes")
    for name in [name for name in sys.modules if name.split(".")[0] in ("fedembed", "results_changes")]:
        del sys.modules[name]


def point(number: int, watched: Watched, change: Watched | None = None) -> str:
    return json.dumps({"round": number, "watched": watched, **({"change": {"watched": change}} if change else {})})


def folder(path: Path) -> Path:
    """Two seeds: those who changed fall from 0.9 to 0.5 and are back after two rounds; who comes late loses nobody."""
    about = {"methods": [{"label": "Global", "stages": [{"rounds": 6}]}], "seeds": [0, 1], "cohort": 40}
    for seed in (0, 1):
        run = path / "runs" / f"Global-seed{seed}"
        run.mkdir(parents=True)
        (run / "config.toml").write_text(OPTIONS)
        off = 0.1 * seed  # seeds differ where it does not change the verdict
        lines = [
            point(0, {STAYED: 0.5, CHANGED: 0.5}),
            point(2, {STAYED: 0.8 + off, CHANGED: 0.9}),
            point(3, {STAYED: 0.8 + off, CHANGED: 0.6}, change={STAYED: 0.8 + off, CHANGED: 0.5}),
            point(4, {STAYED: 0.8 + off, CHANGED: 0.88}),
            point(5, {STAYED: 0.7, CHANGED: 0.9, LATE: 0.6}, change={STAYED: 0.8 + off, CHANGED: 0.88, LATE: 0.2}),
            point(6, {STAYED: 0.7, CHANGED: 0.9, LATE: 0.75}),
        ]
        (run / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    (path / "compare.json").write_text(json.dumps(about))
    return path


def test_how_deep_how_soon_and_who_loses(benchmark: Any, tmp_path: Path) -> None:
    found = benchmark.Changes(folder(tmp_path))
    assert found.change_table()[1] == ["Global", "0.900", "0.500", "2 rounds", "0.880", "0.850", "0.850"]
    assert found.late_table()[1] == ["Global", "0.200", "0.600", "0.750", "0.865", "0.800"]
    moments = [(done, new) for done, new, _ in found.points("Global")]
    assert moments == [(0, False), (2, False), (2, True), (3, False), (4, False), (4, True), (5, False), (6, False)]


def test_the_page_and_the_chapter(benchmark: Any, tmp_path: Path) -> None:
    found = benchmark.Changes(folder(tmp_path))
    drawn = [name for section in found.sections() for name, _, _ in section.figures]
    assert drawn == ["changed", "stayed", "late"]
    late = found.figure("came late")["data"][0]
    assert (late["x"], late["y"]) == ([4, 5, 6], [0.2, 0.6, 0.75])
    text = benchmark.section(tmp_path)
    assert "After round 2, 25% of the users who like one of the first 8 digits" in text
    assert "| Global | 0.900 | 0.500 | 2 rounds |" in text
