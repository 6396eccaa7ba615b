"""Tests which clients are hurt or helped beyond the chance of their few test rows.

Each client's test rows under a method are paired with the same rows under the baseline (a row that several seeds tested
is averaged first). A client has few rows, so its variance is shrunk towards that of all clients (the moderated t-test,
Smyth 2004), and the test has no lighter tails than rows with the observed kurtosis allow. A client counts as hurt if it
loses more than the smallest effect that matters, with false discoveries over clients controlled (Benjamini and Hochberg
1995). For comparison there is the share by chance alone: the share that is worse off if the signs of the rows'
differences are flipped at random, that is, if method and baseline were equally good.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import UserError
from bespoke.randomness import generator
from bespoke.statistics.clients import Floats
from bespoke.statistics.folders import FinishedRun
from bespoke.statistics.significance import LEVEL, benjamini_hochberg

if TYPE_CHECKING:
    import pandas as pd

SMALLEST_EFFECT = 0.01  # relative to the baseline's mean error; smaller effects do not matter
FALSE_DISCOVERIES = 0.05  # expected share of false ones among the clients reported as hurt (helped)
STAND_IN = "loss"  # for metrics that are not means over rows, such as AUC
_FLIPS = 200
_MOST_SIGNS = 20_000_000  # drawn in all: about a second


@dataclass(frozen=True)
class Beyond:
    """Results for each client from its test rows, in the order of the given clients; NaN for clients without rows."""

    metric: str  # of the rows: the summary's metric, or its stand-in
    hurt: NDArray[np.bool_]
    helped: NDArray[np.bool_]
    low: Floats  # 95 % interval of the client's difference, method minus baseline, in the units of the rows
    high: Floats
    hurt_by_chance: float  # share of clients, averaged over seeds; NaN if the rows are of a stand-in
    helped_by_chance: float


# ------------------------------------------------------------------------------------------------ rows on disk


def read_rows(runs: Sequence[FinishedRun], metric: str) -> pd.DataFrame | None:
    """The test rows of these runs (seed, client, row, value); None if a run has none for this metric."""
    import pandas as pd

    if not runs or any(run.result.get("rows_metric") not in (metric, STAND_IN) for run in runs):
        return None
    tables = []
    for run in runs:
        path = run.folder / "rows.parquet"
        if not path.exists():
            return None
        try:
            table = pd.read_parquet(path, columns=["client", "row", "value"])
        except Exception as error:  # pyarrow raises many kinds; to a user they all mean the same
            raise UserError(
                f"{path} cannot be read as a table of client, row and value ({error}). "
                "The folder is damaged: delete it and run the experiment again."
            ) from error
        tables.append(table.assign(client=table["client"].astype(str), seed=run.seed))
    return pd.concat(tables, ignore_index=True)


def rows_metric(runs: Sequence[FinishedRun]) -> str:
    """The metric of the rows of these runs; '' if unknown."""
    return str(runs[0].result.get("rows_metric") or "") if runs else ""


def beyond(
    method: pd.DataFrame, baseline: pd.DataFrame, clients: Sequence[str], rows_of: str, metric: str, lower: bool
) -> Beyond | None:
    """Compares a method with the baseline on the rows on which both were tested; None if there are none."""
    pairs = method.merge(baseline, on=["seed", "client", "row"], suffixes=("", "_baseline"))
    places = {client: place for place, client in enumerate(clients)}
    pairs = pairs[pairs["client"].isin(places)]
    pairs = pairs.assign(place=pairs["client"].map(places), difference=pairs["value"] - pairs["value_baseline"])
    pairs = pairs[np.isfinite(pairs["difference"])]
    if not len(pairs):
        return None
    lower = lower or rows_of != metric  # a loss is an error, whatever the metric that it stands in for
    sign = 1.0 if lower else -1.0

    rows = pairs.groupby(["place", "row"], sort=True)[["difference", "value_baseline"]].mean().reset_index()
    place, worse = rows["place"].to_numpy(), sign * rows["difference"].to_numpy(float)
    error = float(rows.groupby("place")["value_baseline"].mean().mean())
    if not lower:  # a share of right answers has an error too; other scores have only their size
        error = 1.0 - error if 0.0 <= error <= 1.0 else abs(error)
    found = moderated(worse, place, len(clients), SMALLEST_EFFECT * abs(error))
    low, high = (found.low, found.high) if lower else (-found.high, -found.low)

    chance = (math.nan, math.nan)
    if rows_of == metric:
        chance = flipped_shares(sign * pairs["difference"].to_numpy(float), pairs["place"].to_numpy(),
                                pairs["seed"].to_numpy())  # fmt: skip
    return Beyond(rows_of, discoveries(found.p_hurt), discoveries(found.p_helped), low, high, *chance)


# ------------------------------------------------------------------------------------------------ one test per client


@dataclass(frozen=True)
class Moderated:
    """Each client's mean loss against the baseline, its interval, and one-sided p for more than the least effect."""

    mean: Floats
    low: Floats
    high: Floats
    p_hurt: Floats  # NaN for clients without rows
    p_helped: Floats


