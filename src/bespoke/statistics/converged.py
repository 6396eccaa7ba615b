"""Whether a method had stopped improving when its training ended, by its validation curve, in numbers and in words.

The order of two methods means something where the curves of both are flat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from bespoke.statistics.candidates import named, settings_of
from bespoke.statistics.folders import FinishedRun, numbered
from bespoke.statistics.formatting import percent

STILL_IMPROVING = 0.01  # of a validation curve in the last fifth of its rounds: it has not converged
PAST_BEST = 0.02  # by which a validation curve got worse in the last fifth of its rounds: it was trained for too long


def in_words(gain: float) -> str:
    """A gain in the last fifth of a curve, and whether it is too large; a curve that got worse does not improve."""
    if gain < -PAST_BEST:
        return f"no, past its best by {percent(-100 * gain)} %"
    if not 100 * gain >= 0.05:
        return "no" if math.isfinite(gain) else "–"
    return f"{percent(100 * gain)} %" + (", not converged" if gain > STILL_IMPROVING else "")


def improvement(runs: Sequence[FinishedRun], metric: str, lower: bool) -> float:
    """Of one method, by its rounds; local training, which has none, by its epochs. NaN where there is no curve."""
    gain = last_improvement(runs, metric, lower)
    if math.isfinite(gain) or any(run.result.get("rounds") for run in runs):
        return gain
    curves = [curve for run in runs if len(curve := epoch_curve(run)) >= 3]
    return fmean(_last_gain(curve, 0.0, lower) for curve in curves) if curves else math.nan


def last_improvement(runs: Sequence[FinishedRun], metric: str, lower: bool) -> float:
    """How much the validation curve gained in the last fifth of its rounds, relative to its end; the mean over seeds.

    Where the curve has no point a fifth of the rounds before its end, the gain since the point before is taken in
    proportion. NaN without a curve of at least ten rounds in the last stage that has rounds.
    """
    curves = [curve for run in runs if len(curve := round_curve(run, metric)) >= 2]
    gains = [_last_gain(curve, min(curve), lower) for curve in curves if max(curve) - min(curve) >= 10]
    known = [gain for gain in gains if math.isfinite(gain)]
    return fmean(known) if known else math.nan


def round_curve(run: FinishedRun, metric: str) -> dict[float, float]:
    """The validation score by round, of the last stage that has rounds."""
    lines = list(numbered(run.lines("rounds.jsonl")))
    trained = [line.get("stage") for _, line in lines if line.get("round")]
    return {
        number: float(value)
        for number, line in lines
        if trained and line.get("stage") == trained[-1]
        and (value := (line.get("validation") or {}).get(metric)) is not None and math.isfinite(value)
    }  # fmt: skip


def epoch_curve(run: FinishedRun) -> dict[float, float]:
    """The validation score by epoch of those candidates that are as the chosen one in all else."""
    chosen = settings_of(str((run.result.get("chosen") or {}).get("candidate") or ""))
    chosen.pop("epoch", None)
    curve = {}
    for name, value in (run.result.get("candidates") or {}).items():
        settings = settings_of(name)
        epoch = settings.pop("epoch", None)
        if epoch and value is not None and named(settings) == named(chosen):
            curve[epoch] = float(value)
    return curve


def _last_gain(curve: dict[float, float], start: float, lower: bool) -> float:
    """The gain in the last fifth from `start` to the end of the curve, relative to its end."""
    last = max(curve)
    fifth = (last - start) / 5
    before = max((at for at in curve if at <= last - fifth), default=min(curve))
    gain = (curve[before] - curve[last]) * (1 if lower else -1) * fifth / (last - before)
    return gain / abs(curve[last]) if curve[last] else math.nan
