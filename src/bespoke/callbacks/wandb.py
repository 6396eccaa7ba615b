"""Writes learning curves, settings and final scores of runs to Weights & Biases."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

from bespoke.callbacks.callback import Callback, EndEvent, EvaluationEvent, Event, RoundEvent
from bespoke.callbacks.scalars import final_scalars, round_scalars, validation_scalars
from bespoke.errors import needs_extra
from bespoke.method import knob


@dataclass
class WandB(Callback):
    """Writes each run of bespoke as a run of W&B. Offline nothing leaves this machine until `wandb sync` sends it."""

    project: str = knob("bespoke", "the project that runs belong to")
    mode: Literal["offline", "online"] = knob("offline", "offline: files below `folder`; online: sent to the server")
    folder: str = knob(".", "where the folder wandb/ is made")
    _runs: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        _wandb()  # refused before the work, if it is missing

    def on_round(self, event: RoundEvent) -> None:
        self._write(event, round_scalars(event))

    def on_evaluation(self, event: EvaluationEvent) -> None:
        self._write(event, validation_scalars(event))

    def on_end(self, event: EndEvent) -> None:
        run = self._run(event)
        run.summary.update(final_scalars(event))
        run.finish()
        del self._runs[event.run]

    def _write(self, event: Event, scalars: dict[str, float]) -> None:
        # the step is a number of its own, as a run that is resumed tells the rounds since its checkpoint again
        self._run(event).log({"step": event.step, **scalars})

    def _run(self, event: Event) -> Any:
        if event.run not in self._runs:
            wandb = _wandb()
            run = wandb.init(
                project=self.project, name=event.run, config=event.config, dir=self.folder, mode=self.mode,
                id=hashlib.blake2b(str(event.folder.resolve()).encode(), digest_size=8).hexdigest(),
                resume="allow" if self.mode == "online" else None, reinit="create_new",
                settings=wandb.Settings(silent=True, console="off"),
            )  # fmt: skip
            run.define_metric("*", step_metric="step")
            self._runs[event.run] = run
        return self._runs[event.run]


def _wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise needs_extra("wandb", "wandb", "the callback WandB") from None
    return wandb
