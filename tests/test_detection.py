"""False accepts and rejects by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from self_fl.detection import Errors, Relative, errors_at, relative, threshold_for

# four times the wake word, five times another word
WANTED = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0], dtype=bool)
BASELINE = [0.9, 0.8, 0.6, 0.2, 0.85, 0.7, 0.5, 0.3, 0.1]
MODEL = [0.9, 0.3, 0.8, 0.7, 0.75, 0.6, 0.4, 0.2, 0.1]


def test_errors_at_a_threshold() -> None:
    """At 0.6 the last wake word is rejected, 0.85 and 0.7 are accepted: a score of the threshold is accepted."""
    assert errors_at(BASELINE, WANTED, 0.6) == Errors(1, 2, 4, 5)
    assert errors_at(BASELINE, WANTED, 0.61) == Errors(2, 2, 4, 5)


def test_the_threshold_for_so_many_rejects() -> None:
    assert threshold_for(BASELINE, WANTED, 0) == 0.2
    assert threshold_for(BASELINE, WANTED, 1) == 0.6
    assert threshold_for([1.0, 1.0, 2.0, 0.0], [True, True, True, False], 1) == 1.0  # equal scores: nobody is rejected
    with pytest.raises(ValueError, match="4 of 4 wanted"):
        threshold_for(BASELINE, WANTED, 4)


def test_relative_false_accepts_by_hand() -> None:
    """One reject each: the baseline accepts 0.85 and 0.7, the model (threshold 0.7) 0.75 alone."""
    found = relative(MODEL, BASELINE, WANTED, 0.25)
    assert (found.baseline, found.model) == (Errors(1, 2, 4, 5), Errors(1, 1, 4, 5))
    assert (found.accepts, found.rejects) == (0.5, 1.0)


def test_the_baseline_beside_itself_is_one() -> None:
    for rejects, accepts in ((0.0, 4), (0.24, 4), (0.25, 2), (0.5, 1), (0.99, 0)):
        found = relative(BASELINE, BASELINE, WANTED, rejects)
        assert found.baseline.accepts == accepts
        assert found.model == found.baseline
        assert found.rejects == 1.0


def test_nothing_to_divide_by() -> None:
    none = Relative(Errors(0, 3, 4, 5), Errors(0, 0, 4, 5))
    assert math.isnan(none.accepts)
    assert none.rejects == 1.0
    assert Relative(Errors(1, 0, 4, 5), Errors(0, 1, 4, 5)).rejects == math.inf


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.booleans()), min_size=2), st.floats(0, 0.99))
def test_rejects_are_never_more_than_asked_for(rows: Any, rejects: Any) -> None:
    model, baseline, wanted = (np.array(column) for column in zip(*rows))
    if wanted.any() and not wanted.all():
        found = relative(model, baseline, wanted, rejects)
        assert max(found.model.rejects, found.baseline.rejects) <= rejects * wanted.sum() + 1e-9
        assert relative(8 * model, baseline, wanted, rejects) == found  # a monotone change of scores changes nothing


@pytest.mark.parametrize(
    ("scores", "wanted", "message"),
    [
        ([0.1, 0.2], [True], "one score for each clip"),
        ([0.1, math.nan], [True, False], "1 scores are not numbers"),
        ([0.1, 0.2], [True, True], "clips of both kinds"),
    ],
)
def test_bad_scores(scores: Any, wanted: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        errors_at(scores, wanted, 0.5)


def test_a_fraction_of_rejects() -> None:
    with pytest.raises(ValueError, match=r"rejects = 1.0: a fraction of the wanted"):
        relative(MODEL, BASELINE, WANTED, 1.0)
