"""Executes runs one after the other, or several at a time in separate processes.

Each run has its own folder. Runs share only the data (mapped from disk) and the trained stages in `stages/`. A run that
starts from a stage which another run is training waits for it. With several at a time, every run has one thread; its
results are the same up to rounding.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType

from bespoke.callbacks.callback import Callback
from bespoke.data.population import Population
from bespoke.devices import chosen
from bespoke.digests import read_json, sealed
from bespoke.errors import UserError
from bespoke.experiment.build import Bench, resolved
from bespoke.experiment.experiment import engine_choice
from bespoke.federation.engine import Choice as EngineChoice
from bespoke.imported import bound_to_this_process, only_here
from bespoke.records import RunRecord
from bespoke.runs.events import Interrupted, Progress, Pruned, Silent
from bespoke.storage import write_text
from bespoke.study.job import Job, Judge, execute
from bespoke.study.run_pool import RunPool

_UNKNOWN_ENGINE = (
    "the execution of clients is unknown, and results would differ in their last digits: put the file back, or start "
    "in another folder with --out"
)
START_SECONDS = 4.0  # seconds to start processes; work of less than twice this stays in this process


class Jobs:
    """Makes runs of one population. Use it as a context manager, which ends its processes.

    `most`: runs at a time; None: as many as cores, if a run is light enough to share them.
    `expected`: the approximate number of runs in total.
    `meanwhile`: called in a thread, once, while this process waits for others.
    """

    def __init__(
        self, population: Population, folder: Path, most: int | None = 1, expected: int = 1,
        progress: Progress | None = None, stop: Callable[[], bool] = lambda: False, how: EngineChoice | None = None,
        callbacks: Sequence[Callback] = (), meanwhile: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.bench, self.folder, self.cache = Bench(population, folder), folder, folder / "stages"
        self.most, self.expected, self.most_is_given = most, expected, most is not None
        self.progress, self.stop, self.how = progress or Silent(), stop, how
        self.meanwhile = meanwhile
        self.callbacks = callbacks  # called in this process, wherever a run is made
        self.engine_file = "engine.json"  # how clients are executed; one file per model
        self.pool: RunPool | None = None  # once it is known that several runs are made at a time
        self.spent, self.made, self.bars = 0.0, 0, False

    def __enter__(self) -> Jobs:
        if self.cache.exists():
            for leftover in self.cache.glob(".*"):  # leftovers of a process that was killed while it stored a stage
                shutil.rmtree(leftover, ignore_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pool:
            self.pool.close()

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
        while not (self.pool and self.pool.ready):
            job = queue.next([])
            if job is None:
                return
            how = self._engine(job)
            if self._together_at_most() > 1 and self.pool is None:
                self.pool = RunPool(self.bench.population, self.cache, self._together_at_most(), self.callbacks)
            if self.most_is_given and self.most != 1:
                queue.held.insert(0, job)
                break
            if self.pool:
                self.pool.start(after=START_SECONDS)  # while this run is made; not for a short one
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
            if self.pool is None:
                continue
            self.pool.postpone()
            each = self.spent / self.made
            if queue.remaining * each > 2 * START_SECONDS:
                self.pool.start()
                if each > START_SECONDS:  # else this process makes further runs until the others are ready
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
    def _together(self, queue: _Queue, judge: Judge) -> None:
        """Gives jobs to free processes. On Ctrl-C or an error, all stop after their round, then the error is raised."""
        assert self.pool is not None
        self.progress.begin(f"{self.most} runs at a time", queue.total, queue.total - queue.remaining)
        processes = self.pool.started()
        if not self.bars:
            self.bars = True
            for process in processes:
                process.bar = getattr(self.progress, "lane", Silent)()
        trouble: BaseException | None = None
        while True:
            busy = [process for process in processes if process.job]
            if trouble is None and self.stop():
                trouble = Interrupted(f"stopped with {queue.remaining} of {queue.total} runs unfinished")
            if trouble is not None:
                for process in busy:
                    process.stop()
            for process in processes if trouble is None else []:
                if process.job is None:
                    job = queue.next([other.job for other in processes if other.job])
                    if job is None:
                        break
                    process.start(job, self._engine(job))
            busy = [process for process in processes if process.job]
            if not busy:
                break
            if self.meanwhile:
                threading.Thread(target=self.meanwhile, daemon=True).start()
                self.meanwhile = None
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
