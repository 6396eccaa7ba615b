"""Intervals and tests, checked by hand and by their properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bespoke.randomness import generator
from bespoke.statistics import significance
from bespoke.statistics.significance import (
    Interval,
    bootstrap_means,
    bootstrap_together,
    holm,
    percentile_interval,
    relative_change,
    smallest_p,
    spearman,
    wilcoxon,
)


def test_wilcoxon_by_hand() -> None:
    # Five differences of one sign: 2 of the 2^5 sign patterns are as extreme.
    assert wilcoxon(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == pytest.approx(2 / 32)
    assert wilcoxon(-np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == pytest.approx(2 / 32)
    # Signs + + -: rank sums 3 against 3, the middle of the distribution.
    assert wilcoxon(np.array([1.0, 2.0, -3.0])) == pytest.approx(1.0)


def test_wilcoxon_when_nobody_changes() -> None:
    assert wilcoxon(np.zeros(8)) == 1.0
    assert wilcoxon(np.array([np.nan])) == 1.0
    assert wilcoxon(np.array([])) == 1.0


def test_smallest_p() -> None:
    assert smallest_p(5) == pytest.approx(2 / 32)
    assert smallest_p(6, comparisons=3) == pytest.approx(6 / 64)
    assert smallest_p(1) == 1.0


def test_holm_by_hand() -> None:
    # 0.01 x 3, 0.02 x 2, then 0.03 x 1 may not fall below 0.04.
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_only_raises_and_keeps_the_order(p_values: list[float]) -> None:
    corrected = holm(p_values)
    assert all(p <= c <= 1 for p, c in zip(p_values, corrected))
    assert holm(p_values[::-1]) == corrected[::-1]
    ranked = [corrected[i] for i in np.argsort(p_values, kind="stable")]
    assert ranked == sorted(ranked)


def test_a_constant_has_an_interval_of_no_width() -> None:
    samples = bootstrap_means(np.full((1, 3, 20), 2.5))
    assert samples.shape == (significance.DRAWS, 1)
    assert percentile_interval(samples[:, 0]) == Interval(2.5, 2.5)


def test_the_interval_of_a_mean_agrees_with_theory() -> None:
    values = np.random.default_rng(0).normal(1.0, 2.0, size=400)
    interval = percentile_interval(bootstrap_means(values[None, None])[:, 0])
    half = 1.96 * values.std() / math.sqrt(400)
    assert interval.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_seeds_add_to_the_width() -> None:
    clients = np.linspace(0, 1, 50)
    alike = np.stack([clients, clients, clients])[None]
    apart = np.stack([clients - 1, clients, clients + 1])[None]
    narrow, wide = (percentile_interval(bootstrap_means(values)[:, 0]) for values in (alike, apart))
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


def test_methods_share_their_resamples() -> None:
    values = np.random.default_rng(0).normal(size=(2, 30))
    samples = bootstrap_means(np.stack([values, values + 1.0]))
    assert np.ptp(samples[:, 1] - samples[:, 0]) < 1e-12


def test_several_sets_are_resampled_alike_each_with_its_own_clients() -> None:
    first, second = np.random.default_rng(0).normal(size=(2, 2, 1, 12))
    second[1, 0, 3] = np.nan  # counts in the first set alone
    found = bootstrap_together([first, second], draws=50)
    drawn = generator("bootstrap", 12, 1, 0).integers(0, 12, size=(50, 12))
    with_all = [[np.mean(row[0, some]) for row in first] for some in drawn]
    without = [[np.mean(row[0, some[some != 3]]) for row in second] for some in drawn]
    np.testing.assert_allclose(found[0], with_all, atol=1e-12)
    np.testing.assert_allclose(found[1], without, atol=1e-12)
    assert bootstrap_together([]) == []


def test_clients_that_a_seed_lacks_do_not_count() -> None:
    values = np.array([[[1.0, 1.0, np.nan], [1.0, np.nan, 1.0]]])
    kept = bootstrap_means(values)
    assert np.nanmin(kept) == np.nanmax(kept) == 1.0


def test_many_clients_are_resampled_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(1, 2, 40))
    whole = percentile_interval(bootstrap_means(values)[:, 0])
    monkeypatch.setattr(significance, "_CHUNK", 4_000)
    chunked = percentile_interval(bootstrap_means(values)[:, 0])
    assert chunked.low == pytest.approx(whole.low, abs=0.03)
    assert chunked.high == pytest.approx(whole.high, abs=0.03)


@settings(max_examples=15, deadline=None)
@given(st.floats(-5, 5), st.floats(0.1, 5))
def test_intervals_move_with_the_data(shift: float, scale: float) -> None:
    values = np.random.default_rng(1).normal(size=(1, 2, 25))
    plain = percentile_interval(bootstrap_means(values, draws=500)[:, 0])
    moved = percentile_interval(bootstrap_means(scale * values + shift, draws=500)[:, 0])
    assert moved.low == pytest.approx(scale * plain.low + shift, abs=1e-9)
    assert moved.high == pytest.approx(scale * plain.high + shift, abs=1e-9)


def test_fewer_draws_for_very_many_clients() -> None:
    draws = [significance.draws_for(clients) for clients in (1, 20_000, 100_000, 10**7)]
    assert draws == [10_000, 10_000, 2_000, 1_000]


def test_the_same_call_gives_the_same_draws() -> None:
    values = np.random.default_rng(0).normal(size=(1, 2, 25))
    assert np.array_equal(bootstrap_means(values), bootstrap_means(values))


def test_sides_of_zero() -> None:
    assert [Interval(1, 2).side, Interval(-2, -1).side, Interval(-1, 1).side, Interval(0, 1).side] == [1, -1, 0, 0]
    assert Interval(math.nan, math.nan).side == 0


def test_relative_change() -> None:
    assert relative_change(-1.0, 4.0) == -25.0
    assert relative_change(1.0, -4.0) == 25.0
    assert math.isnan(relative_change(1.0, 0.0))


def test_spearman() -> None:
    assert spearman(np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 4.0, 8.0, 16.0]))[0] == pytest.approx(1.0)
    assert math.isnan(spearman(np.ones(4), np.arange(4.0))[0])


def test_clients_that_do_not_change_are_ranked_and_then_dropped() -> None:
    """Pratt (1959) by hand: the zero takes rank 1, so that the seven others have ranks 2 to 8 and W- = 8.

    Of the 2^7 sign patterns, 14 have a sum of 8 or less on the one side: none, one of 2 to 8, or 2+3, 2+4, 2+5, 2+6,
    3+4, 3+5. As many have it on the other side.
    """
    assert wilcoxon(np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -7.0])) == pytest.approx(28 / 128)