def moderated(worse: Floats, client: NDArray[np.int64], clients: int, least: float) -> Moderated:
    """The moderated t-test of every client's mean against +least and -least.

    A client with n rows of variance s² has the variance (d0 s0² + (n - 1) s²) / (d0 + n - 1), where all clients give
    s0² and d0; one with a single row has s0². Degrees of freedom: d0 + n - 1, at most those of all clients together,
    and at most 4 + 6 n / excess, the t distribution with the excess kurtosis of a mean of n such rows: where rows are
    mostly ties with a few large differences (right or wrong answers), three equal rows are no proof.
    """
    from scipy import stats

    n = np.bincount(client, minlength=clients).astype(float)
    some = np.where(n > 0, n, np.nan)
    mean = np.bincount(client, worse, clients) / some
    squares = np.bincount(client, (worse - mean[client]) ** 2, clients).astype(float)
    own = np.maximum(n - 1, 0)
    prior, shared = variance_prior(squares, own)
    together = own.sum()
    if not np.isfinite(shared):  # nobody's rows differ among themselves: the spread around zero, effects included
        prior, shared, together = math.inf, float((worse**2).mean()), float(len(worse))
    variance = np.full(clients, shared) if math.isinf(prior) else (prior * shared + squares) / (prior + own)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = (worse / np.sqrt(variance)[client]) ** 2
        excess = float((scaled**2).mean() / scaled.mean() ** 2 - 3.0)
        tails = 4.0 + 6.0 * n / excess if excess > 0 else np.full(clients, math.inf)
        freedom = np.minimum(np.minimum(prior + own, together), tails)
        error = np.sqrt(variance / some)
        half = stats.t.ppf((1 + LEVEL) / 2, freedom) * error
        p_hurt, p_helped = (stats.t.sf((side - least) / error, freedom) for side in (mean, -mean))
    return Moderated(mean, mean - half, mean + half, _certain(p_hurt, mean, least), _certain(p_helped, -mean, least))


def _certain(p: Floats, loss: Floats, least: float) -> Floats:
    """The p-value without variance: certain, by the mean."""
    return np.where(np.isnan(p) & ~np.isnan(loss), np.where(loss > least, 0.0, 1.0), p)


def variance_prior(squares: Floats, freedom: Floats) -> tuple[float, float]:
    """(d0, s0²) of a scaled inverse chi-squared prior, by the moments of log s² (Smyth 2004, section 6.2).

    s0² is NaN if no client has rows that differ. Clients whose rows do not differ are left out, which makes s0² larger
    and the test more careful.
    """
    from scipy.optimize import brentq
    from scipy.special import digamma, polygamma

    kept = (freedom > 0) & (squares > 0)
    if not kept.any():
        return math.inf, math.nan
    half = freedom[kept] / 2
    logs = np.log(squares[kept] / freedom[kept]) - digamma(half) + np.log(half)
    spread = float(np.var(logs, ddof=1) - polygamma(1, half).mean()) if len(logs) > 1 else 0.0
    if spread <= 0:  # the clients' variances differ no more than chance makes them
        return math.inf, float(squares[kept].sum() / freedom[kept].sum())
    if spread >= polygamma(1, 1e-3):
        return 0.0, float(np.exp(logs.mean()))
    prior = 2 * float(brentq(lambda x: polygamma(1, x) - spread, 1e-3, 1e9)) if spread > 1e-9 else math.inf
    if math.isinf(prior):
        return prior, float(np.exp(logs.mean()))
    return prior, float(np.exp(logs.mean() + digamma(prior / 2) - math.log(prior / 2)))


def discoveries(p_values: Floats) -> NDArray[np.bool_]:
    """The clients that stand out, with at most FALSE_DISCOVERIES of them wrong on average."""
    known = np.isfinite(p_values)
    found = np.zeros(len(p_values), dtype=bool)
    found[known] = np.array(benjamini_hochberg(p_values[known].tolist())) <= FALSE_DISCOVERIES
    return found


# ------------------------------------------------------------------------------------------------ chance


def flipped_shares(worse: Floats, client: NDArray[np.int64], seed: NDArray[np.int64]) -> tuple[float, float]:
    """Shares of clients that are worse off and better off, averaged over seeds, when rows take random signs."""
    order = np.lexsort((client, seed))
    worse, client, seed = worse[order], client[order], seed[order]
    begins = np.flatnonzero(np.r_[True, (np.diff(client) != 0) | (np.diff(seed) != 0)])
    flips = int(np.clip(_MOST_SIGNS // len(worse), 10, _FLIPS))
    hurt, helped = np.zeros(len(begins)), np.zeros(len(begins))
    for flip in range(flips):
        signs = 2.0 * generator("flip", flip).integers(0, 2, len(worse)) - 1.0
        sums = np.add.reduceat(signs * worse, begins)
        hurt += sums > 0
        helped += sums < 0
    by_seed = seed[begins]
    both = [float(np.mean([counts[by_seed == s].mean() for s in np.unique(seed)])) / flips for counts in (hurt, helped)]
    return both[0], both[1]
