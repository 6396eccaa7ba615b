"""Computes (epsilon, delta) of rounds of noise. dp-accounting is the only source of the numbers.

There are three kinds of participation:

- `poisson`: each client takes part in a round independently with probability q, in secret. Neighbours differ in one
  client, present or absent. Sampling amplifies privacy. By PLD (tight) or RDP.
- `fixed`: a fixed number of clients is drawn without replacement, in secret. Neighbours differ in one client's data, so
  a sum may move by twice the bound, and the noise multiplier counts half. By RDP (Wang, Balle and Kasiviswanathan
  2019). There are no PLDs, because those of this sampling do not follow from those of Poisson sampling (Lebeda et al.
  2024).
- `known`: participation is not secret (all clients, in turns, or local noise only). Neighbours differ in one client's
  messages, its own or zeros. There is no amplification. Gaussian noise composes exactly: mu^2 is the sum of 1 / z^2
  over the rounds of the client with the most rounds.

mu of Gaussian differential privacy (Dong, Roth and Su 2019) is exact for `known`, and by the central limit theorem for
the others: an approximation for many rounds, which may be too small for few.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import UserError, needs_extra
from bespoke.records import SpentRecord

Participation = Literal["poisson", "fixed", "known"]
ACCOUNTANTS = ("pld", "rdp")
GRID = 1e-3  # of privacy losses; a coarser grid gives a looser bound, never a wrong one
LITTLE = 0.1  # below this noise the grid grows with the losses; else it would have millions of points
ORDERS = (
    1.25,
    1.5,
    1.75,
    *range(2, 33),
    40,
    48,
    64,
    128,
)  # for sampling without replacement, where each order takes long
ADJACENCY = {
    "poisson": "a client is there or not (add or remove one)",
    "fixed": "a client's data are others (replace one)",
    "known": "a client's messages are its own or zeros (zero out one)",
}


def library() -> Any:
    """dp-accounting, or an error that names the extra."""
    try:
        import dp_accounting
    except ImportError:
        raise needs_extra("dp-accounting", "privacy", "accounting for [privacy]") from None
    return dp_accounting


@contextmanager
def _quietly() -> Iterator[None]:
    """Silences dp-accounting's warnings about skipped orders; the bound from the others is valid."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@dataclass(frozen=True)
