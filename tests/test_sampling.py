"""Who is drawn: sizes, fairness, availability, and a cost that does not grow with the population."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bespoke.data.population import Population
from bespoke.data.splits import Part, Train, everything
from bespoke.federation.cohorts import Sampler, _normal
from bespoke.randomness import mix

EXAMPLES = (1, 2, 3, 4, 5, 10, 20, 5)


def clients(sizes: tuple[int, ...] | list[int]) -> Train:
    names = [f"{i:04d}" for i in range(len(sizes))]
    rows = np.zeros(sum(sizes), dtype=np.float32)
    return everything(Population.build({"x": rows, "y": rows}, np.repeat(names, sizes)))


def sampler(total: int, size: int, sampling: Any = "uniform", **options: Any) -> Sampler:
    return Sampler(clients([1] * total), 0, size, sampling, **options)


@pytest.mark.parametrize("sampling", ["uniform", "round-robin", "importance"])
@given(total=st.integers(1, 30), size=st.integers(1, 40), number=st.integers(1, 50), seed=st.integers(0, 99))
def test_cohorts_have_their_size_and_no_duplicates(
    sampling: Any, total: int, size: int, number: int, seed: int
) -> None:
    draw = Sampler(clients([1 + i % 3 for i in range(total)]), seed, size, sampling).draw(number)
    assert len(set(draw.contacted.tolist())) == len(draw.contacted)
    assert (np.diff(draw.contacted) > 0).all()  # in order of position: a cohort has no order of its own
    assert set(draw.contacted.tolist()) <= set(range(total))
    assert np.array_equal(draw.contacted, draw.reported)
    # a round-robin cohort that goes over the end of a lap may meet somebody twice, and then is smaller
    if sampling != "round-robin" or total % size == 0:
        assert len(draw.contacted) == min(size, total)


def test_a_draw_is_a_function_of_seed_and_round() -> None:
    for sampling in ("uniform", "poisson", "round-robin", "importance"):
        first, again = sampler(50, 10, sampling), sampler(50, 10, sampling)
        forwards = [first.draw(n).contacted.tolist() for n in range(1, 6)]
        backwards = [again.draw(n).contacted.tolist() for n in range(5, 0, -1)]
        assert forwards == backwards[::-1]
        assert len({tuple(cohort) for cohort in forwards}) == 5
        other = Sampler(first.train, 1, 10, sampling)  # type: ignore[arg-type]
        assert other.draw(1).contacted.tolist() != forwards[0]


def test_only_training_clients_are_drawn() -> None:
    train = clients([1] * 20)
    odd = Train(train.population, np.arange(1, 20, 2), Part(0, (1.0,)))
    for sampling in ("uniform", "poisson", "round-robin", "importance", "full"):
        drawn = Sampler(odd, 0, 4, sampling).draw(1).contacted  # type: ignore[arg-type]
        assert (drawn % 2 == 1).all()


def test_uniform_is_uniform() -> None:
    draws = sampler(20, 5)
    counts = np.bincount(np.concatenate([draws.draw(n).contacted for n in range(1, 4001)]), minlength=20)
    # 1000 expected; without replacement the cells vary less than a multinomial's, so the test is on the safe side
    assert stats.chisquare(counts).pvalue > 1e-3


def test_full_and_cohorts_beyond_everyone() -> None:
    assert sampler(7, 2, "full").draw(3).contacted.tolist() == list(range(7))
    assert sampler(7, 100).draw(3).contacted.tolist() == list(range(7))


@pytest.mark.parametrize(("total", "size"), [(12, 3), (12, 4), (10, 3), (7, 5)])
def test_round_robin_sees_everyone_once_before_anyone_twice(total: int, size: int) -> None:
    """From the first round of a run, which is round 1."""
    draws = sampler(total, size, "round-robin")
    whole = total // size  # rounds that lie within the first lap
    seen = np.concatenate([draws.draw(n).contacted for n in range(1, whole + 1)]).tolist()
    assert len(seen) == len(set(seen)) == whole * size
    after = np.concatenate([draws.draw(n).contacted for n in range(1, -(-total // size) + 1)])
    assert set(after.tolist()) == set(range(total))


def test_round_robin_laps_differ() -> None:
    draws = sampler(12, 4, "round-robin")
    laps = [[tuple(draws.draw(n).contacted) for n in range(first, first + 3)] for first in (1, 4, 7)]
    assert all(sorted(c for cohort in lap for c in cohort) == list(range(12)) for lap in laps)
    assert laps[0] != laps[1] != laps[2]


def test_importance_is_proportional_to_examples() -> None:
    draws = Sampler(clients(EXAMPLES), 0, 1, "importance")
    counts = np.bincount([int(draws.draw(n).contacted[0]) for n in range(1, 5001)], minlength=8)
    expected = 5000 * np.array(EXAMPLES) / sum(EXAMPLES)
    assert stats.chisquare(counts, expected).pvalue > 1e-3


@pytest.mark.parametrize(("sizes", "wanted"), [((1, 2, 5), 2), ((1, 2, 5, 4, 4), 2)])
def test_importance_without_replacement_is_one_draw_after_the_other(sizes: tuple[int, ...], wanted: int) -> None:
    """P(i, then j) = n_i / N * n_j / (N - n_i), however many of all are drawn.

    Of sizes 1, 2 and 5 the pair without the largest comes with 1/8 * 2/7 + 2/8 * 1/6 = 13/168, a uniform pair with 1/3.
    """
    draws, total = Sampler(clients(sizes), 0, wanted, "importance"), sum(sizes)
    pairs = [tuple(draws.draw(n).contacted.tolist()) for n in range(1, 6001)]
    expected = {
        (i, j): sizes[i] * sizes[j] / total * (1 / (total - sizes[i]) + 1 / (total - sizes[j]))
        for i in range(len(sizes)) for j in range(i + 1, len(sizes))
    }  # fmt: skip
    assert expected[0, 1] == pytest.approx(13 / 168 if total == 8 else 1 / 16 * 2 / 15 + 2 / 16 * 1 / 14)
    observed = [pairs.count(pair) for pair in expected]
    assert stats.chisquare(observed, [6000 * p for p in expected.values()]).pvalue > 1e-3


def test_poisson_has_a_binomials_mean_and_variance() -> None:
    draws = sampler(40, 10, "poisson")
    cohorts = [draws.draw(n).contacted for n in range(1, 3001)]
    sizes = np.array([len(cohort) for cohort in cohorts])
    assert sizes.mean() == pytest.approx(10, abs=0.2)  # standard error 0.05
    assert sizes.var() == pytest.approx(40 * 0.25 * 0.75, rel=0.1)
    assert stats.chisquare(np.bincount(np.concatenate(cohorts), minlength=40)).pvalue > 1e-3
    assert sampler(5, 10, "poisson").draw(1).contacted.tolist() == list(range(5))  # a probability is at most one


def test_nobody_of_a_poisson_cohort_is_sent_home() -> None:
    """Cohorts of ten on average: those with more than ten keep everyone, unless more are asked than are to be kept."""
    drawn = [sampler(40, 10, "poisson").draw(n) for n in range(1, 51)]
    assert max(len(draw.contacted) for draw in drawn) > 10
    assert all(np.array_equal(draw.contacted, draw.reported) for draw in drawn)


def test_dropout_silences_a_fraction_each_time_anew() -> None:
    draws = sampler(1000, 1000, dropout=0.3)
    first, second = draws.draw(1), draws.draw(2)
    assert len(first.contacted) == 1000
    assert len(first.reported) == pytest.approx(700, abs=60)  # four standard deviations
    assert set(first.reported.tolist()) <= set(first.contacted.tolist())
    assert first.reported.tolist() != second.reported.tolist()


def test_over_select_contacts_more_and_keeps_size() -> None:
    draws = sampler(1000, 100, over_select=1.3)
    for number in (1, 2):
        draw = draws.draw(number)
        assert len(draw.contacted) == 130
        assert len(draw.reported) == 100
        assert set(draw.reported.tolist()) <= set(draw.contacted.tolist())
    assert len(sampler(1000, 100, over_select=1.1).draw(1).contacted) == 110  # 100 x 1.1 is a little above 110
    few = sampler(1000, 100, over_select=1.3, dropout=0.5).draw(1)  # not enough answer: take those who do
    assert 40 < len(few.reported) < 90


def test_stragglers_are_the_slow_ones() -> None:
    """With equal speeds those with most examples are late; with unequal ones the same clients are late ever again."""
    sizes = [1] * 50 + [100] * 10
    nearly_equal = Sampler(clients(sizes), 0, 50, over_select=1.2, straggle=1e-6).draw(1)
    assert nearly_equal.reported.tolist() == list(range(50))
    uneven = sampler(60, 50, over_select=1.2, straggle=2.0)
    late = [set(range(60)) - set(uneven.draw(n).reported.tolist()) for n in range(1, 201)]
    counts = np.bincount([c for missing in late for c in missing], minlength=60)
    # half of a client's delay is its own, for ever: by chance alone counts would vary with a deviation of 5.3
    assert counts.std() > 25
    without = sampler(60, 50, over_select=1.2)
    late = [set(range(60)) - set(without.draw(n).reported.tolist()) for n in range(1, 201)]
    assert np.bincount([c for missing in late for c in missing], minlength=60).std() < 10


def test_a_group_draws_among_its_own_and_unknown_groups_draw_nobody() -> None:
    """Clients 0 and 3 have no known group, nobody is in group 2: cohorts of one of two, and of two of three."""
    both = sampler(7, 2).by_group(np.array([0, 1, 1, 0, 3, 3, 3]))
    assert {number: one.clients.tolist() for number, one in both.groups.items()} == {1: [1, 2], 3: [4, 5, 6]}
    for number in range(1, 20):
        drawn = both.draw(number).contacted.tolist()
        assert drawn[:2] == [1, 2]
        assert len(drawn) == 4
        assert set(drawn[2:]) < {4, 5, 6}
    many = 1 + np.arange(900) * 7 % 3  # members stay in order, however many: draws are by their place
    for number, one in sampler(900, 2).by_group(many).groups.items():
        assert np.array_equal(one.clients, np.flatnonzero(many == number))


def test_speeds_are_standard_normal() -> None:
    drawn = _normal("speed", 3, mix("key", np.arange(20_000, dtype=np.uint64)))
    assert stats.kstest(drawn, "norm").pvalue > 1e-3


class Counted(np.ndarray):
    """An array that counts how many of its elements are read by indexing, and refuses to be read as a whole."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        found = np.asarray(self)[index]
        Counted.read += int(np.size(found))
        return found

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the whole population was read")


