"""The cost of a method in bytes and steps, from the ledgers of its runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bespoke.statistics.folders import FinishedRun


@dataclass(frozen=True)
class Cost:
    """What a method costs: medians over seeds. `per client` means one that takes part in every round."""

    rounds: float
    bytes_down: float  # per client
    bytes_up: float
    bytes_down_round: float  # per client and round, median over rounds
    bytes_up_round: float
    bytes_down_total: float
    bytes_up_total: float
    steps: float  # per client, training and personalization
    steps_total: float
    personalization_steps: float  # per tested client
    personalization_bytes: float

    @property
    def bytes(self) -> float:
        """Down and up, per client."""
        return self.bytes_down + self.bytes_up


def cost_of(runs: Sequence[FinishedRun]) -> Cost:
    """The medians over these runs, seeds of one method."""
    costs = [_of_run(run) for run in runs]
    return Cost(**{name: float(median(getattr(cost, name) for cost in costs)) for name in Cost.__dataclass_fields__})


def _of_run(run: FinishedRun) -> Cost:
    down: list[float] = []
    up: list[float] = []
    steps = personal_steps = personal_bytes = 0.0
    tested = max(int(run.result.get("clients", 0)), 1)
    for line in run.lines("ledger.jsonl"):
        if line.get("round") is None:
            personal_steps += line.get("steps", 0) / (line.get("contacted") or tested)
            personal_bytes += line.get("bytes_down", 0) / (line.get("contacted") or tested)
        elif line.get("contacted"):
            reported = line.get("reported") or line["contacted"]
            down.append(line.get("bytes_down", 0) / line["contacted"])
            up.append(line.get("bytes_up", 0) / reported)
            steps += line.get("steps", 0) / reported
    result = run.result
    return Cost(
        rounds=result.get("rounds", len(down)),
        bytes_down=math.fsum(down) + personal_bytes,
        bytes_up=math.fsum(up),
        bytes_down_round=median(down) if down else 0.0,
        bytes_up_round=median(up) if up else 0.0,
        bytes_down_total=result.get("bytes_down", 0),
        bytes_up_total=result.get("bytes_up", 0),
        steps=steps + personal_steps,
        steps_total=result.get("steps", 0),
        personalization_steps=personal_steps,
        personalization_bytes=personal_bytes,
    )
