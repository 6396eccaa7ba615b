"""What every analysis says of a set of personal models, and what the names of candidates tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bespoke.selection import Floats

NOMINAL = ("cluster", "model")  # numbers that are names: nothing lies between cluster 1 and cluster 2


def measured(values: Floats, shared: Floats, lower_is_better: bool) -> dict[str, Any]:
    """Mean and spread over clients, who is hurt against the shared model, and quantiles of the change."""
    known = np.isfinite(values) & np.isfinite(shared)
    mine, theirs = values[known], shared[known]
    if not len(mine):
        return {"clients": 0, "mean": None, "sd": None, "shared": None, "hurt": None, "helped": None, "change": None}
    change = mine - theirs
    worse, better = (change > 0, change < 0) if lower_is_better else (change < 0, change > 0)
    return {
        "clients": len(mine),
        "mean": float(mine.mean()),
        "sd": float(mine.std()),
        "shared": float(theirs.mean()),
        "hurt": float(worse.mean()),
        "helped": float(better.mean()),
        "change": [float(q) for q in np.quantile(change, [0.1, 0.25, 0.5, 0.75, 0.9])],
    }


def mean(values: Floats) -> float | None:
    """Over clients that have a value; None where nobody has, or where it is not finite."""
    known = values[~np.isnan(values)]
    found = float(known.mean()) if len(known) else math.nan
    return found if math.isfinite(found) else None


def settings_of(name: str) -> dict[str, float]:
    """'lr 0.01, epoch 3' -> {'lr': 0.01, 'epoch': 3.0}; nothing where a candidate's name is not of this form."""
    found: dict[str, float] = {}
    for part in name.split(", "):
        word, _, value = part.rpartition(" ")
        try:
            found[word] = float(value)
        except ValueError:
            return {}
        if not word or word in NOMINAL:
            return {}
    return found


def axes_of(names: Sequence[str]) -> list[str]:
    """What the candidates differ in, as in ['lr', 'epoch']; the last one changes fastest."""
    return list(dict.fromkeys(word for name in names[1:] for word in settings_of(name)))


def named(settings: dict[str, float]) -> str:
    return ", ".join(f"{word} {value:g}" for word, value in settings.items())
