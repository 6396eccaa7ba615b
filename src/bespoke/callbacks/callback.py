"""The contract of a callback: it observes a run and may end the training of a stage.

It is told what the logs of a run say: numbers of whole rounds, means over validation clients, and, when the run has
ended, means over query rows. Private state, single clients and their names are not among it.

Callbacks are told at least once: a run that was killed goes on from its last checkpoint and tells of the rounds after
it again. Of several runs at a time each is told in the process that was given the callback.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bespoke.plain import JsonObject, TomlTable
from bespoke.records import StoppedStage


@dataclass(frozen=True)
class Event:
    """The run and the position in it that an event belongs to."""

    run: str  # the run's folder as seen from the comparison or tuning: "runs/fedavg-seed0"
    folder: Path
    label: str
    seed: int
    config: TomlTable  # the experiment with its defaults written out
    metric: str
    lower_is_better: bool
    stage: int  # from 0
    method: str
    round: int  # of the stage, from 1; 0: before its first round
    step: int  # rounds counted through all stages


@dataclass(frozen=True)
class RoundEvent(Event):
    """A finished round. Bytes, steps and examples are sums over its clients."""

    clients: int
    dropped: int
    examples: int
    steps: int
    bytes_down: int
    bytes_up: int
    epsilon: dict[str, float | None]  # spent so far, by who looks (docs/privacy.md); None: infinite; else empty
    observed: dict[str, float]  # what the method says of the round, such as the share of the largest cluster


@dataclass(frozen=True)
class Curve:
    """A stage's learning curve so far: the mean of the metric over validation clients."""

    metric: str
    lower_is_better: bool
    rounds: tuple[int, ...]
    values: tuple[float | None, ...]  # None: training had diverged

    def best(self, least: float = 0.0) -> int:
        """The position of the best point: no later point is better by more than `least`."""
        sign = 1 if self.lower_is_better else -1
        found = 0
        for place, value in enumerate(self.values):
            before = self.values[found]
            if value is not None and (before is None or sign * value < sign * before - least):
                found = place
        return found


@dataclass(frozen=True)
class EvaluationEvent(Event):
    """A new point of the learning curve."""

    validation: dict[str, float | None]  # means over validation clients, by metric
    curve: Curve  # up to this point


@dataclass(frozen=True)
class CheckpointEvent(Event):
    """A checkpoint was written; a killed run resumes from it."""

    path: Path  # the server's state; clients' private state lies elsewhere


@dataclass(frozen=True)
class EndEvent(Event):
    """The end of a run, just before its result is written."""

    result: JsonObject  # what result.json will say, without the names of clients
    scores: dict[str, float | None]  # means over clients on query rows, by metric; empty in tuning, which has none
    stopped: tuple[StoppedStage, ...]  # stages that a callback ended: stage, method, round, of, by, why


class Callback:
    """Override what is of interest; everything else does nothing. An exception ends the run, which can be resumed.

    A callback with a method `ends` decides how long a stage trains. So it is a part of the experiment: it has to be a
    frozen dataclass, whose fields are kept in config.toml, and `ends` a function of the curve alone. It is then the
    same in a run that was killed and resumed.
    """

    def on_round(self, event: RoundEvent) -> None: ...

    def on_evaluation(self, event: EvaluationEvent) -> None: ...

    def on_checkpoint(self, event: CheckpointEvent) -> None: ...

    def on_end(self, event: EndEvent) -> None: ...

    def ends(self, curve: Curve) -> str:
        """The reason to end the stage after the curve's last round; empty to continue."""
        return ""


def decides(kind: type[Callback]) -> bool:
    """Whether callbacks of this kind are a part of the experiment."""
    return kind.ends is not Callback.ends
