"""What a comparison reads, checks, prepares and builds is counted: each of it once in a process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bespoke.data.sources.synthetic import load
from bespoke.experiment import build, checks, prepare, stage
from bespoke.experiment.checks import checked
from bespoke.experiment.search_space import read_space
from bespoke.experiment.stage import stages_of
from bespoke.study import comparison, plan, tuning
from bespoke.study.comparison import Comparison
from bespoke.study.tuning import Tuning

BASE = {"data": {"source": "synthetic", "options": {"clients": 6, "examples": 30}}, "engine": {"workers": 0}}


class Counted(dict[str, int]):
    """How often each of these functions was called."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.patch = patch

    def __call__(self, name: str, *modules: Any) -> None:
        """Counts the calls of a function by all modules that name it."""
        function: Callable[..., Any] = getattr(modules[0], name)
        self[name] = 0

        def counting(*arguments: Any, **options: Any) -> Any:
            self[name] += 1
            return function(*arguments, **options)

        for module in modules:
            self.patch.setattr(module, name, counting)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    count = Counted(monkeypatch)
    count("load_population", comparison, tuning)
    count("prepare", build)
    count("make_split", prepare)
    count("check_stage", stage)
    count("build", build)
    count("engine_choice", build)
    count("checked", checks, comparison, plan, tuning)
    return count


def test_a_comparison_does_nothing_twice(counted: Counted, tmp_path: Path) -> None:
    """Ten jobs: two trials of fedavg, two seeds of fedavg, local and both references. The best trial and fedavg's run
    with its seed have the same configuration, so nine experiments are built.

    A check for each of them and two more: the data are read for a stage of one round, and a tuned method's defaults
    are checked beside its values.
    """
    grid = {"fedavg": {"lr": [0.01, 0.1]}, "local": {}}
    out = Comparison(BASE, tmp_path / "out", ("fedavg", "local"), (0, 1), 3, grid=grid, jobs=1).run()
    assert len(list(out.glob("*/*/result.json"))) == 10
    assert counted == {
        "load_population": 1,
        "prepare": 2,  # one by seed
        "make_split": 2,
        "build": 9,
        "checked": 9 + 2,
        "check_stage": 9 + 2,
        "engine_choice": 1,
    }


def test_runs_of_before_are_not_built_again(counted: Counted, tmp_path: Path) -> None:
    """A finished comparison that is resumed builds what it describes: each method's first, and the last run."""

    def made() -> Path:
        return Comparison(BASE, tmp_path / "out", ("fedavg", "local"), (0, 1), 3, tune=False, jobs=1).run()

    before = {path: path.read_bytes() for path in made().rglob("*") if path.is_file()}
    assert counted["build"] == 8
    made()
    assert counted["build"] == 8 + 3
    assert counted["engine_choice"] == 1
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_a_tuning_does_nothing_twice(counted: Counted, tmp_path: Path) -> None:
    """Three settings, and the experiment as it was given; a seed that is said is part of a configuration."""
    base = {**BASE, "stage": [{"method": "fedavg", "rounds": 2}]}
    space = read_space({"fedavg": {"lr": [0.01, 0.1, 0.2]}}, "space")
    Tuning(base, tmp_path / "out", space, (0,), jobs=1).run()
    assert counted == {
        "load_population": 1,
        "prepare": 1,
        "make_split": 1,
        "build": 4,
        "checked": 4,
        "check_stage": 4,
        "engine_choice": 1,
    }


def test_settings_of_a_model_are_measured_once_each(counted: Counted, tmp_path: Path) -> None:
    """Two widths of a network times two rates: four trials, two choices of the engine."""
    base = {**BASE, "model": {"name": "mlp"}, "stage": [{"method": "fedavg", "rounds": 1}]}
    space = read_space({"model": {"hidden": [[2], [3]]}, "fedavg": {"lr": [0.01, 0.1]}}, "space")
    Tuning(base, tmp_path / "out", space, (0,), jobs=1).run()
    assert counted["engine_choice"] == 2


def test_kept_experiments_go_with_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one split are kept here, so with another seed the first experiment's rows must be free to go."""
    bench = build.Bench(load(clients=6, examples=30))
    first, second = (checked({**BASE, "seed": s, "stage": [{"method": "fedavg", "rounds": 1}]}, "") for s in (0, 1))
    assert bench.build(first) is bench.build(first)
    kept = bench.build(first)
    monkeypatch.setattr(build, "SHARED", 0)
    bench.build(second)
    assert [experiment.seed for _, experiment in bench.built.values()] == [1]
    assert bench.build(first) is not kept


def test_rows_under_an_attack_are_not_kept() -> None:
    bench = build.Bench(load(clients=6, examples=30))
    attack = {"kind": "label-flip", "clients": 0.5}
    config = checked({**BASE, "attack": attack, "stage": [{"method": "fedavg", "rounds": 1}]}, "")
    assert bench.build(config).attackers
    assert not bench.built


def test_stages_are_read_again_in_a_copy_with_others_and_in_another_process() -> None:
    config = checked({**BASE, "stage": [{"method": "fedavg", "rounds": 1}]}, "here")
    assert stages_of(config) is stages_of(config)
    other = config.model_copy(update={"stage": [{"method": "fedavg", "rounds": 2}]})
    assert [found.rounds for found in stages_of(other)] == [2]
    arrived = pickle.loads(pickle.dumps(config))
    assert arrived.model_dump() == config.model_dump()
    assert arrived._checked == (None, ())
    assert [found.rounds for found in stages_of(arrived)] == [1]
