"""Every comparison in benchmarks/ is one that `bespoke compare` takes: names, knobs, values and stages fit."""

import tomllib
from pathlib import Path

import pytest

from bespoke.comparison import Comparison

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FILES = sorted(path for path in BENCHMARKS.rglob("*.toml") if "compare" in tomllib.loads(path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_it_can_be_run(path: Path, tmp_path: Path) -> None:
    found = Comparison.read(path, tmp_path / "out")
    found._check()
    assert set(found.entries) <= set(found.methods)
    assert set(found.grid) <= set(found._needed())  # a grid of nobody would go unnoticed
