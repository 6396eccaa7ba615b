"""Standardization that cannot leak: every mean and deviation comes from training rows alone.

    z = (x - mean) / deviation,   a missing value becomes 0 (the training mean)

'global' pools the training rows of all clients: sums, sums of squares and counts, which secure aggregation could give.
'client' uses each client's own training rows, which never leave it. Deviations are the population's (divided by n); a
feature that does not vary is divided by 1. The target, where asked for, is always standardized globally, so that one
unit serves all clients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.splits import Train
from bespoke.errors import UserError, unknown

How = Literal["global", "client", "none"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def standardize(population: Population, train: Train, how: How, target: bool) -> Population:
    """A new population with standardized features (and target); splits have to be made of it anew.

    Adds to `about`: `unit` and `centre` (the target's deviation and mean: y_original = y * unit + centre) and
    `statistics_floats` (how many numbers each client has to send for all this).
    """
    if how not in ("global", "client", "none"):
        raise unknown("standardization", how, ("global", "client", "none"))
    about = dict(population.about)
    columns = dict(population.columns)
    about["statistics_floats"] = 0
    if how != "none" or target:
        rows, sizes = train.of(train.clients)

    numeric = np.flatnonzero(about.get("numeric", []))
    is_table = columns["x"].dtype == torch.float32 and columns["x"].dim() == 2
    if is_table and how != "none" and len(numeric):
        x = columns["x"].numpy()
        values = x[:, numeric].astype(np.float64)
        if how == "global":
            mean, deviation, floats = _pooled(values[rows])
            about["statistics_floats"] += floats
        else:
            mean, deviation = _by_client(values[rows], train.clients, sizes, len(population))
            untrained = np.setdiff1d(np.arange(len(population)), train.clients[sizes > 0])
            if len(untrained):
                mean[untrained], deviation[untrained], floats = _pooled(values[rows])
                about["statistics_floats"] += floats
                note = f"{len(untrained)} clients have no training rows; the pooled statistics standardize them."
                about["notes"] = [*about.get("notes", []), note]
            owner = np.repeat(np.arange(len(population)), population.sizes())
            mean, deviation = mean[owner], deviation[owner]
        scaled = x.copy()
        scaled[:, numeric] = (values - mean) / deviation
        columns["x"] = torch.from_numpy(scaled)
    if is_table and about.get("missing", True):
        columns["x"] = columns["x"].nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)

    if target:
        if about.get("task") != "regression":
            raise UserError(f"only a regression's target can be standardized; the task is {about.get('task')!r}")
        y = columns["y"].numpy().astype(np.float64)
        mean, deviation, floats = _pooled(y[rows][:, None])
        about |= {"centre": float(mean[0]), "unit": float(deviation[0])}
        about["statistics_floats"] += floats
        columns["y"] = torch.from_numpy(((y - mean[0]) / deviation[0]).astype(np.float32))
    return replace(population, columns=columns, about=about)


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
