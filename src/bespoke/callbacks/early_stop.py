"""Ends a stage's training when the validation score has stopped improving."""

from __future__ import annotations

from dataclasses import dataclass

from bespoke.callbacks.callback import Callback, Curve
from bespoke.method import knob


@dataclass(frozen=True)
class EarlyStop(Callback):
    """Ends a stage after `patience` points of its learning curve that are no better than the best one before them.

    The model is that of the last round, as it is without it. Points are `evaluate_every` rounds apart.
    """

    patience: int = knob(5, "points of the learning curve without an improvement", ge=1)
    least: float = knob(0.0, "what counts as an improvement, in the metric's own units: more than this", ge=0)

    def ends(self, curve: Curve) -> str:
        if not curve.values:
            return ""
        best = curve.best(self.least)
        waited = len(curve.values) - 1 - best
        if waited < self.patience:
            return ""
        value = curve.values[best]
        found = "diverged" if value is None else f"{value:.4g}"
        return f"validation {curve.metric} was best after round {curve.rounds[best]} ({found})"