class Spent:
    """What was spent. For `poisson` and `fixed`: rounds by sampling rate and noise multiplier; for `known`: mu^2.

    `releases` use all clients at once (see privacy/release.py), by name: the noise multiplier, and the delta of a
    threshold. Runs that share a release count it once.
    """

    kind: Participation = "known"
    rounds: dict[tuple[float, float], int] = field(default_factory=dict)
    squared_mu: float = 0.0
    why: tuple[str, ...] = ()  # reasons why it is infinite
    releases: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __add__(self, other: Spent) -> Spent:
        """Composition of two costs for the same clients."""
        why, releases = tuple(dict.fromkeys(self.why + other.why)), {**self.releases, **other.releases}
        empty, more = (self, other) if not self.trains else (other, self)
        if not empty.trains:
            return replace(more, why=why, releases=releases)
        if "known" in (self.kind, other.kind) and self.kind != other.kind:
            # an absent sampled client counts as zeros; a replaced one moves a known sum by twice the bound
            known, sampled = (self, other) if self.kind == "known" else (other, self)
            return replace(known._sampled_always(sampled.kind) + sampled, why=why, releases=releases)
        if self.kind != other.kind:
            raise ValueError(f"cannot compose {self.kind} sampling with {other.kind}")
        rounds = {how: self.rounds.get(how, 0) + other.rounds.get(how, 0) for how in {**self.rounds, **other.rounds}}
        return replace(self, rounds=rounds, squared_mu=self.squared_mu + other.squared_mu, why=why, releases=releases)

    @property
    def trains(self) -> bool:
        return any(self.rounds.values()) or self.squared_mu > 0

    def _sampled_always(self, kind: Participation) -> Spent:
        """Known rounds as rounds of this kind with all clients."""
        return Spent(kind, {(1.0, self.squared_mu**-0.5): 1})

    @property
    def spends(self) -> bool:
        return self.trains or bool(self.releases)

    def _whole(self) -> tuple[Spent, float]:
        """The same with each release as a round of all clients, and the delta that thresholds have used."""
        noises, lost = [z for z, _ in self.releases.values()], sum(delta for _, delta in self.releases.values())
        rounds = dict(self.rounds)
        for z in noises if self.kind != "known" else ():
            rounds[1.0, z] = rounds.get((1.0, z), 0) + 1
        squared = self.squared_mu + sum(z**-2 for z in noises if self.kind == "known")
        return replace(self, rounds=rounds, squared_mu=squared, releases={}), lost

    def to_json(self) -> SpentRecord:
        return {
            "kind": self.kind, "rounds": [[rate, z, n] for (rate, z), n in self.rounds.items()],
            "squared_mu": self.squared_mu if math.isfinite(self.squared_mu) else None, "why": list(self.why),
            "releases": {name: list(cost) for name, cost in self.releases.items()},
        }  # fmt: skip

    @classmethod
    def from_json(cls, found: SpentRecord) -> Spent:
        squared = math.inf if found["squared_mu"] is None else found["squared_mu"]
        rounds = {(float(rate), float(z)): int(n) for rate, z, n in found["rounds"]}
        releases = {name: (float(z), float(delta)) for name, (z, delta) in found.get("releases", {}).items()}
        return cls(found["kind"], rounds, squared, tuple(found["why"]), releases)

    # -- epsilon -------------------------------------------------------------------------------------------------------
    def epsilon(self, delta: float, accountant: str = "pld") -> float:
        """The smallest epsilon that the accountants give for this delta."""
        if self.why:
            return math.inf
        if not self.spends:
            return 0.0
        if self.releases:
            whole, lost = self._whole()
            return whole.epsilon(delta - lost, accountant) if delta > lost else math.inf
        if self.kind == "known":
            return gaussian_epsilon(self.squared_mu, delta) if accountant == "pld" else self._rdp_epsilon(delta)
        if self._without_noise:
            return math.inf
        if self.kind == "poisson" and accountant == "pld":
            return _pld_epsilon(tuple(sorted(self.rounds.items())), delta)
        return self._rdp_epsilon(delta)

    @property
    def _without_noise(self) -> bool:
        return any(n and not z for (_, z), n in self.rounds.items())

    def by(self, accountant: str) -> str:
        """The accountant that gave `epsilon`; it is not always the requested one."""
        if self.kind == "known":
            return "the exact Gaussian mechanism" if accountant == "pld" else "RDP"
        return "PLD" if self.kind == "poisson" and accountant == "pld" else "RDP"

    def rdp(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Renyi orders and the divergence at each. Composition adds divergences."""
        if self.releases:
            return self._whole()[0].rdp()
        if self.kind == "known":
            orders = np.asarray(library().rdp.RdpAccountant().orders, dtype=np.float64)
            return orders, orders * self.squared_mu / 2
        parts = [(n, *_round_rdp(self.kind, rate, z)) for (rate, z), n in self.rounds.items() if n]
        return parts[0][1], np.sum([n * divergences for n, _, divergences in parts], axis=0)

    def _rdp_epsilon(self, delta: float) -> float:
        orders, divergences = self.rdp()
        with _quietly():
            return float(library().rdp.compute_epsilon(orders, divergences, delta)[0])

    def mu(self) -> tuple[float, bool]:
        """mu of Gaussian differential privacy, and whether it is exact (otherwise by the central limit theorem)."""
        if self.releases:
            return self._whole()[0].mu()
        if self.why or self._without_noise:
            return math.inf, True
        if self.kind == "known":
            return math.sqrt(self.squared_mu), True
        total = sum(n * _limit(self.kind, rate, z) ** 2 for (rate, z), n in self.rounds.items())
        return math.sqrt(total), False


def gaussian_epsilon(squared_mu: float, delta: float) -> float:
    """The exact epsilon of the Gaussian mechanism with sensitivity 1 and deviation 1 / mu (Balle and Wang 2018)."""
    if squared_mu == 0 or math.isinf(squared_mu):
        return squared_mu
    return float(library().get_epsilon_gaussian(squared_mu**-0.5, delta))


def largest_mu(epsilon: float, delta: float) -> float:
    """The mu that Gaussian noise may reach at this epsilon and delta: the inverse of `gaussian_epsilon`."""
    return 1 / float(library().get_sigma_gaussian(epsilon, delta))


@lru_cache(maxsize=256)
def _round_rdp(kind: Participation, rate: float, multiplier: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A round's Renyi divergences, cached because the accountant would compute them again for every number."""
    dp = library()
    relation = dp.NeighboringRelation
    with _quietly():
        if kind == "poisson":
            accountant = dp.rdp.RdpAccountant(neighboring_relation=relation.ADD_OR_REMOVE_ONE)
            accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)))
            return accountant.orders, accountant.rdp
        # a replaced client moves the sum by twice the bound
        noise, many = dp.GaussianDpEvent(multiplier / 2), 1_000_000_000
        accountant = dp.rdp.RdpAccountant(ORDERS, relation.REPLACE_ONE)
        accountant.compose(dp.SampledWithoutReplacementDpEvent(many, round(rate * many), noise))
        plain = dp.rdp.RdpAccountant(ORDERS, relation.REPLACE_ONE).compose(noise)
        # sampling never costs more than full participation, but its bound may be larger
        return accountant.orders, np.minimum(accountant.rdp, plain.rdp)


