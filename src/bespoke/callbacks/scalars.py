"""Converts callback events into the flat names and numbers that experiment trackers store."""

from __future__ import annotations

import math

from bespoke.callbacks.callback import EndEvent, EvaluationEvent, RoundEvent
from bespoke.plain import JsonObject


def round_scalars(event: RoundEvent) -> dict[str, float]:
    """The numbers of a round."""
    counts = {
        "round/clients": event.clients, "round/dropped": event.dropped, "round/examples": event.examples,
        "round/steps": event.steps, "traffic/bytes_down": event.bytes_down, "traffic/bytes_up": event.bytes_up,
    }  # fmt: skip
    spent = {f"privacy/epsilon_{view}": value for view, value in event.epsilon.items()}
    return _finite(counts | spent | {f"observed/{name}": value for name, value in event.observed.items()})


def validation_scalars(event: EvaluationEvent) -> dict[str, float]:
    """The means over validation clients."""
    return _finite({f"validation/{name}": value for name, value in event.validation.items()})


def final_scalars(event: EndEvent) -> dict[str, float]:
    """The means over tested clients; for a tuning run, which tests nobody, the means over validation clients."""
    scores: dict[str, float | None] = {f"final/{name}": value for name, value in event.scores.items()}
    return _finite(scores or {f"final/validation_{event.metric}": event.result.get("validation")})


def flat(tables: JsonObject, before: str = "") -> dict[str, str | int | float | bool]:
    """Nested tables as names with dots; lists become text."""
    found: dict[str, str | int | float | bool] = {}
    for name, value in tables.items():
        key = f"{before}{name}"
        if isinstance(value, dict):
            found |= flat(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            for place, entry in enumerate(value):
                found |= flat(entry, f"{key}.{place}.")
        else:
            found[key] = value if isinstance(value, str | int | float | bool) else str(value)
    return found


def _finite(values: JsonObject) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
