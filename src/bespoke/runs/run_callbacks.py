"""Calls the callbacks of a run, and asks which of them end its stages."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from bespoke.callbacks.callback import (
    Callback,
    CheckpointEvent,
    Curve,
    EndEvent,
    EvaluationEvent,
    Event,
    RoundEvent,
    decides,
)
from bespoke.errors import UserError
from bespoke.experiment.callbacks import check_foreseen, made, name_of
from bespoke.experiment.experiment import Experiment
from bespoke.plain import Named
from bespoke.records import RoundLine, RunRecord, StoppedStage
from bespoke.runs.events import Interrupted, Pruned
from bespoke.runs.folder import RunFolder
from bespoke.statistics.parts import without_names


def notify(callbacks: Sequence[Callback], moment: str, event: Event) -> None:
    """Calls every callback. An exception in one ends the run, with the callback's name and place."""
    for callback in callbacks:
        try:
            getattr(callback, moment)(event)
        except (UserError, Interrupted, Pruned):
            raise
        except Exception as error:
            raise callback_failed(
                callback, moment, f"{event.run}, round {event.round} of stage {event.stage}", error
            ) from error


def callback_failed(callback: Callback, moment: str, where: str, error: Exception) -> UserError:
    *_, last = traceback.extract_tb(error.__traceback__)
    return UserError(
        f"the callback {type(callback).__name__} failed in {moment} ({where}): {type(error).__name__}: {error} "
        f"({last.filename}, line {last.lineno}); correct it, or leave it out, and resume the run"
    )


class RunCallbacks:
    """Calls the callbacks of a run for each log line, and asks the deciding ones.

    A decision is a function of the stage's curve, which is read from the log. So a run that was killed and resumed ends
    its stages in the same rounds.
    """

    def __init__(
        self, experiment: Experiment, folder: RunFolder, name: str = "", callbacks: Sequence[Callback] | None = None
    ) -> None:
        """`callbacks`: the observers; None: those of the experiment. Only the experiment's own may end a stage."""
        self.experiment, self.folder, self.name = experiment, folder, name or folder.path.name
        own = made(experiment.config.get("callbacks", {}), "callbacks")
        self.callbacks = own if callbacks is None else callbacks
        deciding = {name_of(each): each for each in (*self.callbacks, *own) if decides(type(each))}
        self.deciding = deciding
        if deciding:
            check_foreseen(experiment, list(deciding))
        self.stage, self.before = 0, 0  # rounds of earlier stages
        self.points: list[tuple[int, float | None]] = []

    def enter(self, stage: int) -> None:
        """Moves to a stage: to its beginning, or to the end of its log."""
        lines = self.folder.read_log("rounds.jsonl")
        self.stage, self.before = stage, sum(line["round"] > 0 for line in lines if line["stage"] < stage)
        self.points = self._points(lines, stage)

    def line(self, line: RoundLine) -> None:
        """Reports a line of the log to the callbacks."""
        number, validation = line["round"], line.get("validation")
        self.points += self._points([line], self.stage)
        if not self.callbacks:
            return
        place = self._place(number)
        if number:
            numbers = {k: float(v) for k, v in (line.get("observed") or {}).items() if isinstance(v, int | float)}
            spent = line.get("privacy")
            notify(self.callbacks, "on_round", RoundEvent(
                **place, clients=line["clients"], dropped=line["dropped"], examples=line["examples"],
                steps=line["steps"], bytes_down=line["bytes_down"], bytes_up=line["bytes_up"],
                epsilon={"released": spent["released"], "messages": spent["messages"]} if spent else {},
                observed=numbers,
            ))  # fmt: skip
        if validation:
            notify(self.callbacks, "on_evaluation", EvaluationEvent(**place, validation=validation, curve=self.curve))

    def saved(self, number: int) -> None:
        """Reports the checkpoint after a round."""
        if self.callbacks:
            path = self.folder.checkpoint_path(self.stage, number)
            notify(self.callbacks, "on_checkpoint", CheckpointEvent(**self._place(number), path=path))

    def ended(self, result: RunRecord, scores: dict[str, float | None]) -> None:
        """Reports the end of the run."""
        if self.callbacks:
            last = max((line["round"] for line in self.folder.read_log("rounds.jsonl")
                        if line["stage"] == self.stage), default=0)  # fmt: skip
            stopped = tuple(result.get("stopped") or ())
            plain = without_names(result) if "excluded" in result else dict(result)
            notify(
                self.callbacks, "on_end", EndEvent(**self._place(last), result=plain, scores=scores, stopped=stopped)
            )

    # -- who decides ---------------------------------------------------------------------------------------------------
    @property
    def curve(self) -> Curve:
        return self._curve(self.points)

    @property
    def stops(self) -> bool:
        """Whether a callback ends the stage here."""
        return self._why(self.curve) is not None

    def stopped(self) -> list[StoppedStage]:
        """The stages that callbacks ended, after which round, and why."""
        if not self.deciding:
            return []
        lines, found = self.folder.read_log("rounds.jsonl"), []
        for place, stage in enumerate(self.experiment.stages):
            why = self._why(self._curve(self._points(lines, place)))
            last = max((line["round"] for line in lines if line["stage"] == place), default=0)
            if why and last < stage.rounds:
                by, reason = why
                found.append(StoppedStage(
                    stage=place, method=stage.method.card.name, round=last, of=stage.rounds, by=by, why=reason
                ))  # fmt: skip
        return found

    def _why(self, curve: Curve) -> tuple[str, str] | None:
        """The callback that ends the stage here, and its reason."""
        for name, callback in self.deciding.items() if curve.rounds else ():
            try:
                reason = callback.ends(curve)
            except Exception as error:
                raise callback_failed(callback, "ends", self.name, error) from error
            if reason:
                return name, str(reason)
        return None

    def _points(self, lines: Sequence[RoundLine], stage: int) -> list[tuple[int, float | None]]:
        metric = self.experiment.metric
        return [(s["round"], seen[metric]) for s in lines if s["stage"] == stage and (seen := s.get("validation"))]

    def _curve(self, points: Sequence[tuple[int, float | None]]) -> Curve:
        rounds, values = tuple(number for number, _ in points), tuple(value for _, value in points)
        return Curve(self.experiment.metric, self.experiment.lower_is_better, rounds, values)

    def _place(self, number: int) -> Named:
        experiment = self.experiment
        return {
            "run": self.name, "folder": self.folder.path, "label": experiment.label, "seed": experiment.seed,
            "config": experiment.config, "metric": experiment.metric, "lower_is_better": experiment.lower_is_better,
            "stage": self.stage, "method": experiment.stages[self.stage].method.card.name, "round": number,
            "step": self.before + number,
        }  # fmt: skip
