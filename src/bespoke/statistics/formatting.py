"""Numbers as text, with as many digits as are meaningful."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bespoke.statistics.significance import Interval

FINEST_PERCENT = 2  # decimals: nobody minds a change of less than a hundredth of a percent
MOST_PERCENT = 1_000  # beyond this only the order of magnitude is wrong or right, and no digit means anything
_NAMES = {"mse": "MSE", "rmse": "RMSE", "mae": "MAE", "auc": "AUC", "r2": "R²", "half_mse": "half MSE", "f1": "F1"}
UNDEFINED = "–"


def metric_name(metric: str) -> str:
    return _NAMES.get(metric, metric.replace("_", " "))


def number(value: float, digits: int = 4) -> str:
    """A number with this many significant digits."""
    if not math.isfinite(value):
        return UNDEFINED
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}".replace("-", "−")
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{decimals}f}".replace("-", "−")


def signed(value: float, digits: int = 3) -> str:
    return f"+{number(value, digits)}" if value > 0 else number(value, digits)


def with_interval(
    value: float, interval: Interval, sign: float = 1.0, most: int = 9, cap: float = math.inf
) -> tuple[str, str, str]:
    """A number and the ends of its interval (times sign), to two significant digits of the interval's width."""
    width = interval.high - interval.low
    if not math.isfinite(width) or width <= 0:
        return capped(value, number(value, 3), cap), UNDEFINED, UNDEFINED
    decimals = min(max(1 - math.floor(math.log10(width)), 0), most)
    low, high = sorted((sign * interval.low, sign * interval.high))
    value_text, low_text, high_text = (
        capped(x, f"{x:,.{decimals}f}".replace("-", "−"), cap) for x in (value, low, high)
    )
    return value_text, low_text, high_text


def capped(value: float, text: str, cap: float = MOST_PERCENT) -> str:
    """The text of a value, or that it lies beyond the cap on either side."""
    if not abs(value) > cap:
        return text
    return f"over {cap:,.0f}" if value > 0 else f"below −{cap:,.0f}"


def percent(value: float) -> str:
    """A percentage without its sign: one decimal, none above 99.5, two significant digits below 0.1; capped."""
    if math.isnan(value):
        return UNDEFINED
    if abs(value) > MOST_PERCENT:
        return capped(value, "")
    if 0 < abs(value) < 0.095:
        return number(value, 1)
    text = f"{value:,.0f}" if abs(value) >= 99.5 or value == 0 else f"{value:.1f}"
    return text.replace("-", "−")


def signed_percent(value: float) -> str:
    """A change in percent with its sign."""
    return f"{'+' if 0 < value <= MOST_PERCENT else ''}{percent(value)} %"


def p_text(p: float) -> str:
    if not math.isfinite(p):
        return "p unknown"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def size(byte_count: float) -> str:
    """Bytes in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if byte_count >= factor:
            return f"{number(byte_count / factor, 3)} {unit}"
    return f"{byte_count:.0f} B"


def count(how_many: int, what: str) -> str:
    return f"{how_many:,} {what}{'' if how_many == 1 else 's'}"


def shorten(text: str, longest: int = 28) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def listing(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "no method"


def jsonable(value: Any, digits: int) -> Any:
    """Round floats to significant digits and turn what JSON cannot say (NaN, infinity) into null."""
    if isinstance(value, dict):
        return {str(key): jsonable(item, digits) for key, item in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, Iterable):
        return [jsonable(item, digits) for item in value]
    return str(value)
