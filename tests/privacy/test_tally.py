"""Who comes to which round, and what that adds up to, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bespoke.data.population import Population
from bespoke.data.splits import everything
from bespoke.federation.cohorts import Sampler, SideBySide
from bespoke.methods import FedAvg, FineTune
from bespoke.privacy.attempts import Made
from bespoke.privacy.release import NOTHING
from bespoke.privacy.tally import StagePlan, Tally, expected_size, sampling_of

NO_TASK: Any = None
AVERAGING, TUNING = FedAvg(NO_TASK), FineTune(NO_TASK)


def sampler(total: int, size: int, sampling: Any = "uniform", **options: Any) -> Sampler:
    rows = np.zeros(total, dtype=np.float32)
    owners = [f"{i:04d}" for i in range(total)]
    return Sampler(everything(Population.build({"x": rows, "y": rows}, owners)), 0, size, sampling, **options)


# -- how many answer ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "answers"),
    [
        ({}, 10.0),
        ({"dropout": 0.3}, 7.0),  # three of ten that are asked stay silent
        ({"sampling": "poisson", "dropout": 0.3}, 7.0),
        ({"sampling": "full"}, 40.0),
        ({"sampling": "full", "dropout": 0.25}, 30.0),
        ({"over_select": 1.5}, 10.0),  # fifteen are asked, the first ten are kept
        ({"over_select": 1.5, "dropout": 0.2}, 10.0),  # twelve answer, ten are kept
        ({"over_select": 1.5, "dropout": 0.6}, 6.0),  # six answer
        ({"over_select": 8.0, "dropout": 0.8}, 8.0),  # there are forty, not eighty, to be asked
        ({"dropout": 0.99}, 1.0),  # a tenth of a client: sums are divided by one at least
    ],
)
def test_expected_size(options: dict[str, Any], answers: float) -> None:
    assert expected_size(sampler(40, 10, **options)) == pytest.approx(answers)


def test_expected_size_is_what_comes_on_average() -> None:
    for options in ({"dropout": 0.3}, {"over_select": 1.5, "dropout": 0.6}, {"sampling": "poisson", "dropout": 0.3}):
        drawn = sampler(40, 10, **options)  # type: ignore[arg-type]
        counts = [len(drawn.draw(number).reported) for number in range(1, 2001)]
        assert expected_size(drawn) == pytest.approx(np.mean(counts), abs=0.25)  # standard error below 0.06


def test_expected_size_of_groups_is_the_sum_of_theirs() -> None:
    both = SideBySide({1: sampler(40, 10, dropout=0.3), 2: sampler(8, 10, dropout=0.5)})
    assert expected_size(both) == pytest.approx(7.0 + 4.0)
    assert expected_size(SideBySide({})) == 1.0


# -- how often clients come --------------------------------------------------------------------------------------------
def test_the_rate_is_that_of_the_smallest_group() -> None:
    assert StagePlan(AVERAGING, 3, sampler(40, 10)).rate == 0.25
    assert StagePlan(AVERAGING, 3, sampler(40, 10, "full")).rate == 1.0
    assert StagePlan(AVERAGING, 3, sampler(4, 10)).rate == 1.0
    assert StagePlan(AVERAGING, 3, SideBySide({1: sampler(40, 10), 2: sampler(20, 10)})).rate == 0.5
    assert StagePlan(AVERAGING, 3, SideBySide({})).rate == 1.0


def test_which_sampling_is_accounted_for() -> None:
    def kind(base: Sampler, *rates: float, local: bool = False) -> str:
        plans = [StagePlan(AVERAGING, 3, sampler(100, round(100 * rate))) for rate in rates]
        return sampling_of(base, [*plans, StagePlan(TUNING, 0, sampler(100, 10))], local)

    assert kind(sampler(40, 10, "poisson"), 0.25) == "poisson"
    assert kind(sampler(40, 10), 0.25) == "fixed"
    assert kind(sampler(40, 10), 0.25, 1.0) == "fixed"  # not everyone comes to the rounds of the first stage
    assert kind(sampler(40, 10), 1.0) == "known"
    assert kind(sampler(40, 10), 0.25, local=True) == "known"
    assert kind(sampler(40, 10, over_select=1.1), 0.25) == "known"
    assert kind(sampler(40, 10, "round-robin"), 0.25) == "known"


# -- rounds that are added up ------------------------------------------------------------------------------------------
def tally(known: bool, *plans: StagePlan, times: dict[tuple[int, int, str], int] | None = None) -> Tally:
    """Of an account with the noise 2: mu^2 of a message is 1/4 for the released models, 1/16 for messages."""
    account: Any = SimpleNamespace(
        plans=plans, settled={"noise": 2.0}, kind="fixed", general=[], learned=NOTHING,
        why=lambda place, view: [f"{place} {view}"],
        squared_mu=lambda place, view, made: 0.25 if view == "released" else 0.0625,
        made=lambda place, number, view: (
            [Made(2.0, None, plans[place].rate)] * (times or {}).get((place, number, view), 1)
        ),
    )  # fmt: skip
    return Tally(account, np.zeros((2, 3)) if known else None)


EVERYONE = StagePlan(AVERAGING, 9, sampler(3, 3, "full"))


def test_a_round_that_is_added_up_is_not_added_again() -> None:
    """Three rounds, told three times and once from before: each client came three times, mu^2 = 3/4. Then a fourth."""
    found = tally(True, EVERYONE)
    assert found.spent()[0].squared_mu == 0.0
    assert found.spent()[0].why == ()  # nothing was sent yet
    for number in (1, 3, 3, 2, 3):
        found.advance(0, number)
    assert [spent.squared_mu for spent in found.spent()] == [0.75, 0.1875]
    found.advance(0, 4)
    assert [spent.squared_mu for spent in found.spent()] == [1.0, 0.25]
    assert [spent.why for spent in found.spent()] == [("0 released",), ("0 messages",)]


def test_rounds_of_sampled_cohorts_are_counted_once() -> None:
    found = tally(False, StagePlan(AVERAGING, 9, sampler(40, 10)), StagePlan(AVERAGING, 9, sampler(20, 10)))
    for place, number in ((0, 2), (0, 2), (0, 1), (1, 1), (0, 5), (1, 1)):
        found.advance(place, number)
    released, messages = found.spent()
    assert released.rounds == {(0.25, 2.0): 5, (0.5, 2.0): 1}
    assert released.kind == "fixed"
    assert messages.squared_mu == 0.0


def test_a_round_that_was_made_twice_counts_twice() -> None:
    """Round 2 was made twice: mu^2 of two is twice mu^2, as if the noise 2 had been 2 / sqrt 2."""
    again = {(0, 2, view): 2 for view in ("released", "messages")}
    known = tally(True, EVERYONE, times=again)
    known.advance(0, 3)
    assert [spent.squared_mu for spent in known.spent()] == [1.0, 0.25]  # (1 + 2 + 1) / 4
    sampled = tally(False, StagePlan(AVERAGING, 9, sampler(40, 10)), times=again)
    sampled.advance(0, 3)
    assert sampled.spent()[0].rounds == pytest.approx({(0.25, 2.0): 2, (0.25, 2 / 2**0.5): 1})


def test_what_is_spent_is_that_of_the_client_who_came_most_often() -> None:
    """Two of three in turns: after four rounds somebody has come three times, nobody four."""
    found = tally(True, StagePlan(AVERAGING, 9, sampler(3, 2, "round-robin")))
    counts = np.zeros(3)
    for number in (1, 2, 3, 4):
        found.advance(0, number)
        counts[found.account.plans[0].cohorts.draw(number).reported] += 1
    assert found.spent()[0].squared_mu == counts.max() / 4


def test_a_stage_without_rounds_sends_nothing_and_copies_stand_alone() -> None:
    found = tally(True, StagePlan(TUNING, 0, sampler(3, 3, "full")), EVERYONE)
    found.advance(0, 4)
    assert found.spent()[0].squared_mu == 0.0
    assert found.spent()[0].why == ()
    other = found.copy()
    other.advance(1, 2)
    assert other.spent()[0].squared_mu == 0.5
    assert found.spent()[0].squared_mu == 0.0
    found.advance(1, 1)
    assert found.spent()[0].squared_mu == 0.25