@pytest.mark.parametrize("sampling", ["uniform", "poisson", "round-robin"])
def test_the_cost_of_a_draw_does_not_depend_on_the_population(sampling: Any) -> None:
    """A million clients whose offsets, keys and positions are counted when read: a cohort of 10 reads tens of them."""
    total = 1_000_000
    keys = mix("key", np.arange(total, dtype=np.uint64))
    offsets = np.arange(total + 1)
    population = Population({}, offsets.view(Counted), ["x"] * total, keys.view(Counted))
    train = Train(population, np.arange(total).view(Counted), Part(0, (1.0,)))
    Counted.read = 0
    draw = Sampler(train, 0, 10, sampling, dropout=0.1, over_select=1.5, straggle=1.0).draw(3)
    assert 0 < len(draw.reported) <= 10
    assert Counted.read < 500


def test_secret_cohorts_of_groups_use_every_bit_of_their_key() -> None:
    """Of 400 keys each of 64 bits is set for some group's sampler and not for others: 31 would be soon searched."""
    groups = np.array([1, 1, 1, 1, 2, 2, 2, 2])
    both, either = ~0, 0
    for key in range(1, 401):
        for sampler in Sampler(clients([1] * 8), key << 40, 2, secret=True).by_group(groups).groups.values():
            both, either = both & sampler.seed, either | sampler.seed
    assert (both, either) == (0, 2**64 - 1)


def test_public_cohorts_of_groups_are_those_of_published_results() -> None:
    """Drawn by the release that the numbers in docs/results.md were made with."""
    both = Sampler(clients([1] * 8), 3, 2).by_group(np.array([1, 1, 1, 1, 2, 2, 2, 2]))
    assert [both.draw(number).contacted.tolist() for number in (1, 2, 3)] == [[1, 3, 6, 7], [0, 2, 6, 7], [1, 2, 6, 7]]
