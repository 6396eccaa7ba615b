"""Accounting: against dp-accounting's own accountants, and the properties any bound has to have."""

from __future__ import annotations

import logging
import math
import sys

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bespoke.errors import UserError
from bespoke.privacy.accountant import Spent, calibrated, gaussian_epsilon, largest_mu, library

DELTA = 1e-5
RATES, NOISES, ROUNDS = (0.01, 0.05, 0.2), (0.8, 1.0, 1.5, 3.0), (1, 2, 7, 40, 300)
kinds = st.sampled_from(["poisson", "fixed", "known"])
rates, noises, rounds = (st.sampled_from(values) for values in (RATES, NOISES, ROUNDS))


def spent(kind: str, rate: float, noise: float, count: int) -> Spent:
    if kind == "known":
        return Spent(squared_mu=count / noise**2)
    return Spent(kind, {(rate, noise): count})  # type: ignore[arg-type]


# -- against the library itself ------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)


@pytest.mark.parametrize(("rate", "noise", "count"), [(0.01, 1.0, 100), (0.2, 1.5, 40)])
def test_poisson_is_the_library_s(rate: float, noise: float, count: int) -> None:
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    rdp = dp_accounting.rdp.RdpAccountant().compose(event, count).get_epsilon(DELTA)
    found = spent("poisson", rate, noise, count)
    assert found.epsilon(DELTA, "rdp") == pytest.approx(float(rdp), rel=1e-9)
    pld = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3).compose(event, count).get_epsilon(DELTA)
    assert found.epsilon(DELTA, "pld") == pytest.approx(pld, rel=1e-9)
    assert pld < rdp


def test_little_noise_is_accounted_for_on_a_coarser_grid() -> None:
    """Losses are larger, and so are the steps they are told in: the same as on the fine grid, to five digits."""
    fine = dp_accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
        0.05, sampling_prob=0.1, value_discretization_interval=1e-3
    )
    exact = fine.self_compose(20).get_epsilon_for_delta(DELTA)
    found = spent("poisson", 0.1, 0.05, 20).epsilon(DELTA)
    assert found == pytest.approx(exact, rel=1e-5)


def test_without_replacement_is_the_library_s_with_twice_the_sensitivity() -> None:
    """100 of 10,000, replace one: a client that is replaced moves the sum by two bounds."""
    event = dp_accounting.SampledWithoutReplacementDpEvent(10_000, 100, dp_accounting.GaussianDpEvent(1.5 / 2))
    accountant = dp_accounting.rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE, orders=range(2, 33)
    )
    theirs = float(accountant.compose(event, 50).get_epsilon(DELTA))
    ours = Spent("fixed", {(0.01, 1.5): 50})
    assert ours.epsilon(DELTA) == pytest.approx(theirs, rel=1e-6)
    assert ours.by("pld") == "RDP"  # asked for PLD, of which there is none
    assert ours.epsilon(DELTA) > spent("poisson", 0.01, 1.5, 50).epsilon(DELTA, "rdp")


def test_known_cohorts_are_the_gaussian_mechanism() -> None:
    """z = 2, four rounds: the same as z = 1 once. Exact (Balle and Wang), below RDP's bound."""
    found = spent("known", 1.0, 2.0, 4)
    event = dp_accounting.GaussianDpEvent(2.0)
    assert found.epsilon(DELTA) == pytest.approx(dp_accounting.get_epsilon_gaussian(1.0, DELTA), rel=1e-9)
    rdp = dp_accounting.rdp.RdpAccountant().compose(event, 4).get_epsilon(DELTA)
    assert found.epsilon(DELTA, "rdp") == pytest.approx(float(rdp), rel=1e-9)
    assert found.epsilon(DELTA) < rdp
    assert found.mu() == (1.0, True)
    assert largest_mu(found.epsilon(DELTA), DELTA) == pytest.approx(1.0, rel=1e-6)


