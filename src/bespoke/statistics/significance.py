"""Statistical tests: bootstrap intervals over clients and seeds, and paired tests over clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bespoke.randomness import generator

Floats = NDArray[np.float64]

LEVEL = 0.95
DRAWS = 10_000
_MOST_WORK = 200_000_000  # clients drawn in all: about ten seconds
_CHUNK = 200_000  # clients drawn at once: what stays in the processor's cache


@dataclass(frozen=True)
class Interval:
    """A confidence interval; NaN where it cannot be known (one client)."""

    low: float
    high: float

    @property
    def side(self) -> int:
        """1 if all of it is above zero, -1 if all of it is below, else 0."""
        return int(self.low > 0) - int(self.high < 0)


def draws_for(clients: int) -> int:
    """How many resamples: 10,000; beyond 20,000 clients, where intervals are narrow anyway, down to 1,000."""
    return max(min(DRAWS, _MOST_WORK // max(clients, 1)), 1_000)


def bootstrap_means(values: Floats, draws: int | None = None) -> Floats:
    """Resampled means, shape (draws, methods), of values (methods, seeds, clients) with NaN for absent clients.

    Seeds and clients are resampled independently, with replacement (the pigeonhole bootstrap, Owen 2007, made for
    crossed factors: the same clients are tested with every seed). All methods share a resample, so the difference of
    two columns is a resample of their mean paired difference. A client counts where all methods have a value.
    """
    return bootstrap_together([values], draws)[0]


def bootstrap_together(sets: Sequence[Floats], draws: int | None = None) -> list[Floats]:
    """`bootstrap_means` of several sets of the same seeds and clients; a client may count in one and not in another.

    Drawing clients takes most of the time, and the draws depend on the numbers of seeds and clients alone.
    """
    if not sets:
        return []
    seeds, clients = sets[0].shape[1:]
    draws = draws or draws_for(clients)
    from threadpoolctl import threadpool_limits

    flats = []
    for values in sets:
        known = np.isfinite(values).all(0)
        flats.append(np.concatenate([np.where(known, values, 0.0).reshape(-1, clients), known.astype(float)]).T)
    chunk = max(_CHUNK // max(clients, 1), 1)
    means = [np.empty((draws, len(values))) for values in sets]
    with threadpool_limits(1, "blas"):  # products are small: to wait for other threads takes longer than they do
        for start in range(0, draws, chunk):
            size = min(chunk, draws - start)
            rng = generator("bootstrap", clients, seeds, start)
            picked = rng.integers(0, clients, size=(size, clients)) + np.arange(size)[:, None] * clients
            counts = np.bincount(picked.ravel(), minlength=size * clients).reshape(size, clients).astype(float)
            times = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=size)[:, None, :]
            for found, flat in zip(means, flats):
                sums = (counts @ flat).reshape(size, -1, seeds)
                present = sums[:, -1:, :]
                seed_means = sums[:, :-1, :] / np.where(present > 0, present, 1.0)
                seed_counts = times * (present > 0)
                total = seed_counts.sum(-1)
                weighted = (seed_counts * seed_means).sum(-1)
                found[start : start + size] = weighted / np.where(total > 0, total, np.nan)
    return means


def percentile_interval(samples: Floats, level: float = LEVEL) -> Interval:
    """The percentile interval of bootstrap samples (Efron 1979)."""
    kept = samples[np.isfinite(samples)]
    if not len(kept):
        return Interval(math.nan, math.nan)
    low, high = np.quantile(kept, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def wilcoxon(differences: Floats) -> float:
    """The two-sided p of Wilcoxon's signed-rank test over clients; Pratt's treatment of clients that do not change."""
    from scipy import stats

    differences = differences[np.isfinite(differences)]
    if not len(differences) or not differences.any():
        return 1.0  # nobody changed: the test is undefined, the conclusion is not
    return float(stats.wilcoxon(differences, zero_method="pratt").pvalue)


def smallest_p(clients: int, comparisons: int = 1) -> float:
    """The least Holm-corrected p that this number of clients can give: all differences of one sign."""
    return min(1.0, comparisons * 2.0 ** (1 - clients))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (1979): the i-th smallest of m is multiplied by m - i + 1, never decreasing."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Benjamini and Hochberg 1995): those at most q are a set with q false discoveries expected."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(-p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum.accumulate(np.append(1.0, p[order] * len(p) / (len(p) - np.arange(len(p)))))[1:]
    return adjusted.tolist()


def relative_change(difference: float, baseline: float) -> float:
    """A difference in percent of the baseline's size; NaN if the baseline is zero."""
    return 100.0 * difference / abs(baseline) if baseline else math.nan


def spearman(x: Floats, y: Floats) -> tuple[float, float]:
    """Spearman's rank correlation and its p; (NaN, NaN) where one of the two does not vary."""
    from scipy import stats

    kept = np.isfinite(x) & np.isfinite(y)
    x, y = x[kept], y[kept]
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan, math.nan
    correlation = stats.spearmanr(x, y)
    return float(correlation.statistic), float(correlation.pvalue)
