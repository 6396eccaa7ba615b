"""Every comparison in benchmarks/ is one that `bespoke compare` takes: names, knobs, values and stages fit."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from bespoke.experiment import presets
from bespoke.experiment.presets import Preset
from bespoke.study.comparison import Comparison

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FILES = sorted(path for path in BENCHMARKS.rglob("*.toml") if "compare" in tomllib.loads(path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_it_can_be_run(path: Path, tmp_path: Path) -> None:
    found = Comparison.read(path, tmp_path / "out")
    found.plan.check()
    assert set(found.entries) <= set(found.methods)
    assert set(found.grid) <= set(found.plan.needed())  # a grid of nobody would go unnoticed


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_a_benchmark_uses_the_relation_that_it_learns(path: Path, tmp_path: Path) -> None:
    found = Comparison.read(path, tmp_path / "out")
    if "mocha" in found.methods:
        assert isinstance(found.rounds, int)
        assert _latest(found.knobs.get("mocha", {}), found.grid.get("mocha", {})) < found.rounds


@pytest.mark.parametrize("name", sorted(path.stem for path in presets.HERE.glob("*.toml")))
def test_a_preset_uses_the_relation_that_it_learns(name: str) -> None:
    preset = Preset.read(name)
    if "mocha" in preset.methods():
        assert preset.rounds is not None
        tables = [table.get("mocha", {}) for table in (preset.knobs, preset.grid, preset.best)]
        assert _latest(*tables) < preset.rounds


def test_a_relation_updated_after_the_last_round_only_is_found() -> None:
    assert _latest({"lr": 0.1}, {"relate_every": [501, 2]}, {"relate_every": 2}) == 501
    assert _latest({}) == 1


def _latest(*tables: dict[str, Any]) -> int:
    """The latest round in which Mocha's relation is updated for the first time, over all values that are tried."""
    values = [table.get("relate_every", 1) for table in tables]
    return max(max(value) if isinstance(value, list) else value for value in values)
