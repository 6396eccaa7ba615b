"""Chooses a personal model among candidates, by validation scores only.

Scores of query rows have another type: they can be read for a choice already made, but not used to choose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.method import knob
from bespoke.models.scores import finished, sums_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# one common choice; each client on its validation rows; each on its support rows (by loss); always the last one
Chooser = Literal["global", "client", "support", "last"]
PARTS, LEAST = 4, 10  # parts by size, and the least number of clients in each


@dataclass(frozen=True)
class _Scores:
    """Sums of scores: metric -> (clients, candidates), or (clients, 1) if all candidates have the same."""

    clients: Ints
    sums: dict[str, NDArray[np.floating[Any]]]  # in the precision of the scores; results are in double precision

    def values(self, metric: str) -> Floats:
        """The metric of every client and candidate; NaN for a client without rows."""
        return self._finished(metric, lambda table: table)

    def at(self, choice: Chosen, metric: str) -> Floats:
        """Each client's value under its chosen candidate."""
        chosen = choice.of(self.clients)
        return self._finished(metric, lambda table: _picked(table, chosen))

    def sum_at(self, choice: Chosen, name: str) -> NDArray[np.floating[Any]]:
        """Each client's sum, such as "count", under its chosen candidate."""
        return _picked(self.sums[name], choice.of(self.clients))

    def under(self, candidate: int, metric: str) -> Floats:
        """Each client's value under one candidate: a column of `values`, computed alone to save memory."""
        return self._finished(metric, lambda table: table[:, candidate if table.shape[1] > 1 else 0])

    @property
    def candidates(self) -> int:
        return max(int(table.shape[1]) for table in self.sums.values())

    def _finished(self, metric: str, of: Callable[[NDArray[Any]], NDArray[Any]]) -> Floats:
        found = {name: self.sums[name] for name in sums_of(metric) if name in self.sums}
        with np.errstate(invalid="ignore", divide="ignore"):
            sums = {name: torch.from_numpy(of(table)).double() for name, table in found.items()}
            return finished(metric, sums).numpy()


def _picked(table: NDArray[Any], chosen: Ints) -> NDArray[Any]:
    """Each row's number in its chosen column."""
    return table[np.arange(len(table)), chosen] if table.shape[1] > 1 else table[:, 0]


class ValidationScores(_Scores):
    """Scores on validation rows: choices are made on these."""


class SupportScores(_Scores):
    """Scores on support rows. By their loss, a client may choose among models that others have trained."""


class QueryScores(_Scores):
    """Scores on query rows: results, on which nothing is chosen."""


@dataclass(frozen=True)
class Acceptance:
    """A client takes its personal model only if it has enough examples and gains enough on its own validation rows.

    `margin` is relative: the personal model has to beat the shared one by this fraction of the shared one's value.
    """

    min_examples: int = knob(0, "least number of examples a client adapts on", ge=0)
    margin: float | None = knob(None, "least gain on its validation rows, as a part of the shared model's value", ge=0)


@dataclass(frozen=True)
class Chosen:
    """The common candidate, and the candidates of clients that chose for themselves."""

    default: int
    own: dict[int, int]

    def of(self, clients: Ints) -> Ints:
        if not self.own:
            return np.full(len(clients), self.default, dtype=np.int64)
        return np.array([self.own.get(client, self.default) for client in clients.tolist()], dtype=np.int64)


@dataclass(frozen=True)
class BySize:
    """One candidate for each class of clients by their number of support rows."""

    edges: NDArray[Any]  # the least number of examples of the second part, the third, ...
    picks: tuple[int, ...]
    common: int

    def choice(self, *parts: tuple[Ints, Ints]) -> Chosen:
        """The choice for these clients with these numbers of rows."""
        own: dict[int, int] = {}
        for clients, sizes in parts:
            place = np.searchsorted(self.edges, sizes, side="right")
            own |= {int(client): self.picks[i] for client, i in zip(clients, place)}
        return Chosen(self.common, own)


