"""What is to be known before a result is relied on, and what it costs: checked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bespoke.report.checks import Concern
from bespoke.report.report import summarize

VALUES = {"fedavg": [[1.0] * 8], "group-fl": [[0.5] * 8], "local": [[0.7] * 8]}


def kinds(concerns: list[Concern]) -> list[tuple[str, str, str]]:
    return [(c.severity, c.kind, c.label) for c in concerns if c.kind != "small test sets"]


def test_the_most_serious_comes_first(tmp_path: Path, write_comparison: Any) -> None:
    checks = [
        {"kind": "duplicates", "text": "3 rows lie in train and test.", "severity": "note"},
        {"kind": "leak", "text": "x1 determines the target.", "severity": "serious"},
    ]
    summary = summarize([write_comparison(tmp_path, VALUES, compare={"checks": checks, "notes": ["Slow."]})])
    assert kinds(summary.concerns) == [("serious", "leak", ""), ("note", "duplicates", ""), ("note", "state", "")]
    written = json.loads(summary.to_json())["concerns"]
    assert written[0] == {"label": "", "kind": "leak", "text": "x1 determines the target.", "severity": "serious"}


def test_other_rounds_than_the_baseline_are_said(tmp_path: Path, write_comparison: Any, write_run: Any) -> None:
    folder = write_comparison(tmp_path, VALUES)
    clients = [f"client {i:02d}" for i in range(8)]
    for label, rounds in (("group-fl", 8), ("local", 0)):
        write_run(folder / "runs" / f"{label}-seed0", label, 0, VALUES[label][0], clients, rounds=rounds)
    [said] = [c for c in summarize([folder]).concerns if c.kind == "rounds"]
    assert said.text == "Clients worked in different numbers of rounds: Fedavg 4, Group-fl 8."


@pytest.mark.parametrize(
    ("ends", "lower", "converged"),
    [
        ([1.02, 1.02, 1.02, 1.01, 1.0], True, False),  # 2 % in the last 4 of 20 rounds
        ([1.009, 1.009, 1.007, 1.005, 1.0], True, True),  # 0.9 %
        ([0.985, 0.985, 0.985, 0.99, 1.0], True, True),  # it gets worse by 1.5 %
        ([0.98, 0.98, 0.98, 0.99, 1.0], False, False),
    ],
)
def test_a_curve_that_still_improves_has_not_converged(
    tmp_path: Path, write_comparison: Any, ends: list[float], lower: bool, converged: bool
) -> None:
    options: dict[str, Any] = {} if lower else {"metric": "accuracy", "lower": False}
    folder = write_comparison(tmp_path, {"fedavg": [[1.0] * 8], "ditto": [[0.9] * 8]}, rounds=20,
                              curve=[2.0] * 16 + ends, **options)  # fmt: skip
    found = [c for c in summarize([folder]).concerns if c.kind == "convergence"]
    both = [("serious", "convergence", "fedavg"), ("note", "convergence", "ditto")]
    assert kinds(found) == ([] if converged else both)
    if not converged:
        assert found[0].text.startswith("Fedavg has not converged: the last fifth of its rounds still improved")


def test_a_curve_that_gets_worse_is_past_its_best(tmp_path: Path, write_comparison: Any) -> None:
    """From 0.95 to 1 in the last 4 of 20 rounds: by 5 % of its end."""
    curve = [2.0] * 16 + [0.95, 0.95, 0.96, 0.98, 1.0]
    folder = write_comparison(tmp_path, {"fedavg": [[1.0] * 8], "ditto": [[0.9] * 8]}, rounds=20, curve=curve)
    found = [c for c in summarize([folder]).concerns if c.kind == "convergence"]
    assert kinds(found) == [("serious", "convergence", "fedavg"), ("note", "convergence", "ditto")]
    assert "was trained for too long: its last fifth of rounds made validation worse by 5.0 %" in found[0].text


def test_a_client_that_did_not_report_sends_nothing(tmp_path: Path, write_comparison: Any) -> None:
    """8 clients are sent 400 bytes in each of 4 rounds, 3 answer with 400 bytes and 6 steps: that is the price."""
    cost = summarize([write_comparison(tmp_path, {"fedavg": [[1.0] * 8]}, reported=3)]).methods[0].cost
    assert cost is not None
    assert (cost.bytes_up, cost.bytes_up_round, cost.bytes_down_round, cost.steps) == (1600, 400, 400, 24)
