"""Standardization without leaks: every mean and deviation comes from training rows alone.

    z = (x - mean) / deviation,   a missing value becomes 0 (the training mean)

'global' pools the training rows of all clients: sums, sums of squares and counts, which secure aggregation could give.
'client' uses each client's own training rows, which never leave it. Deviations are the population's (divided by n); a
feature that does not vary is divided by 1. The target, where asked for, is always standardized globally, so that one
unit serves all clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.data.population import Population
from bespoke.data.splits import Train
from bespoke.data.tables.schema import Statistics
from bespoke.errors import UserError, unknown

Scope = Literal["global", "client", "none"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def standardize(
    population: Population, train: Train, how: Scope, target: bool, given: Statistics | None = None
) -> Population:
    """A new population with standardized features (and target); splits have to be made of it anew.

    `given` has means and deviations, by name, that are known and not taken from the rows.

    Adds to `about`: `unit` and `centre` (the target's deviation and mean: y_original = y * unit + centre) and
    `statistics_floats` (how many numbers each client has to send for all this).
    """
    if how not in ("global", "client", "none"):
        raise unknown("standardization", how, ("global", "client", "none"))
    about = population.about.copy()
    columns = dict(population.columns)
    given = given or {}
    about["statistics_floats"] = int((about.get("release") or {}).get("floats", 0)) + int(about.get("asked_floats", 0))

    if how != "none" and is_table(population):
        scaling = Scaling.of(population, train, how, given)
        about["statistics_floats"] += scaling.floats
        if scaling.note:
            about["notes"] = [*about.get("notes", []), scaling.note]
        owner = np.repeat(np.arange(len(population)), population.sizes()) if how == "client" else 0
        x = columns["x"].numpy()
        scaled = (x - scaling.mean[owner]) / scaling.deviation[owner]
        columns["x"] = torch.from_numpy(scaled.astype(np.float32))
    if is_table(population) and about.get("missing", True):
        columns["x"] = columns["x"].nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        about["missing"] = False

    if target:
        if about.get("task") != "regression":
            raise UserError(f"only a regression's target can be standardized; the task is {about.get('task')!r}")
        y = columns["y"].numpy().astype(np.float64)
        rows, _ = train.of(train.clients)
        mean, deviation, floats = _known(y[rows][:, None], [about.get("target", "")], given)
        about |= {"centre": float(mean[0]), "unit": float(deviation[0])}
        about["statistics_floats"] += floats
        columns["y"] = torch.from_numpy(((y - mean[0]) / deviation[0]).astype(np.float32))
    return replace(population, columns=columns, about=about)


@dataclass(frozen=True)
class Scaling:
    """Mean and deviation of every feature: one row for all clients, or a row each. 0 and 1 where nothing is scaled."""

    mean: Floats
    deviation: Floats
    floats: int  # numbers each client has to send
    note: str = ""

    @classmethod
    def of(cls, population: Population, train: Train, how: Scope, given: Statistics) -> Scaling:
        """From training rows alone, but for what is given."""
        width = population.columns["x"].shape[1]
        numeric = np.flatnonzero(population.about.get("numeric", []))
        rows, sizes = train.of(train.clients)
        values = population.columns["x"].numpy()[rows][:, numeric].astype(np.float64)
        places = len(population) if how == "client" else 1
        mean, deviation = np.zeros((places, width)), np.ones((places, width))
        if not len(numeric):
            return cls(mean, deviation, 0)
        names = [population.about["features"][place] for place in numeric] if given else []
        if how == "global":
            mean[0, numeric], deviation[0, numeric], floats = _known(values, names, given)
            return cls(mean, deviation, floats)
        mean[:, numeric], deviation[:, numeric] = _by_client(values, train.clients, sizes, len(population))
        untrained = _untrained(population, train)
        if not len(untrained):
            return cls(mean, deviation, 0)
        pooled_mean, pooled_deviation, floats = _known(values, names, given)
        mean[np.ix_(untrained, numeric)], deviation[np.ix_(untrained, numeric)] = pooled_mean, pooled_deviation
        note = f"{len(untrained)} clients have no training rows; the pooled statistics standardize them."
        return cls(mean, deviation, floats, note)


def moments(population: Population, train: Train, centres: dict[str, float]) -> dict[str, Tensor]:
    """What a place with some of the clients says of its training rows, so that all can be standardized alike.

    Of every numeric feature and of a regression's target: how many values are present, their sum, and the sum of their
    squared distances to the centre (0 where none is told).
    """
    rows, _ = train.of(train.clients)
    found: dict[str, Floats] = {}
    if is_table(population):
        for place in np.flatnonzero(population.about.get("numeric", [])).tolist():
            found[population.about["features"][place]] = population.columns["x"].numpy()[rows, place]
    if population.about.get("task") == "regression":
        found[population.about.get("target", "")] = population.columns["y"].numpy()[rows]
    out = {}
    for name, values in found.items():
        there = values[~np.isnan(values)].astype(np.float64)
        squares = ((there - centres.get(name, 0.0)) ** 2).sum()
        out[name] = torch.tensor([len(there), there.sum(), squares], dtype=torch.float64)
    return out


def means(parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """The mean of every column over the rows of several places."""
    added = _added(parts)
    return {name: float(total[1] / max(float(total[0]), 1.0)) for name, total in added.items()}


def statistics(parts: Sequence[dict[str, Tensor]], centres: dict[str, float]) -> Statistics:
    """Mean and deviation of every column over the rows of several places, told around these means."""
    found = {}
    for name, total in _added(parts).items():
        variance = np.array(float(total[2] / max(float(total[0]), 1.0)))
        found[name] = centres[name], float(_safe(variance, np.array(centres[name])))
    return found


def _added(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sums over places, which have to tell of the same columns."""
    names = list(parts[0])
    for part in parts:
        if list(part) != names:
            odd = sorted(set(part) ^ set(names)) or names
            raise UserError(f"places have different columns ({', '.join(odd)}); agree on one schema")
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in names}


