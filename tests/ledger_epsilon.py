"""Epsilon from a run's ledger alone, by formulas that are not the package's: for the tests of the account."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.signal import fftconvolve
from scipy.stats import norm

GRID = 1e-3  # of privacy losses

Moment = tuple[int, int]  # stage, round


def lines(folder: Path, log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / log).read_text().splitlines() if line.strip()]


def statement(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())["privacy"]


def multipliers(folder: Path, where: str = "sum") -> dict[Moment, float]:
    """Deviation / clip of every round; where fields have bounds of their own, or a bit travels: of all together."""
    found = {}
    for line in lines(folder, "ledger.jsonl"):
        if line.get("noise", {}).get(where):
            found[line["stage"], line["round"]] = _multiplier(line["noise"]["clip"], dict(line["noise"][where]))
    return found


def _multiplier(clip: float | dict[str, float], deviations: dict[str, float]) -> float:
    bit = deviations.pop("within bound", None)  # plus or minus one half
    told = 0.0 if bit is None else (0.5 / bit) ** 2
    if isinstance(clip, dict):
        told += sum((clip[name] / deviation) ** 2 for name, deviation in deviations.items())
    elif deviations:
        told += max((clip / deviation) ** 2 for deviation in deviations.values())
    return told**-0.5


def gaussian(squared_mu: float, delta: float) -> float:
    """Of the Gaussian mechanism: delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu) (Balle and Wang 2018)."""
    mu = math.sqrt(squared_mu)

    def excess(epsilon: float) -> float:
        beyond = np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
        return float(norm.cdf(mu / 2 - epsilon / mu) - beyond) - delta

    return float(brentq(excess, 0, 50 * (mu + mu * mu)))


def poisson(rounds: Counter[tuple[float, float]], delta: float) -> float:
    """Of Poisson samples (rate, multiplier), a client being there or not; never above the true epsilon."""
    return max(_sampled(rounds, delta, there=(1.0, None)), _sampled(rounds, delta, there=(None, 1.0)))


def without_replacement(rounds: Counter[tuple[float, float]], delta: float) -> float:
    """Of samples without replacement, one client sending 1 or -1, all others 0: epsilon of this is a lower bound."""
    return _sampled(rounds, delta, there=(1.0, -1.0))


def _sampled(rounds: Counter[tuple[float, float]], delta: float, there: tuple[float | None, float | None]) -> float:
    """Privacy losses between two worlds, in which a client sends these when it is sampled, added up over rounds."""
    return _loss_epsilon([_losses(*how, *there) for how in rounds.elements()], delta)


@lru_cache
def _losses(rate: float, z: float, one: float | None, other: float | None) -> tuple[int, Any]:
    """(first cell, probabilities) of the loss log(one / other) under the first, each loss rounded down to the grid."""
    x = np.linspace(-12 * z, 12 * z, 50_001)

    def world(sent: float | None, of: Any) -> Any:
        return of(x / z) if sent is None else (1 - rate) * of(x / z) + rate * of((x - sent) / z)

    loss = np.log(world(one, norm.pdf)) - np.log(world(other, norm.pdf))
    cells = np.floor(np.minimum(loss[1:], loss[:-1]) / GRID).astype(int)
    return int(cells.min()), np.bincount(cells - cells.min(), np.diff(world(one, norm.cdf)))


def _loss_epsilon(parts: list[tuple[int, Any]], delta: float) -> float:
    low, mass = parts[0]
    for start, other in parts[1:]:
        low, mass = low + start, fftconvolve(mass, other)
    loss = GRID * (low + np.arange(len(mass)))

    def excess(epsilon: float) -> float:
        over = loss > epsilon
        return float((mass[over] * -np.expm1(epsilon - loss[over])).sum()) - delta

    return float(brentq(excess, 0, 60)) if excess(0) > 0 else 0.0
