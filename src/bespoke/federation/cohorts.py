"""Draws the cohort of each round, and simulates which of its clients answer.

A draw is a function of (seed, round); its cost does not depend on the size of the population.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.data.splits import Train
from bespoke.errors import UserError
from bespoke.randomness import generator, mix, permuted, uniform
from bespoke.registry import Registry

Ints = NDArray[np.int64]


def _checked(found: Any, where: str) -> Callable[..., Any]:
    if not callable(found) or isinstance(found, type):
        raise UserError(
            f"{where} samples no clients: it has to be a function of (random, round, wanted, sizes), and is {found!r}"
        )
    function: Callable[..., Any] = found
    return function


# Those built in share their draws: see `Sampler`. One of somebody else is a function of a random generator keyed by
# (seed, round), the round, how many clients are wanted, and every client's number of examples; it returns places.
SAMPLERS: Registry[Any] = Registry(
    "sampling",
    "bespoke.samplers",
    dict.fromkeys(("uniform", "poisson", "round-robin", "importance", "full")),
    _checked,
)


@dataclass(frozen=True)
class Draw:
    """The clients contacted in a round, and those of them that reported in time."""

    contacted: Ints
    reported: Ints


@dataclass(frozen=True)
class Sampler:
    """Draws cohorts of about `size` clients.

    - uniform: without replacement; poisson: each client with probability size / N, independently (the tightest
      privacy accounting); round-robin: every client once, in random order, before any client twice; importance:
      proportional to the number of examples, without replacement; full: all clients.
    - dropout: the probability that a contacted client never answers. straggle: spread of the clients' speeds (standard
      deviation of the logarithm); over_select: contact this many times `size` clients and keep the first to report.
    """

    train: Train
    seed: int
    size: int
    sampling: str = "uniform"
    dropout: float = 0.0
    over_select: float = 1.0
    straggle: float = 0.0
    among: Ints | None = None  # only these clients
    secret: bool = False  # the seed is a key that nobody may guess

    @cached_property
    def clients(self) -> Ints:
        """The clients that may be drawn."""
        return self.train.clients if self.among is None else self.among

    @cached_property
    def _cumulative(self) -> Ints:
        return np.cumsum(self.train.sizes(self.clients))

    def by_group(self, groups: Ints) -> SideBySide:
        """Draws a separate cohort for each group in the same way; `groups`: each client's group, 0 if unknown."""
        mine = groups[self.train.clients]
        order = np.argsort(mine, kind="stable")
        members = np.split(self.train.clients[order], np.cumsum(np.bincount(mine))[:-1])
        bits = (1 << 64) - 1 if self.secret else 0x7FFFFFFF  # public cohorts stay those of published results
        return SideBySide(
            {
                number: replace(self, seed=int(mix("group", self.seed, number)) & bits, among=some)
                for number, some in enumerate(members)
                if number and len(some)
            }
        )

    def draw(self, round: int) -> Draw:
        everyone = self.clients
        wanted = min(int(np.ceil(self.size * self.over_select - 1e-9)), len(everyone))
        places = self._places(round, wanted, len(everyone))
        contacted = everyone[np.sort(places)]
        return Draw(contacted, self._reporting(round, contacted))

    def _places(self, round: int, wanted: int, total: int) -> Ints:
        ours = self.sampling in SAMPLERS.built_in
        if self.sampling == "full" or (wanted >= total and ours and self.sampling != "poisson"):
            return np.arange(total)
        random = generator("cohort", self.seed, round)
        if not ours:
            return self._by_others(random, round, wanted, total)
        if self.sampling == "poisson":
            wanted = int(random.binomial(total, min(self.size * self.over_select / total, 1.0)))
        if self.sampling == "round-robin":
            turn = np.arange((round - 1) * wanted, round * wanted)  # rounds count from one
            lap, place = np.divmod(turn, total)
            picked = [permuted(place[lap == n], total, "round-robin", self.seed, int(n)) for n in np.unique(lap)]
            return np.unique(np.concatenate(picked))
        if self.sampling == "importance":
            return self._by_examples(random, wanted)
        return random.choice(total, size=wanted, replace=False, shuffle=False)

    def _by_others(self, random: np.random.Generator, round: int, wanted: int, total: int) -> Ints:
        drawn = SAMPLERS.find(self.sampling, "cohort.sampling")(random, round, wanted, self.train.sizes(self.clients))
        places = np.asarray(drawn)
        whole = places.ndim == 1 and (places.dtype.kind in "iu" or not len(places))
        if not whole or len(np.unique(places)) < len(places) or not ((places >= 0) & (places < total)).all():
            raise UserError(
                f"the sampler {self.sampling} has to return different whole numbers from 0 to {total - 1}, the places "
                f"of clients; in round {round} it returned {places!r}"
            )
        return places.astype(np.int64)

    def _by_examples(self, random: np.random.Generator, wanted: int) -> Ints:
        if 2 * wanted > len(self._cumulative):  # rejection would take long: a weighted order of all
            examples = np.diff(self._cumulative, prepend=0)
            with np.errstate(divide="ignore"):
                order = np.argsort(random.standard_exponential(len(examples)) / examples, kind="stable")
            return order[:wanted]
        chosen: dict[int, None] = {}
        while len(chosen) < wanted:  # draw owners of random rows until enough different clients are found
            rows = random.integers(self._cumulative[-1], size=2 * wanted)
            for place in np.searchsorted(self._cumulative, rows, side="right"):
                if len(chosen) < wanted:
                    chosen.setdefault(int(place))
        return np.fromiter(chosen, dtype=np.int64)

    def _reporting(self, round: int, contacted: Ints) -> Ints:
        keys = self.train.population.keys[contacted]
        answered = contacted
        if self.dropout:
            answered = contacted[uniform("dropout", self.seed, round, keys) >= self.dropout]
        if self.over_select > 1 and len(answered) > self.size:
            if self.straggle:
                keys = self.train.population.keys[answered]
                # half of the variance is the client's own speed, half is drawn for the round
                slow = _normal("speed", self.seed, keys) + _normal("luck", self.seed, round, keys)
                time = self.train.sizes(answered).astype(np.float64) * np.exp(self.straggle * slow / 2**0.5)
            else:
                time = uniform("arrival", self.seed, round, self.train.population.keys[answered])
            answered = np.sort(answered[np.argsort(time, kind="stable")[: self.size]])
        return answered


@dataclass(frozen=True)
class SideBySide:
    """Cohorts of several groups of clients, drawn side by side."""

    groups: dict[int, Sampler]  # by the group's number

    def draw(self, round: int) -> Draw:
        drawn = [sampler.draw(round) for sampler in self.groups.values()]
        nobody = [np.zeros(0, np.int64)]
        contacted, reported = ([getattr(one, who) for one in drawn] or nobody for who in ("contacted", "reported"))
        return Draw(np.sort(np.concatenate(contacted)), np.sort(np.concatenate(reported)))


def _normal(*words: int | str | NDArray[np.uint64]) -> NDArray[np.float64]:
    """Standard normal numbers (Box-Muller on keyed uniforms)."""
    radius = np.sqrt(-2 * np.log1p(-uniform("radius", *words)))
    drawn: NDArray[np.float64] = radius * np.cos(2 * np.pi * uniform("angle", *words))
    return drawn
