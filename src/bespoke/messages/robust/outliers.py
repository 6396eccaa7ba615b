"""Warns about clients with far larger changes than others, if no robust rule is set."""

from __future__ import annotations

import math
from statistics import median

FAR = 100.0  # times the cohort's median norm
FEWEST = 3  # least number of clients for a meaningful median


def outliers(norms: dict[int, float]) -> list[int]:
    """The clients of a cohort whose change is over a hundred times as long as the median's."""
    if len(norms) < FEWEST:
        return []
    middle = median(norms.values())
    return sorted(client for client, norm in norms.items() if norm > FAR * middle and math.isfinite(middle))


def warning(who: str, norms: dict[int, float], client: int) -> str:
    """The warning for the user."""
    middle = median(norms.values())
    times = f"{norms[client] / middle:,.0f} times" if middle else "far above"
    return (
        f"{who} sent a change of norm {norms[client]:.3g}, {times} the cohort's median: the shared model follows it. "
        "Look at its rows, or bound what one client can do: [robust] rule = 'geometric-median' (docs/robust.md)"
    )
