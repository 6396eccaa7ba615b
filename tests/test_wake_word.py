"""Self-FL's wake-word experiment: its settings are experiments, and its tables are what the counts say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from bespoke.errors import UserError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for `python benchmarks/results.py`: its modules import each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def script(name: str) -> ModuleType:
    path = BENCHMARKS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "rounds", "cohort"), [("devices", 10, {}), ("quarter", 40, {"size": 5}), ("tenth", 100, {"size": 2})]
)
def test_comparisons_are_valid_and_share_their_warm_start(name: str, rounds: int, cohort: Any, tmp_path: Path) -> None:
    wake_word = script("self_fl/wake_word")
    asked = wake_word.comparison(name, tmp_path, 3, 0.1)
    asked.plan.check()
    assert (asked.rounds, asked.base["cohort"]) == (rounds, cohort)
    begun = [asked.plan.stages(label, {})[:2] for label in asked.methods]
    assert all(stages == begun[0] for stages in begun)
    tuned = {label for label in asked.methods if asked.plan.space(label)}
    assert tuned == (set(wake_word.DEVICES) if name == "devices" else set())


def counts() -> pd.DataFrame:
    """Self-FL: 3 of 4 and 6 of 8 false accepts in type A, none in B; FedAvg-e's are as many as the baseline's."""
    rows = []
    for label, seed, device, accepts, baseline in [
        ("self-fl", 0, "A", 3, 4), ("self-fl", 1, "A", 6, 8), ("self-fl", 0, "B", 1, 0), ("self-fl", 1, "B", 2, 4),
        ("fedavg", 0, "A", 4, 4), ("fedavg", 1, "A", 8, 8),
    ]:  # fmt: skip
        row = {"comparison": "devices", "seed": seed, "model": "global", "device": device, "state": "normal"}
        rows += [{**row, "label": name, "accepts": accepts, "baseline_accepts": baseline}
                 for name in (label, f"{label}.same")]  # fmt: skip
    return pd.DataFrame(rows)


def test_relative_false_accepts_over_seeds() -> None:
    results = script("results_wake_word")
    row = results.TABLE_2A[0]
    assert results.measured(counts(), row, "global", "A") == results.Value(0.75, 0.0)
    assert results.measured(counts(), row, "global", "B") == results.Value(0.5, 0.0)  # a seed has nothing to divide by
    together = results.measured(counts(), row, "global")  # 4 of 4 and 8 of 12
    assert together.value == pytest.approx(5 / 6)
    assert together.deviation == pytest.approx((1 - 2 / 3) / 2**0.5)
    assert results.measured(counts(), row, "personal", "A").text() == "n/a"


def test_the_order_of_methods_is_told() -> None:
    results = script("results_wake_word")
    rows = (results.TABLE_2A[0], results.TABLE_2A[2])
    told = results.order(counts(), rows, "global")
    assert "Self-FL 0.94 < FedAvg-e 0.97" in told
    # differences of 0 and -1/3: their mean is as far from zero as its own error
    assert "ours, tuned: Self-FL 0.83 < FedAvg-e 1.00; Self-FL does not differ beyond chance from" in told
    assert "FedAvg-e (-0.17 ± 0.24 by seed)" in told
    only = counts()[counts()["device"] == "A"].copy()  # -1/4 in both seeds
    told = results.order(only, rows, "global")
    assert "Self-FL is better than the best of the others, FedAvg-e (-0.25 ± 0.00" in told
    only.loc[only["label"] == "self-fl", "accepts"] *= 2
    told = results.order(only, rows, "global")
    assert "FedAvg-e 1.00 < Self-FL 1.50; Self-FL is worse than" in told


def test_the_section(tmp_path: Path) -> None:
    results = script("results_wake_word")
    with pytest.raises(UserError, match=r"lacks files of the experiment: run benchmarks/self_fl/wake_word.py"):
        results.section(tmp_path)
    counts().to_parquet(tmp_path / "false_accepts.parquet")
    about = {
        "settings": {"rejects": 0.1, "same": 0.03, "warm": {"0.1": 30, "0.03": 10}}, "seeds": 2,
        "comparisons": {"devices": {"model": {"parameters": 15290}, "chosen": {"self-fl": {"lr": 0.1}}}},
    }  # fmt: skip
    (tmp_path / "wake_word.json").write_text(json.dumps(about))
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "compare.json").write_text(json.dumps({"data": {"examples": 4890}}))
    written = results.section(tmp_path)
    assert "| Self-FL | paper | 0.92 | 0.94 | 0.91 | 0.91 | 1.01 | |" in written
    assert "| | ours, tuned | 0.75 ± 0.00 | 0.50 ± 0.00 | n/a | n/a | n/a | 0.83 ± 0.24 |" in written
    assert "| | ours: not run | | | | | | |" in written
    assert "4,890 clips" in written
    assert "Devices: No validation curve is long enough to show" in written