def test_mu_by_hand() -> None:
    """Poisson: q sqrt(T (e^(1/z^2) - 1)); its epsilon by duality is close to PLD's for many rounds."""
    found = Spent("poisson", {(0.01, 1.0): 1000})
    mu, exact = found.mu()
    assert not exact
    assert mu == pytest.approx(0.01 * math.sqrt(1000 * (math.e - 1)))
    assert gaussian_epsilon(mu**2, DELTA) == pytest.approx(found.epsilon(DELTA), rel=0.15)
    fixed, _ = Spent("fixed", {(0.01, 2.0): 1000}).mu()
    assert fixed > mu / 10


@pytest.mark.parametrize("noise", [0.8, 2.0, 5.0])
def test_mu_of_fixed_cohorts_is_the_limit_s_integral(noise: float) -> None:
    """mu^2 = T q^2 2 E[(e^(m x - m^2/2) - 1)^2; x > m/2], x standard normal, m = 2 / z: Dong, Roth and Su, Section 5.

    m is twice 1 / z because replacing a client moves a sum by two bounds. For z = 2, m = 1 and tables of the normal
    distribution: 2 (2.71828 * 0.93319 + 3 * 0.30854 - 2) = 2.92459.
    """
    m, (rate, count) = 2 / noise, (0.01, 1000)
    grid = np.linspace(m / 2, m / 2 + 12 + 2 * m, 400_001)
    density = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
    integral = float(np.trapezoid((np.exp(m * grid - m * m / 2) - 1) ** 2 * density, grid))
    mu, exact = Spent("fixed", {(rate, noise): count}).mu()
    assert not exact
    assert mu**2 == pytest.approx(count * rate**2 * 2 * integral, rel=1e-5)
    if noise == 2.0:
        assert mu**2 == pytest.approx(0.1 * 2.92459, rel=1e-5)


# -- properties ----------------------------------------------------------------------------------------------------
@settings(max_examples=60)
@given(kinds, rates, noises, rounds, rounds)
def test_more_rounds_never_cost_less(kind: str, rate: float, noise: float, first: int, second: int) -> None:
    few, many = sorted((first, second))
    assert spent(kind, rate, noise, few).epsilon(DELTA, "rdp") <= spent(kind, rate, noise, many).epsilon(DELTA, "rdp")
    assert spent(kind, rate, noise, few).mu()[0] <= spent(kind, rate, noise, many).mu()[0]


@settings(max_examples=60)
@given(kinds, rates, noises, noises, rounds)
def test_more_noise_never_costs_more(kind: str, rate: float, first: float, second: float, count: int) -> None:
    little, much = sorted((first, second))
    assert spent(kind, rate, much, count).epsilon(DELTA, "rdp") <= spent(kind, rate, little, count).epsilon(
        DELTA, "rdp"
    )


@settings(max_examples=60)
@given(st.sampled_from(["poisson", "fixed"]), rates, rates, noises, rounds)
def test_coming_more_often_never_costs_less(kind: str, first: float, second: float, noise: float, count: int) -> None:
    rare, often = sorted((first, second))
    assert spent(kind, rare, noise, count).epsilon(DELTA, "rdp") <= spent(kind, often, noise, count).epsilon(
        DELTA, "rdp"
    )
    # and never more than coming to every round, by the same neighbours
    every = Spent(squared_mu=count / (noise if kind == "poisson" else noise / 2) ** 2)
    assert spent(kind, often, noise, count).epsilon(DELTA, "rdp") <= every.epsilon(DELTA, "rdp") * 1.02 + 1e-9


