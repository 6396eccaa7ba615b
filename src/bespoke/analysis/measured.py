"""The summary numbers that every analysis records for a set of personal models."""

from __future__ import annotations

import math

import numpy as np

from bespoke.experiment.choosing import Floats
from bespoke.statistics.analyses import AnalysisNumbers, Measured
from bespoke.storage import Columns

Found = tuple[AnalysisNumbers, Columns]  # what an analysis returns: its numbers, and a table of clients


def measured(values: Floats, shared: Floats, lower_is_better: bool) -> Measured:
    """Mean and spread over clients, clients hurt against the shared model, and quantiles of the change."""
    known = np.isfinite(values) & np.isfinite(shared)
    own, global_model = values[known], shared[known]
    if not len(own):
        return {"clients": 0, "mean": None, "sd": None, "shared": None, "hurt": None, "helped": None, "change": None}
    change = own - global_model
    worse, better = (change > 0, change < 0) if lower_is_better else (change < 0, change > 0)
    return {
        "clients": len(own),
        "mean": float(own.mean()),
        "sd": float(own.std()),
        "shared": float(global_model.mean()),
        "hurt": float(worse.mean()),
        "helped": float(better.mean()),
        "change": [float(q) for q in np.quantile(change, [0.1, 0.25, 0.5, 0.75, 0.9])],
    }


def mean(values: Floats) -> float | None:
    """The mean over clients that have a value; None if there are none, or if it is not finite."""
    known = values[~np.isnan(values)]
    found = float(known.mean()) if len(known) else math.nan
    return found if math.isfinite(found) else None
