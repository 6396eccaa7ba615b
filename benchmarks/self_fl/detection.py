"""Detection: false accepts and false rejects of a model, relative to those of a baseline.

A detector accepts an example whose score is at least a threshold. To compare two, their false rejects are made equal:
the relative false accepts (Self-FL, Section 4.3) are the model's false accepts over the baseline's, at the threshold
where the model's false rejects over the baseline's are about one. Below one, the model is better. The paper does not
state how many the baseline rejects; here it is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Errors:
    """Mistakes of a detector on some clips."""

    rejects: int  # of the wake word, out of `wanted`
    accepts: int  # of anything else, out of `others`
    wanted: int
    others: int


def errors_at(scores: ArrayLike, wanted: ArrayLike, threshold: float) -> Errors:
    """What is wrong when scores of `threshold` and above are accepted; `wanted` says which should be."""
    score, want = _checked(scores, wanted)
    yes = score >= threshold
    return Errors(int((~yes & want).sum()), int((yes & ~want).sum()), int(want.sum()), int((~want).sum()))


def threshold_for(scores: ArrayLike, wanted: ArrayLike, rejects: int) -> float:
    """The highest threshold that rejects at most so many of the wanted: no other with these rejects accepts less."""
    score, want = _checked(scores, wanted)
    falling = np.sort(score[want])
    if not 0 <= rejects < len(falling):
        raise ValueError(f"{rejects} of {len(falling)} wanted cannot be rejected with one accepted")
    return float(falling[rejects])  # of equal scores all are accepted: then fewer are rejected


@dataclass(frozen=True)
class Relative:
    """A model's mistakes beside the baseline's."""

    model: Errors
    baseline: Errors

    @property
    def accepts(self) -> float:
        """Relative false accepts; NaN where the baseline has none."""
        return self.model.accepts / self.baseline.accepts if self.baseline.accepts else float("nan")

    @property
    def rejects(self) -> float:
        """Relative false rejects; one where neither has any."""
        if not self.baseline.rejects:
            return 1.0 if not self.model.rejects else float("inf")
        return self.model.rejects / self.baseline.rejects


def relative(model: ArrayLike, baseline: ArrayLike, wanted: ArrayLike, rejects: float) -> Relative:
    """Scores of both on the same clips, compared where each rejects this fraction of the wanted (rounded down).

    Both get the best threshold for as many rejects, so that a model compared with itself has exactly one.
    """
    if not 0 <= rejects < 1:
        raise ValueError(f"rejects = {rejects}: a fraction of the wanted, from zero to less than one")
    allowed = int(rejects * np.asarray(wanted, dtype=bool).sum() + 1e-9)
    met = (errors_at(scores, wanted, threshold_for(scores, wanted, allowed)) for scores in (model, baseline))
    return Relative(*met)


def _checked(scores: ArrayLike, wanted: ArrayLike) -> tuple[Floats, NDArray[np.bool_]]:
    score, want = np.asarray(scores, dtype=np.float64), np.asarray(wanted, dtype=bool)
    if score.shape != want.shape or score.ndim != 1:
        raise ValueError(f"{score.shape} scores and {want.shape} clips: one score for each clip is needed")
    if np.isnan(score).any():
        raise ValueError(f"{int(np.isnan(score).sum())} scores are not numbers")
    if not want.any() or want.all():
        raise ValueError("false accepts and rejects need clips of both kinds")
    return score, want