@settings(max_examples=60)
@given(kinds, rates, noises, noises, rounds, rounds)
def test_composing_adds_renyi_divergences(
    kind: str, rate: float, first: float, second: float, few: int, many: int
) -> None:
    one, other = spent(kind, rate, first, few), spent(kind, rate, second, many)
    both = one + other
    np.testing.assert_allclose(both.rdp()[1], one.rdp()[1] + other.rdp()[1], rtol=1e-9)
    assert both.epsilon(DELTA, "rdp") >= max(one.epsilon(DELTA, "rdp"), other.epsilon(DELTA, "rdp"))
    assert (other + one).epsilon(DELTA, "rdp") == pytest.approx(both.epsilon(DELTA, "rdp"))
    # once many is many times once
    again = spent(kind, rate, first, 1)
    assert sum((again for _ in range(few - 1)), again).epsilon(DELTA, "rdp") == pytest.approx(
        one.epsilon(DELTA, "rdp"), rel=1e-9
    )


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_rates_that_differ_compose_as_the_library_composes_them(accountant: str) -> None:
    """30 rounds of a hundredth of all, then 10 of half of a group: what a client of that group spends."""
    found = spent("poisson", 0.01, 1.0, 30) + spent("poisson", 0.5, 2.0, 10)
    assert found.rounds == {(0.01, 1.0): 30, (0.5, 2.0): 10}
    theirs = (
        dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
        if accountant == "pld"
        else dp_accounting.rdp.RdpAccountant()
    )
    for rate, noise, count in ((0.01, 1.0, 30), (0.5, 2.0, 10)):
        theirs.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), count)
    assert found.epsilon(DELTA, accountant) == pytest.approx(float(theirs.get_epsilon(DELTA)), rel=1e-6)
    assert found.mu()[0] ** 2 == pytest.approx(
        spent("poisson", 0.01, 1.0, 30).mu()[0] ** 2 + spent("poisson", 0.5, 2.0, 10).mu()[0] ** 2
    )


@settings(max_examples=12)
@given(rates, noises, st.sampled_from((1, 10, 100)))
def test_pld_is_tighter_than_rdp_and_grows_with_rounds(rate: float, noise: float, count: int) -> None:
    found = spent("poisson", rate, noise, count)
    assert 0 < found.epsilon(DELTA, "pld") <= found.epsilon(DELTA, "rdp")
    assert found.epsilon(DELTA, "pld") <= spent("poisson", rate, noise, 2 * count).epsilon(DELTA, "pld")


@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_sampled_rounds_compose_with_known_ones(kind: str) -> None:
    """mu^2 = 1/4 is one round of noise 2 that everyone comes to: by the library's accountants, in either order."""
    some, known = Spent(kind, {(0.1, 1.5): 20}), Spent(squared_mu=0.25)  # type: ignore[arg-type]
    relation, noise = dp_accounting.NeighboringRelation, dp_accounting.GaussianDpEvent
    if kind == "poisson":
        theirs = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
        theirs.compose(dp_accounting.PoissonSampledDpEvent(0.1, noise(1.5)), 20).compose(noise(2.0))
    else:  # who is replaced moves a sum by two bounds
        orders = (1.25, 1.5, 1.75, *range(2, 33), 40, 48, 64, 128)
        theirs = dp_accounting.rdp.RdpAccountant(orders, relation.REPLACE_ONE)
        theirs.compose(dp_accounting.SampledWithoutReplacementDpEvent(10_000, 1_000, noise(0.75)), 20)
        theirs.compose(noise(1.0))
    assert (some + known).epsilon(DELTA) == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-6)
    assert (known + some).epsilon(DELTA) == (some + known).epsilon(DELTA)
    assert (some + Spent(squared_mu=math.inf)).epsilon(DELTA) == math.inf
    assert (Spent(squared_mu=0.25, why=("a reason",)) + some).why == ("a reason",)


def test_infinite_nothing_and_what_cannot_be_composed() -> None:
    reason = Spent("poisson", {(0.1, 1.0): 3}, why=("a reason",))
    assert reason.epsilon(DELTA) == math.inf
    assert (Spent() + reason).why == ("a reason",)
    assert Spent().epsilon(DELTA) == 0.0
    assert Spent("poisson", {(0.1, 0.0): 1}).epsilon(DELTA) == math.inf
    assert Spent.from_json(reason.to_json()) == reason
    assert Spent.from_json(Spent(squared_mu=math.inf).to_json()).squared_mu == math.inf
    with pytest.raises(ValueError, match="cannot compose"):
        Spent("poisson", {(0.1, 1.0): 3}) + Spent("fixed", {(0.1, 1.0): 3})


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 30.0])
def test_calibration_keeps_the_budget_and_wastes_little(epsilon: float) -> None:
    def cost(noise: float) -> float:
        return Spent("poisson", {(0.05, noise): 50}).epsilon(DELTA, "rdp")

    found = calibrated(cost, epsilon, "noise")
    assert cost(found) <= epsilon < cost(found / 1.002)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r"bespoke-fl\[privacy\]"):
        library()
