"""A job: one run of a comparison or tuning, and its execution in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from bespoke.callbacks.callback import Callback
from bespoke.errors import UserError
from bespoke.experiment.build import Bench, resolved, to_toml
from bespoke.experiment.config import ExperimentConfig
from bespoke.experiment.experiment import stage_key
from bespoke.federation.engine import Choice as EngineChoice
from bespoke.privacy.settings import PrivacyConfig
from bespoke.records import RunRecord
from bespoke.runs.events import Interrupted, Progress, Pruned
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.storage import write_text
from bespoke.study.references import reference

Judge = Callable[["Job", int, float], bool]  # (job, rounds done, validation metric) -> whether to continue


@dataclass(frozen=True)
class Job:
    """A run to make in a folder."""

    path: Path
    config: ExperimentConfig
    select_only: bool = False  # for tuning: never reads query rows
    own_engine: bool = False  # its model differs from that of the other jobs, so its execution is chosen separately
    judged: bool = False  # the judge gets its learning curve
    begins_with: str = ""  # a reference (see references.py) whose parameters it starts from
    privacy: PrivacyConfig | None = None  # of private runs beside this one: data are encoded alike

    @cached_property
    def stages(self) -> list[str]:
        """The names of its stages in the cache; empty for a stage without rounds, which is never stored."""
        config = resolved(self.config)
        return [stage_key(config, place) if s.get("rounds") else "" for place, s in enumerate(config["stage"])]

    def waits_for(self, other: Job, cache: Path) -> bool:
        """Whether the other, running job trains a stage that this one starts from."""
        common = set(self.stages[:-1]) & set(other.stages) - {""}
        return any(not (cache / key / "whole").exists() for key in common)

    def finished(self) -> RunRecord | None:
        """The result, if it exists; an error if the folder holds another experiment."""
        begun = self.path / "config.toml"
        if not begun.exists():
            if not (self.path / "result.json").exists():
                return None
            write_text(begun, to_toml(self.config))  # config.toml was lost; result.json identifies the run
        if begun.read_bytes() != to_toml(self.config).encode():
            raise UserError(
                f"{begun} belongs to a different experiment, or was changed; resume with the same "
                "options or choose another folder with --out"
            )
        return RunFolder(self.path).result()


def execute(
    job: Job, bench: Bench, how: EngineChoice, cache: Path, progress: Progress, stop: Callable[[], bool],
    judge: Callable[[int, float], bool], callbacks: Sequence[Callback] = (),
) -> RunRecord:  # fmt: skip
    """Makes or resumes the run in this process. `callbacks` observe; those of the experiment may end its stages."""
    if stop():  # a method without rounds does not check inside a run
        raise Interrupted(f"stopped before {job.path.name}")

    def point(rounds: int, value: float) -> None:
        if not judge(rounds, value):
            raise Pruned(job.path.name)

    experiment = bench.build(job.config, job.privacy)
    # this method may train another part of the model than the others, such as the last layer instead of a prefix
    another = any(type(stage.method.task) is not type(experiment.task) for stage in experiment.stages)
    if job.own_engine or another:
        found = bench.engine_choice(experiment)
        # beside other runs it has one thread, like they have
        how = found if how.threads > 1 or how.workers else replace(found, workers=0, threads=1)
    folder = RunFolder.create(job.path, to_toml(job.config))
    with folder.locked():
        begun = reference(job.begins_with, experiment) if job.begins_with and folder.result() is None else None
        return Run(
            experiment, folder, progress, cache, job.path.name, begun, job.select_only, how, stop,
            after_point=point if job.judged else None, callbacks=callbacks,
            name=str(job.path.relative_to(cache.parent)),
        ).run()  # fmt: skip
