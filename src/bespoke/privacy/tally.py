"""Counts in which rounds each client takes part, and adds up the privacy spent: by client if known, else by round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bespoke.federation.cohorts import Sampler, SideBySide
from bespoke.method import Method
from bespoke.privacy.accountant import Participation, Spent
from bespoke.privacy.attempts import Made

if TYPE_CHECKING:
    from bespoke.privacy.account import Account

VIEWS = ("released", "messages")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StagePlan:
    """A stage as the privacy account sees it."""

    method: Method
    rounds: int
    cohorts: Sampler | SideBySide

    @property
    def rate(self) -> float:
        """Largest participation rate of any client. With groups this is a client of the smallest group."""
        if isinstance(self.cohorts, SideBySide):
            return max((_rate(sampler) for sampler in self.cohorts.groups.values()), default=1.0)
        return _rate(self.cohorts)


def _rate(sampler: Sampler) -> float:
    total = len(sampler.clients)
    return 1.0 if sampler.sampling == "full" else min(sampler.size / max(total, 1), 1.0)


def sampling_of(base: Sampler, plans: Sequence[StagePlan], local: bool) -> Participation:
    """The kind of participation (see bespoke.privacy.accountant). Full participation is `known`."""
    everyone = all(plan.rate >= 1 for plan in plans if plan.method.trains and plan.rounds)
    if local or base.over_select > 1 or everyone or base.sampling not in ("poisson", "uniform"):
        return "known"
    return "poisson" if base.sampling == "poisson" else "fixed"


def expected_size(cohorts: Sampler | SideBySide) -> float:
    """The publicly known number of clients that answer in a round."""
    if isinstance(cohorts, SideBySide):
        return max(sum(expected_size(sampler) for sampler in cohorts.groups.values()), 1.0)
    sampler = cohorts
    total = len(sampler.clients)
    asked = total if sampler.sampling == "full" else min(sampler.size * sampler.over_select, total)
    answers = asked * (1 - sampler.dropout)
    return max(min(answers, sampler.size) if sampler.over_select > 1 else answers, 1.0)


def _as_one(made: Sequence[Made]) -> tuple[float, float]:
    """A round that was made several times with one cohort: its rate, and one noise level that reveals as much."""
    first = made[0].noise or 0.0
    squared = sum((first / how.noise) ** 2 if how.noise else math.inf for how in made)
    return max(how.rate for how in made), first / math.sqrt(squared)


class Tally:
    """Adds up rounds, each once, in order. If participants are known, it adds mu^2 by client, for both views."""

    def __init__(self, account: Account, squared: Floats | None) -> None:
        self.account, self.squared = account, squared
        self.rounds: Counter[tuple[float, float]] = Counter()
        self.seen: dict[int, int] = {}  # by stage: the rounds added so far
        self.sent = False

    def copy(self) -> Tally:
        other = Tally(self.account, None if self.squared is None else self.squared.copy())
        other.rounds, other.seen, other.sent = self.rounds.copy(), dict(self.seen), self.sent
        return other

    def advance(self, place: int, number: int) -> None:
        account, plan = self.account, self.account.plans[place]
        begin = self.seen.get(place, 0)
        self.seen[place] = max(begin, number)
        if not plan.method.trains:
            return
        parts: dict[tuple[str, Made], float] = {}  # mu^2 of a message

        def squared_mu(view: str, made: Made) -> float:
            if (view, made) not in parts:
                parts[view, made] = account.squared_mu(place, view, made)
            return parts[view, made]

        for current in range(begin + 1, number + 1):
            self.sent = True
            if self.squared is None:
                self.rounds[_as_one(account.made(place, current, "released"))] += 1
                continue
            came = plan.cohorts.draw(current).reported
            for row, view in enumerate(VIEWS):
                squared = sum(squared_mu(view, made) for made in account.made(place, current, view))
                if math.isfinite(squared):
                    self.squared[row, came] += squared

    def spent(self) -> list[Spent]:
        account, found = self.account, []
        for row, view in enumerate(VIEWS):
            stages = [place for place, number in self.seen.items() if number]
            reasons = [*account.general, *(reason for place in stages for reason in account.why(place, view))]
            why = tuple(dict.fromkeys([*account.learned.why(view), *(reasons if self.sent else [])]))
            before = account.learned.spent(account.kind)
            if self.squared is None and view == "released":
                found.append(before + Spent(account.kind, dict(self.rounds), why=why))
            else:
                squared = float(self.squared[row].max()) if self.squared is not None else 0.0
                found.append(before + Spent(squared_mu=squared, why=why))
        return found
