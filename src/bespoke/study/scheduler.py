"""Executes runs one after the other, or several at a time in separate processes.

Each run has its own folder. Runs share only the data (mapped from disk) and the trained stages in `stages/`. A run that
starts from a stage which another run is training waits for it. With several at a time, every run has one thread; its
results are the same up to rounding.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

from bespoke.callbacks.callback import Callback
from bespoke.data.population import Population
from bespoke.data.shared_copy import SharedCopy
from bespoke.devices import chosen
from bespoke.digests import read_json, sealed
from bespoke.errors import UserError
from bespoke.experiment.build import Bench, resolved, to_toml
from bespoke.experiment.config import ExperimentConfig
from bespoke.experiment.experiment import engine_choice, stage_key
from bespoke.federation.engine import Choice as EngineChoice
from bespoke.imported import bound_to_this_process, only_here
from bespoke.privacy.settings import PrivacyConfig
from bespoke.records import RunRecord
from bespoke.runs.events import Interrupted, Progress, Pruned, Silent
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.storage import write_text
from bespoke.study.references import reference
from bespoke.study.run_process import RunProcess

_UNKNOWN_ENGINE = (
    "how clients are executed is not known, and results would differ in their last digits: put the file back, or begin "
    "in another folder with --out"
)
START_SECONDS = 4.0  # seconds to start processes; work of less than twice this stays in this process
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
                f"{begun} is of another experiment than the one asked for now, or was changed; resume with the same "
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
        found = engine_choice(experiment)
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


class Jobs:
    """Makes runs of one population. Use it as a context manager, which ends its processes.

    `most`: runs at a time; None: as many as cores, if a run is light enough to share them.
    `expected`: the approximate number of runs in total.
    """

    def __init__(
        self, population: Population, folder: Path, most: int | None = 1, expected: int = 1,
        progress: Progress | None = None, stop: Callable[[], bool] = lambda: False, how: EngineChoice | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:  # fmt: skip
        self.bench, self.folder, self.cache = Bench(population, folder), folder, folder / "stages"
        self.most, self.expected, self.most_is_given = most, expected, most is not None
        self.progress, self.stop, self.how = progress or Silent(), stop, how
        self.callbacks = callbacks  # called in this process, wherever a run is made
        self.engine_file = "engine.json"  # how clients are executed; one file per model
        self.processes: list[RunProcess] = []
        self.shared: SharedCopy | None = None  # the population on disk, for the processes
        self.spent, self.made = 0.0, 0

    def __enter__(self) -> Jobs:
        if self.cache.exists():
            for leftover in self.cache.glob(".*"):  # leftovers of a process that was killed while it stored a stage
                shutil.rmtree(leftover, ignore_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.close()
        self.processes = []
        if self.shared:
            self.shared.close()

    def all(self, jobs: list[Job]) -> list[RunRecord]:
        """The results of these jobs, in order."""
        results: dict[Path, RunRecord | None] = {}
        waiting = iter(jobs)
        self.run(lambda: next(waiting, None), lambda job, result: results.update({job.path: result}), len(jobs))
        return [result for job in jobs if (result := results[job.path]) is not None]  # none is pruned

    def run(
        self, source: Callable[[], Job | None], done: Callable[[Job, RunRecord | None], None], total: int,
        judge: Judge = lambda job, rounds, value: True,
    ) -> None:  # fmt: skip
        """Makes all runs that `source` gives. It is called again after each run, until it has none and none is running.

        `done` gets the result, or None for a run that the judge ended.
        """
        queue = _Queue(source, done, self.cache, total)
        while not self.processes:
            job = queue.next([])
            if job is None:
                return
            how = self._engine(job)
            if self.most_is_given and self.most != 1:
                queue.held.insert(0, job)
                break
            began = time.monotonic()
            result: RunRecord | None = None
            try:
                shown = partial(judge, job)
                result = execute(
                    job, self.bench, how, self.cache, self.progress, self.stop, shown, self.callbacks
                )  # fmt: skip
            except Pruned:
                pass
            queue.finish(job, result)
            self.spent, self.made = self.spent + time.monotonic() - began, self.made + 1
            if self.most != 1 and queue.remaining * self.spent / self.made > 2 * START_SECONDS:
                break
        self._together(queue, judge)

    # -- how ----------------------------------------------------------------------------------------------------------
    def _engine(self, job: Job) -> EngineChoice:
        """How clients are executed in all runs. The first run decides."""
        if self.how is None and not self._read_engine():
            self.how = engine_choice(self.bench.build(job.config, job.privacy))
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.folder / self.engine_file, json.dumps(sealed(self.how.to_json()), indent=1))
            self.progress.note(f"engine: {self.how.text()}")
        if self.most != 1 and (bound := bound_to_this_process(resolved(job.config))):
            if self.most_is_given:
                raise UserError(f"{self.most} runs at a time, in processes of their own: {only_here(bound[0])}")
            self.most = 1
        if self.most_is_given and self.most != 1 and job.config.engine.workers:
            raise UserError(
                f"{self.most} runs at a time, each with engine.workers = {job.config.engine.workers} processes: give "
                "one of the two, --jobs or --workers"
            )
        assert self.how is not None
        # also for runs made before the processes start: the bits of a result must not depend on the clock
        return self.how if self._together_at_most() == 1 else replace(self.how, workers=0, threads=1)

    def _read_engine(self) -> bool:
        """Reads how an earlier process executed clients; returns whether it is known."""
        path = self.folder / self.engine_file
        if path.exists():
            try:
                self.how = EngineChoice(**read_json(path, _UNKNOWN_ENGINE))
                chosen(self.how.device, "; the runs were begun on it: go on where it is, or choose another --out")
            except TypeError as error:
                raise UserError(f"{path} is damaged ({error}); {_UNKNOWN_ENGINE}") from None
        elif path.name == "engine.json" and (begun := next(self.folder.glob("*/*/engine.json"), None)):
            raise UserError(f"{path} is missing, but {begun.parent} was begun with it; {_UNKNOWN_ENGINE}")
        return self.how is not None

    def _together_at_most(self) -> int:
        """The number of runs at a time."""
        if self.most is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            self.most = cores if self.expected > 1 and self.how and not self.how.workers else 1
        return self.most

    def text(self) -> str:
        """How the runs were executed, in words; also when all were finished before."""
        if self.how is None and not self._read_engine():
            return ""
        assert self.how is not None
        if self._together_at_most() == 1:
            return self.how.text()
        return f"{replace(self.how, workers=0, threads=1).text()}; {self.most} runs at a time"

    # -- several at a time --------------------------------------------------------------------------------------------
    def _start(self, queue: _Queue) -> None:
        if self.processes:
            return
        assert self.most is not None
        self.shared = SharedCopy(self.bench.population)
        self.progress.begin(f"{self.most} runs at a time", queue.total, queue.total - queue.remaining)
        bar: Callable[[], Any] = getattr(self.progress, "lane", Silent)
        self.processes = [RunProcess(self.shared.folder, self.cache, bar(), self.callbacks) for _ in range(self.most)]

    def _together(self, queue: _Queue, judge: Judge) -> None:
        """Gives jobs to free processes. On Ctrl-C or an error, all stop after their round, then the error is raised."""
        before = bool(self.processes)
        self._start(queue)
        if before:
            self.progress.begin(f"{self.most} runs at a time", queue.total, queue.total - queue.remaining)
        trouble: BaseException | None = None
        while True:
            busy = [process for process in self.processes if process.job]
            if trouble is None and self.stop():
                trouble = Interrupted(f"stopped with {queue.remaining} of {queue.total} runs unfinished")
            if trouble is not None:
                for process in busy:
                    process.stop()
            for process in self.processes if trouble is None else []:
                if process.job is None:
                    job = queue.next([other.job for other in self.processes if other.job])
                    if job is None:
                        break
                    process.start(job, self._engine(job))
            busy = [process for process in self.processes if process.job]
            if not busy:
                break
            ready = wait([process.pipe for process in busy], timeout=0.2)
            for process in busy:
                if process.pipe not in ready:
                    continue
                try:
                    ended = process.receive(judge)
                except Exception as error:
                    trouble = trouble or error
                    continue
                if ended is not None:
                    job, result = ended
                    queue.finish(job, result)
                    self.progress.advance(1)
        if trouble is not None:
            raise trouble


@dataclass
class _Queue:
    """Remaining jobs: first those that waited for a stage of another job, then those of the source."""

    source: Callable[[], Job | None]
    done: Callable[[Job, RunRecord | None], None]
    cache: Path
    total: int
    remaining: int = 0

    def __post_init__(self) -> None:
        self.remaining, self.held = self.total, list[Job]()

    def next(self, running: list[Job]) -> Job | None:
        for job in self.held:
            if not any(job.waits_for(other, self.cache) for other in running):
                self.held.remove(job)
                return job
        while (fresh := self.source()) is not None:
            result = fresh.finished()
            if result is not None:
                self.finish(fresh, result)
            elif any(fresh.waits_for(other, self.cache) for other in running):
                self.held.append(fresh)
            else:
                return fresh
        return None

    def finish(self, job: Job, result: RunRecord | None) -> None:
        self.remaining -= 1
        self.done(job, result)
