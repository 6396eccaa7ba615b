"""Verdicts against the baseline: what it takes to be called better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespoke.report.report import summarize
from bespoke.statistics.clients import gains
from bespoke.statistics.versus_baseline import _verdict

HELPED = gains(np.array([[1.0, 1.0, 3.0]]), np.array([[2.0, 2.0, 2.0]]), lower_is_better=True)  # two of three


@pytest.mark.parametrize(
    ("p", "gained", "mean_gain", "verdict"),
    [
        (0.01, 1, 0.5, "better"),
        (0.20, 1, 0.5, "unclear"),  # the interval alone is not enough
        (0.05, 1, 0.5, "unclear"),  # strictly below
        (0.01, 0, 0.5, "unclear"),  # the test alone is not enough
        (0.01, -1, -0.5, "mixed"),  # most gain, the mean loses
        (0.20, 0, -0.5, "unclear"),
    ],
)
def test_a_verdict_needs_the_test_and_the_interval(p: float, gained: int, mean_gain: float, verdict: str) -> None:
    assert _verdict(p, gained, mean_gain, HELPED) == verdict


def test_most_must_lose_for_worse() -> None:
    hurt = gains(np.array([[3.0, 3.0, 1.0]]), np.array([[2.0, 2.0, 2.0]]), lower_is_better=True)
    assert _verdict(0.01, -1, -0.5, hurt) == "worse"
    assert _verdict(0.20, -1, -0.5, hurt) == "unclear"


def test_five_clients_cannot_prove_anything(tmp_path: Path, write_comparison: Any) -> None:
    """All five gain and the interval is far from zero, but the paired test cannot be below 2 / 2^5 = 0.0625."""
    summary = summarize([write_comparison(tmp_path, {"fedavg": [[2.0] * 5], "ditto": [[1.0, 1.1, 1.2, 1.3, 1.4]]})])
    against = summary.method("ditto").against
    assert against.interval.high < 0
    assert against.p == pytest.approx(0.0625)
    assert against.verdict == "unclear"
