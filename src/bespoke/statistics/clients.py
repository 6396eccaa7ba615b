"""Numbers from the per-client tables of run folders: mean, spread, deciles, worst served clients, clients hurt.

Every number is computed over clients within one seed and then averaged over seeds, so that the spread over seeds is
the spread of the number itself. Clients count equally unless a name says `weighted`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
ALL = "all clients"  # in the place of a group's name


@dataclass(frozen=True)
class Cells:
    """One metric as a box of methods x seeds x clients; NaN where a client was not tested with a seed.

    All methods are judged on the same cells: those that every method's table has and that can be scored, because the
    value is finite under at least one method or reference. A method without a finite value there has diverged: its
    value is infinite, the worst there is, and nobody else's number changes. What nobody can score (a client without
    query rows, an AUC of one class) is no method's fault and is NaN for all.
    """

    methods: list[str]
    seeds: list[int]
    clients: list[str]  # sorted, so that the order of rows in a table changes nothing
    groups: list[str]
    values: Floats  # (methods, seeds, clients)
    weights: Floats  # (seeds, clients): query examples, or tokens
    examples: Floats  # (clients,): rows a client can learn from
    undefined: dict[str, int]  # method -> cells in which it diverged
    left_out: int  # cells that a method's table lacks: runs of different clients
    references: dict[str, Floats]  # label -> (seeds, clients), on the same cells; NaN where a reference has no value

    def of(self, method: str) -> Floats:
        """The values of one method or reference: (seeds, clients)."""
        return self.references[method] if method in self.references else self.values[self.methods.index(method)]


def cells(
    table: pd.DataFrame,
    column: str,
    methods: Sequence[str] | None = None,
    lower_is_better: bool = True,
    references: pd.DataFrame | None = None,
    weight: str = "query_examples",
) -> Cells:
    """Arrange one column of the table of clients by method, seed and client; `references` has the same form.

    weight: the column of each client's weight.
    """
    methods = list(methods or dict.fromkeys(table["method"]))
    table = table[table["method"].isin(methods)]
    seeds_of = {method: set(table["seed"][table["method"] == method]) for method in methods}
    seeds = sorted(set.intersection(*seeds_of.values()))
    if not seeds:
        found = "; ".join(f"{method}: {sorted(s)}" for method, s in seeds_of.items())
        raise UserError(f"the methods have no seed in common ({found}), so their clients cannot be paired")
    table = table[table["seed"].isin(seeds)].sort_values(["client", "seed", "method"])
    clients = sorted(set(table["client"]))
    places = _places(table, methods, seeds, clients)
    values, weights = _arranged(table[column], places), np.nan_to_num(_arranged(table[weight], places))
    present = ~np.isnan(_arranged(np.ones(len(table)), places))
    if len(methods) > 1 and not present.all(0).any():
        raise UserError("the runs have no client in common; report on runs of the same data and split")

    beside: dict[str, Floats] = {}
    if references is not None:
        labels = list(dict.fromkeys(references["method"]))
        beside = dict(zip(labels, _arranged(references[column], _places(references, labels, seeds, clients))))
    finite = np.isfinite(values)
    tested = finite.any(0)
    for reference in beside.values():
        tested |= np.isfinite(reference)
    kept = tested & present.all(0)
    worst = np.inf if lower_is_better else -np.inf
    values = np.where(kept, np.where(finite, values, worst), np.nan)
    known = np.flatnonzero(kept.any(0) | ~kept.any())

    rows = table.drop_duplicates("client").set_index("client").loc[clients]
    learnable = table[["train_examples", "support_examples"]].max(axis=1).groupby(table["client"]).mean().loc[clients]
    return Cells(
        methods,
        [int(seed) for seed in seeds],
        [clients[i] for i in known],
        rows["group"].iloc[known].tolist(),
        values[:, :, known],
        weights.max(0)[:, known],
        learnable.to_numpy(float)[known],
        {method: int((kept & ~finite[i]).sum()) for i, method in enumerate(methods)},
        int((tested & ~kept).sum()),
        {name: np.where(kept & np.isfinite(found), found, np.nan)[:, known] for name, found in beside.items()},
    )


@dataclass(frozen=True)
class _Places:
    """Where the rows of a table go in a box of methods x seeds x clients."""

    shape: tuple[int, ...]
    inside: NDArray[np.bool_]  # a reference may know seeds and clients that the methods do not
    axes: tuple[NDArray[np.int64], ...]  # of the rows inside


def _places(table: pd.DataFrame, methods: Sequence[str], seeds: Sequence[int], clients: Sequence[str]) -> _Places:
    listed = {"method": methods, "seed": seeds, "client": clients}
    place = [table[name].map({key: i for i, key in enumerate(keys)}).to_numpy(float) for name, keys in listed.items()]
    inside: NDArray[np.bool_] = np.asarray(np.isfinite(place).all(0))
    return _Places(tuple(map(len, listed.values())), inside, tuple(axis[inside].astype(int) for axis in place))


def _arranged(values: pd.Series[Any] | Floats, places: _Places) -> Floats:
    """One column as (methods, seeds, clients); NaN where the table has no row."""
    box = np.full(places.shape, np.nan)
    box[places.axes] = np.asarray(values, dtype=float)[places.inside]
    return box


# ------------------------------------------------------------------------------------------------ numbers


@dataclass(frozen=True)
class OverSeeds:
    """A number averaged over seeds, its standard deviation over seeds (NaN for one seed), and the number per seed."""

    value: float
    spread: float
    by_seed: list[float]


def over_seeds(by_seed: Iterable[float]) -> OverSeeds:
    """Average a number over the seeds for which it is defined; infinite if it is so for one of them."""
    numbers = [float(number) for number in by_seed]
    defined = [number for number in numbers if not math.isnan(number)]
    value = math.fsum(defined) / len(defined) if defined else math.nan
    spread = float(np.std(defined, ddof=1)) if len(defined) > 1 and math.isfinite(value) else math.nan
    return OverSeeds(value, spread, numbers)


def mean(values: Floats) -> OverSeeds:
    """The mean over clients, every client counting the same; infinite where one of them is."""
    return over_seeds(_mean(row[~np.isnan(row)]) for row in values)


def weighted_mean(values: Floats, weights: Floats) -> OverSeeds:
    """The mean over clients weighted by their query examples: what a row, not a client, can expect."""
    by_seed = []
    for row, weight in zip(values, weights):
        kept = ~np.isnan(row) & (weight > 0)
        total = weight[kept].sum()
        by_seed.append(float((row[kept] * weight[kept]).sum() / total) if total > 0 else math.nan)
    return over_seeds(by_seed)


def deviation(values: Floats) -> OverSeeds:
    """The standard deviation across clients (fairness: Li et al. 2021); the clients are the population, so ddof=0."""
    return over_seeds(float(np.std(row[~np.isnan(row)])) if _all_finite(row) else math.nan for row in values)


def deciles(values: Floats) -> list[OverSeeds]:
    """The nine deciles across clients, from 10 % to 90 %, where all of them are finite."""
    levels = np.arange(1, 10) / 10
    by_seed = [np.quantile(row[~np.isnan(row)], levels) for row in values if _all_finite(row)]
    return [over_seeds(quantiles[i] for quantiles in by_seed) for i in range(9)]


def worst_tenth(values: Floats, lower_is_better: bool) -> OverSeeds:
    """The mean over the worst served 10 % of clients (rounded up: at least one)."""
    sign = -1.0 if lower_is_better else 1.0
    by_seed = []
    for row in values:
        ordered = np.sort(sign * row[~np.isnan(row)])
        by_seed.append(_mean(sign * ordered[: math.ceil(len(ordered) / 10)]))
    return over_seeds(by_seed)


def richest_tenth(values: Floats, examples: Floats) -> OverSeeds:
    """The mean over the 10 % of clients with most data (rounded up); equal ones are taken in the order of their ids."""
    order = np.argsort(-examples, kind="stable")
    by_seed = []
    for row in values:
        ranked = row[order]
        ranked = ranked[~np.isnan(ranked)]
        by_seed.append(_mean(ranked[: math.ceil(len(ranked) / 10)]))
    return over_seeds(by_seed)


def _all_finite(row: Floats) -> bool:
    """Whether there are clients and none of them diverged."""
    known = row[~np.isnan(row)]
    return bool(len(known) and np.isfinite(known).all())


def _mean(numbers: Floats) -> float:
    return math.fsum(numbers) / len(numbers) if len(numbers) else math.nan  # fsum: exact, so order cannot matter


# ------------------------------------------------------------------------------------------------ hurt and helped


@dataclass(frozen=True)
class Gains:
    """How much better each client is served than by the baseline: positive is better, whatever the metric.

    A (seed, client) pair is hurt if it is strictly worse. A client is hurt if it is so in the majority of its seeds
    and on average: one unlucky seed does not make a client a loser.
    """

    pairs: Floats  # (seeds, clients)
    client: Floats  # (clients,): averaged over the client's seeds
    hurt: OverSeeds  # fraction of clients
    helped: OverSeeds
    same: OverSeeds
    hurt_clients: list[int]  # positions, largest loss first
    helped_clients: list[int]  # positions, largest gain first

    @property
    def mean_loss(self) -> float:
        """How much the hurt clients lose, on average over them (NaN if there are none)."""
        return -_mean(self.client[self.hurt_clients])

    @property
    def mean_gain(self) -> float:
        """How much the helped clients win, on average over them (NaN if there are none)."""
        return _mean(self.client[self.helped_clients])


def gains(values: Floats, baseline: Floats, lower_is_better: bool) -> Gains:
    """Pair a method with the baseline by (seed, client) and count who is worse, better and the same."""
    pairs = baseline - values if lower_is_better else values - baseline
    known = np.isfinite(pairs)
    seeds = known.sum(0)
    # The mean of differences, not the difference of means: equal values stay exactly zero.
    average = np.where(known, pairs, 0.0).sum(0) / np.where(seeds > 0, seeds, np.nan)
    worse, better = (pairs < 0).sum(0), (pairs > 0).sum(0)
    by_loss = np.argsort(average, kind="stable")  # NaN last, ties in the order of ids
    hurt = by_loss[((worse * 2 > seeds) & (average < 0))[by_loss]].tolist()
    by_gain = np.argsort(-average, kind="stable")
    helped = by_gain[((better * 2 > seeds) & (average > 0))[by_gain]].tolist()
    fractions = [
        over_seeds(_mean(compare(row[np.isfinite(row)], 0.0).astype(float)) for row in pairs)
        for compare in (np.less, np.greater, np.equal)
    ]
    return Gains(pairs, average, fractions[0], fractions[1], fractions[2], hurt, helped)
