"""Writes learning curves, settings and final scores of runs to MLflow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bespoke.callbacks.callback import Callback, EndEvent, EvaluationEvent, Event, RoundEvent
from bespoke.callbacks.scalars import final_scalars, flat, round_scalars, validation_scalars
from bespoke.errors import UserError, needs_extra
from bespoke.method import knob

LONGEST = 500  # characters of a parameter; longer ones are refused by some of MLflow's stores


@dataclass
class MLflow(Callback):
    """Writes each run of bespoke as a run of MLflow; a run that is resumed goes on in the same.

    Without `uri` the environment variable MLFLOW_TRACKING_URI says where; without that, the file mlflow.db here.
    """

    uri: str = knob("", "where MLflow keeps its runs: sqlite:///mlflow.db, or a server")
    experiment: str = knob("bespoke", "the experiment of MLflow that they belong to")
    _client: Any = field(default=None, init=False, repr=False)
    _runs: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise needs_extra("mlflow-skinny", "mlflow", "the callback MLflow") from None
        try:
            self._client = MlflowClient(self.uri or None)
        except Exception as error:
            raise UserError(f"MLflow(uri={self.uri!r}) cannot be opened: {type(error).__name__}: {error}") from error

    def on_round(self, event: RoundEvent) -> None:
        self._write(event, round_scalars(event))

    def on_evaluation(self, event: EvaluationEvent) -> None:
        self._write(event, validation_scalars(event))

    def on_end(self, event: EndEvent) -> None:
        self._write(event, final_scalars(event))
        self._client.set_terminated(self._runs.pop(event.run))

    def _write(self, event: Event, scalars: dict[str, float]) -> None:
        if event.run not in self._runs:
            self._runs[event.run] = self._begun(event)
        for name, value in scalars.items():
            self._client.log_metric(self._runs[event.run], name, value, step=event.step)

    def _begun(self, event: Event) -> str:
        """The MLflow run for a run of bespoke: the existing one of this folder, or a new one with its settings."""
        found = self._client.get_experiment_by_name(self.experiment)
        place = found.experiment_id if found else self._client.create_experiment(self.experiment)
        folder = str(event.folder.resolve())
        quoted = folder.replace("'", "\\'")
        earlier = self._client.search_runs([place], f"tags.`bespoke.folder` = '{quoted}'", max_results=1)
        if earlier:
            return str(earlier[0].info.run_id)
        run = self._client.create_run(place, run_name=event.run, tags={"bespoke.folder": folder}).info.run_id
        for name, value in flat(event.config).items():
            self._client.log_param(run, name, str(value)[:LONGEST])
        return str(run)
