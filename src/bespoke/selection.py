"""Choosing a personal model, on validation scores and on nothing else.

Scores of query rows are another type: they can be read at a choice already made, but nothing can be chosen on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.models.task import finished

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Scores:
    """Sums of scores: metric -> (clients, candidates)."""

    clients: Ints
    sums: dict[str, Floats]

    def values(self, metric: str) -> Floats:
        """The metric of every client and candidate; NaN for a client without rows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return finished(metric, {name: torch.from_numpy(s) for name, s in self.sums.items()}).numpy()

    def at(self, choice: Choice, metric: str) -> Floats:
        """Each client's value under the candidate chosen for it."""
        return self.values(metric)[np.arange(len(self.clients)), choice.of(self.clients)]


class ValidationScores(_Scores):
    """Scores on validation rows: choices are made on these."""


class QueryScores(_Scores):
    """Scores on query rows: results, on which nothing is chosen."""


@dataclass(frozen=True)
class Choice:
    """A candidate for everyone, and exceptions for clients that chose for themselves."""

    default: int
    own: dict[int, int]

    def of(self, clients: Ints) -> Ints:
        return np.array([self.own.get(int(client), self.default) for client in clients], dtype=np.int64)


def choose(
    scores: ValidationScores,
    metric: str,
    lower_is_better: bool,
    who: Literal["global", "client", "last"] = "global",
    allowed: list[int] | None = None,
) -> Choice:
    """The best candidate by the unweighted mean over clients, or by each client's own rows. Ties keep the earlier.

    `allowed` restricts the candidates (indices). A client without validation rows follows the common choice.
    """
    if not isinstance(scores, ValidationScores):
        raise TypeError(f"choices are made on ValidationScores, not on {type(scores).__name__}: that would leak")
    values = scores.values(metric)
    candidates = np.arange(values.shape[1]) if allowed is None else np.array(allowed)
    if who == "last":
        return Choice(int(candidates[-1]), {})
    worst = np.inf if lower_is_better else -np.inf
    cost = np.where(np.isnan(values), worst, values) * (1 if lower_is_better else -1)
    seen: NDArray[np.bool_] = np.asarray(~np.isnan(values).all(axis=1))
    if not seen.any():
        return Choice(int(candidates[0]), {})
    mean = cost[seen][:, candidates].mean(axis=0)
    common = int(candidates[int(np.argmin(mean))])
    if who == "global":
        return Choice(common, {})
    own = candidates[np.argmin(cost[:, candidates], axis=1)]
    return Choice(common, {int(c): int(k) for c, k, s in zip(scores.clients, own, seen) if s})
