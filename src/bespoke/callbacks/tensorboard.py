"""Writes learning curves, settings and final scores of runs to TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bespoke.callbacks.callback import Callback, CheckpointEvent, EndEvent, EvaluationEvent, Event, RoundEvent
from bespoke.callbacks.scalars import final_scalars, flat, round_scalars, validation_scalars
from bespoke.errors import needs_extra
from bespoke.method import knob


@dataclass
class TensorBoard(Callback):
    """Writes event files: a folder for each run, below `folder`. Look at them with `tensorboard --logdir FOLDER`."""

    folder: str | Path = knob("logs", "where event files are written")
    _writers: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        _summary_writer()  # refused before the work, if it is missing

    def _write(self, event: Event, scalars: dict[str, float]) -> None:
        if event.run not in self._writers:
            # what a run that is resumed tells again takes the place of what was told before
            self._writers[event.run] = _summary_writer()(str(Path(self.folder) / event.run), purge_step=event.step)
        for name, value in scalars.items():
            self._writers[event.run].add_scalar(name, value, event.step)

    def on_round(self, event: RoundEvent) -> None:
        self._write(event, round_scalars(event))

    def on_evaluation(self, event: EvaluationEvent) -> None:
        self._write(event, validation_scalars(event))
        self._writers[event.run].flush()

    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if event.run in self._writers:
            self._writers[event.run].flush()

    def on_end(self, event: EndEvent) -> None:
        from torch.utils.tensorboard.summary import hparams

        scores = final_scalars(event)
        self._write(event, scores)
        writer = self._writers.pop(event.run)
        for summary in hparams(flat(event.config), scores):
            writer.file_writer.add_summary(summary)
        writer.close()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise needs_extra("tensorboard", "tensorboard", "the callback TensorBoard") from None
    return SummaryWriter