@lru_cache(maxsize=64)
def _round_pld(rate: float, multiplier: float, grid: float) -> Any:
    return library().pld.privacy_loss_distribution.from_gaussian_mechanism(
        multiplier, sampling_prob=rate, value_discretization_interval=grid
    )


@lru_cache(maxsize=4096)
def _pld_epsilon(rounds: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    composed: Any = None
    least = min(multiplier for (_, multiplier), count in rounds if count)
    grid = GRID * max(LITTLE / least, 1.0) ** 2  # losses grow with the square of 1 / noise
    for (rate, multiplier), count in rounds:
        if count:
            part = _round_pld(rate, multiplier, grid).self_compose(count)
            composed = part if composed is None else composed.compose(part)
    return float(composed.get_epsilon_for_delta(delta))


def _limit(kind: Participation, rate: float, multiplier: float) -> float:
    """mu of a round in the limit of many (Bu et al. 2020; without replacement: Dong, Roth and Su 2019, Corollary 4)."""
    from scipy.stats import norm

    if kind == "poisson":
        return rate * math.sqrt(math.expm1(min(multiplier**-2, 700.0)))
    base = 2 / multiplier
    inside = math.exp(min(base**2, 700.0)) * norm.cdf(1.5 * base) + 3 * norm.cdf(-0.5 * base) - 2
    return rate * math.sqrt(2 * inside)


def finite(value: float) -> float | None:
    """JSON has no infinity: null."""
    return float(value) if math.isfinite(value) else None


def calibrated(cost: Callable[[float], float], epsilon: float, what: str) -> float:
    """The smallest noise multiplier, to a tenth of a percent and never below, at which `cost` is within epsilon."""
    high = 1.0
    while cost(high) > epsilon:
        high *= 2
        if high > 1e6:
            raise UserError(f"{what}: epsilon = {epsilon:g} cannot be kept with any noise; it is too small")
    low = high / 2
    while low > 1e-3 and cost(low) <= epsilon:
        low, high = low / 2, low
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost(middle) <= epsilon else (middle, high)
    return high
