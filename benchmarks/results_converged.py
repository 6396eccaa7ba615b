"""Whether methods still improved when their training ended: a column for the tables of docs/results.md.

The number is that of the report (`last_improvement`): the gain of the validation curve in the last fifth of its rounds,
in percent of its last value, as a mean over seeds. The order of two methods means something if both curves are flat.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from bespoke.errors import UserError
from bespoke.statistics import converged
from bespoke.statistics.converged import PAST_BEST, STILL_IMPROVING, in_words
from bespoke.statistics.folders import FinishedRun, read_run

HEAD = "still improving"
NOT_CONVERGED, PAST_ITS_BEST, NO_CURVE = "not converged", "past its best", "no validation curve"
NOTE = (
    "Still improving: how much the validation curve gained in the last fifth of the rounds (or of the epochs, for "
    f"methods without rounds). Above {100 * STILL_IMPROVING:g} %, a method has not converged, and its rank means "
    f"little. Past its best: the curve got worse by more than {100 * PAST_BEST:g} %, so the method was trained for too "
    "long."
)


def improvements(folder: Path) -> dict[str, float]:
    """The gain of every method of a comparison folder; NaN if there is no curve."""
    runs: dict[str, list[FinishedRun]] = {}
    for path in sorted((folder / "runs").glob("*/result.json")):
        try:
            run = read_run(path.parent)
        except UserError:
            continue  # the tables themselves refuse what they cannot read
        runs.setdefault(run.label, []).append(run)
    return {label: improvement(mine) for label, mine in runs.items()}


def improvement(runs: Sequence[FinishedRun]) -> float:
    """The gain of one method, by the metric of its runs."""
    result = runs[0].result
    return converged.improvement(runs, str(result["metric"]), bool(result["lower_is_better"]))


def column(folder: Path) -> dict[str, str]:
    """The cell of every method of a comparison folder."""
    return {label: in_words(gain) for label, gain in improvements(folder).items()}


def unsettled(folder: Path, titles: Mapping[str, str] | None = None) -> dict[str, str]:
    """The methods of a comparison folder that cannot be judged, with the reason.

    `titles`: the names of the methods in the result; other methods are left out.
    """
    gains = improvements(folder)
    names = {label: label for label in gains} if titles is None else titles
    found = {names[label]: reason(gain) for label, gain in gains.items() if label in names}
    return {name: why for name, why in found.items() if why}


def reason(gain: float) -> str:
    """Why the rank of a method means little; empty if its validation curve is flat at the end."""
    if not math.isfinite(gain):
        return NO_CURVE
    return PAST_ITS_BEST if gain < -PAST_BEST else NOT_CONVERGED if gain > STILL_IMPROVING else ""


def sentence(cells: dict[str, str]) -> str:
    """A line under a table that has no room for the column."""
    known = {name: text for name, text in cells.items() if text != "–"}
    if not known:
        return "No validation curve is long enough to show whether a method still improved."
    return f"{NOTE} {'; '.join(f'{name} {text}' for name, text in known.items())}."