def client_scaling(
    population: Population, train: Train, how: Scope, client: int, given: Statistics | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and deviation by which one client's features were standardized; empty if they were not."""
    if how == "none" or not is_table(population):
        return torch.zeros(0), torch.zeros(0)
    scaling = Scaling.of(population, train, how, given or {})
    place = client if how == "client" else 0
    return torch.from_numpy(scaling.mean[place]), torch.from_numpy(scaling.deviation[place])


def pools(population: Population, train: Train, how: Scope) -> bool:
    """Whether statistics of all clients' features are needed."""
    return how == "global" or (how == "client" and len(_untrained(population, train)) > 0)


def is_table(population: Population) -> bool:
    x = population.columns["x"]
    return x.dtype == torch.float32 and x.dim() == 2


def _untrained(population: Population, train: Train) -> Ints:
    return np.setdiff1d(np.arange(len(population)), train.clients[train.sizes() > 0])


def _known(values: Floats, names: Sequence[str], given: Statistics) -> tuple[Floats, Floats, int]:
    """As `_pooled`, with what is given in its place."""
    if not given:
        return _pooled(values)
    mean, deviation = np.zeros(values.shape[1]), np.ones(values.shape[1])
    declared = np.array([name in given for name in names])
    mean[declared] = [given[name][0] for name in names if name in given]
    deviation[declared] = [given[name][1] for name in names if name in given]
    if declared.all():
        return mean, deviation, 0
    mean[~declared], deviation[~declared], floats = _pooled(values[:, ~declared])
    return mean, deviation, floats


def _pooled(values: Floats) -> tuple[Floats, Floats, int]:
    """Mean and deviation of each column over its present values, and how many floats a client sends for them."""
    present = ~np.isnan(values)
    count = np.maximum(present.sum(0), 1)
    mean = np.where(present, values, 0.0).sum(0) / count
    variance = np.where(present, (values - mean) ** 2, 0.0).sum(0) / count
    features = values.shape[1]
    counts = 1 if present.all() else features  # one count serves all features unless some have gaps
    return mean, _safe(variance, mean), 2 * features + counts


def _by_client(values: Floats, clients: Ints, sizes: Ints, total: int) -> tuple[Floats, Floats]:
    """Mean and deviation of each column over each client's present values: shape (total, columns)."""
    owner = np.repeat(clients, sizes)
    present = ~np.isnan(values)

    def sums(parts: Floats) -> Floats:
        return np.stack([np.bincount(owner, part, minlength=total) for part in parts.T], axis=1)

    count = np.maximum(sums(present.astype(np.float64)), 1.0)
    mean = sums(np.where(present, values, 0.0)) / count
    variance = sums(np.where(present, (values - mean[owner]) ** 2, 0.0)) / count
    return mean, _safe(variance, mean)


def _safe(variance: Floats, mean: Floats) -> Floats:
    """The deviation, or 1 where it is zero but for rounding (values are float32: seven digits)."""
    deviation = np.sqrt(variance)
    return np.where(deviation <= 1e-7 * np.abs(mean), 1.0, deviation)
