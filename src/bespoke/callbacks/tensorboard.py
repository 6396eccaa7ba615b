"""Curves, settings and final scores of runs, for TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bespoke.callbacks.callback import Callback, CheckpointTold, EndTold, EvaluationTold, RoundTold, Told
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

    def _write(self, told: Told, scalars: dict[str, float]) -> None:
        if told.run not in self._writers:
            # what a run that is resumed tells again takes the place of what was told before
            self._writers[told.run] = _summary_writer()(str(Path(self.folder) / told.run), purge_step=told.step)
        for name, value in scalars.items():
            self._writers[told.run].add_scalar(name, value, told.step)

    def on_round(self, told: RoundTold) -> None:
        self._write(told, round_scalars(told))

    def on_evaluation(self, told: EvaluationTold) -> None:
        self._write(told, validation_scalars(told))
        self._writers[told.run].flush()

    def on_checkpoint(self, told: CheckpointTold) -> None:
        if told.run in self._writers:
            self._writers[told.run].flush()

    def on_end(self, told: EndTold) -> None:
        from torch.utils.tensorboard.summary import hparams

        scores = final_scalars(told)
        self._write(told, scores)
        writer = self._writers.pop(told.run)
        for summary in hparams(flat(told.config), scores):
            writer.file_writer.add_summary(summary)
        writer.close()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise needs_extra("tensorboard", "tensorboard", "the callback TensorBoard") from None
    return SummaryWriter
