"""Who comes to which round, and what that adds up to: for each client where it is known, else by rounds."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bespoke.method import Method
from bespoke.privacy.accounting import Kind, Spent
from bespoke.sampling import Sampler

if TYPE_CHECKING:
    from bespoke.privacy.budget import Account

VIEWS = ("released", "messages")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """A stage as the account sees it."""

    method: Method
    rounds: int
    sampler: Sampler


def sampling_of(sampler: Sampler, local: bool) -> tuple[Kind, float]:
    """How clients come, and at which rate: see bespoke.privacy.accounting."""
    total = len(sampler.train.clients)
    rate = sampler.size / max(total, 1)
    if local or sampler.over_select > 1 or rate >= 1 or sampler.sampling not in ("poisson", "uniform"):
        return "known", 1.0
    return ("poisson", rate) if sampler.sampling == "poisson" else ("fixed", rate)


def expected_size(sampler: Sampler) -> float:
    """How many clients answer in a round, as far as the public can know."""
    total = len(sampler.train.clients)
    asked = total if sampler.sampling == "full" else min(sampler.size * sampler.over_select, total)
    answers = asked * (1 - sampler.dropout)
    return max(min(answers, sampler.size) if sampler.over_select > 1 else answers, 1.0)


class Tally:
    """Adds up rounds, each once, in order. Where it is known who came: mu^2 of every client, for both views."""

    def __init__(self, account: Account, squared: Floats | None) -> None:
        self.account, self.squared = account, squared
        self.rounds: Counter[float] = Counter()
        self.seen: dict[int, int] = {}  # rounds of each stage that are added up
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
        parts = [account._squared_mu(place, view) for view in VIEWS] if number > begin else []
        for current in range(begin + 1, number + 1):
            self.sent = True
            if self.squared is None:
                self.rounds[account.settled["noise"] / math.sqrt(account._times(place, current, "released"))] += 1
                continue
            came = plan.sampler.draw(current).reported
            for row, view in enumerate(VIEWS):
                if math.isfinite(parts[row]):
                    self.squared[row, came] += parts[row] * account._times(place, current, view)

    def spent(self) -> list[Spent]:
        account, found = self.account, []
        for row, view in enumerate(VIEWS):
            stages = [place for place, number in self.seen.items() if number]
            reasons = [*account.general, *(reason for place in stages for reason in account.why(place, view))]
            why = tuple(dict.fromkeys(reasons)) if self.sent else ()
            if self.squared is None and view == "released":
                found.append(Spent(account.kind, account.rate, dict(self.rounds), why=why))
            else:
                squared = float(self.squared[row].max()) if self.squared is not None else 0.0
                found.append(Spent(squared_mu=squared, why=why))
        return found