def choose(
    scores: ValidationScores | SupportScores,
    metric: str,
    lower_is_better: bool,
    by: Chooser = "global",
    allowed: list[int] | None = None,
) -> Chosen:
    """The best candidate by the unweighted mean over clients, or by each client's own rows. Ties keep the earlier.

    `allowed` restricts the candidates (indices). A client without validation rows follows the common choice.
    """
    allowed_type = SupportScores if by == "support" else ValidationScores
    if not isinstance(scores, allowed_type):
        raise TypeError(f"choices are made on {allowed_type.__name__}, not on {type(scores).__name__}: that would leak")
    candidates = list(range(scores.candidates)) if allowed is None else allowed
    if by == "last":
        return Chosen(candidates[-1], {})
    seen = np.zeros(len(scores.clients), dtype=bool)  # clients with a value under any candidate
    for candidate in range(scores.candidates):
        seen |= ~np.isnan(scores.under(candidate, metric))
    if not seen.any():
        return Chosen(candidates[0], {})
    means, own = [], np.full(len(seen), candidates[0])
    least = np.full(len(seen), np.nan)
    for candidate in candidates:  # one at a time: a table of all in double precision would be too large
        values = scores.under(candidate, metric)
        cost = np.where(np.isnan(values), np.inf, values if lower_is_better else -values)
        means.append(cost[seen].mean())
        better = (cost < least) | np.isnan(least)
        own[better], least[better] = candidate, cost[better]
    common = candidates[int(np.argmin(means))]
    if by == "global":
        return Chosen(common, {})
    return Chosen(common, dict(zip(scores.clients[seen].tolist(), own[seen].tolist())))


def size_edges(sizes: Ints) -> NDArray[Any]:
    """The least size of the second part of the clients, the third, ...: parts of as many clients, LEAST or more."""
    parts = max(min(PARTS, len(sizes) // LEAST), 1)
    return np.unique(np.quantile(sizes, np.arange(1, parts) / parts, method="higher"))


def choose_by_size(
    scores: ValidationScores, sizes: Ints, metric: str, lower_is_better: bool, allowed: list[int] | None = None
) -> BySize:
    """The best candidate of each part of the clients, in parts of as many clients by their numbers of examples."""
    edges = size_edges(sizes)
    common = choose(scores, metric, lower_is_better, allowed=allowed).default
    picks = []
    for part in range(len(edges) + 1):
        inside = np.searchsorted(edges, sizes, side="right") == part
        some = ValidationScores(scores.clients[inside], {name: each[inside] for name, each in scores.sums.items()})
        seen = (some.sums["count"] > 0).any()
        picks.append(choose(some, metric, lower_is_better, allowed=allowed).default if seen else common)
    return BySize(edges, tuple(picks), common)


def accepted(
    choice: Chosen, rule: Acceptance, scores: ValidationScores | None, examples: Ints, clients: Ints,
    metric: str, lower_is_better: bool,
) -> Chosen:  # fmt: skip
    """The choice under the acceptance rule. Clients with too few examples or too small a gain keep the shared model.

    With a margin, a client without validation rows of its own keeps the shared model.
    """
    takes = examples >= rule.min_examples
    if rule.margin is not None:
        takes &= _gains(choice, rule.margin, scores, clients, metric, lower_is_better)
    picked = np.where(takes, choice.of(clients), 0)
    return Chosen(choice.default, {**choice.own, **dict(zip(clients.tolist(), picked.tolist()))})


def _gains(
    choice: Chosen, margin: float, scores: ValidationScores | None, clients: Ints, metric: str, lower_is_better: bool
) -> NDArray[np.bool_]:
    if scores is None:
        return np.zeros(len(clients), dtype=bool)
    if not isinstance(scores, ValidationScores):
        raise TypeError(f"models are accepted on ValidationScores, not on {type(scores).__name__}: that would leak")
    assert np.array_equal(scores.clients, clients)
    shared, personal = scores.at(Chosen(0, {}), metric), scores.at(choice, metric)
    gain = (shared - personal) if lower_is_better else (personal - shared)
    with np.errstate(invalid="ignore"):
        return gain > margin * np.abs(shared)
