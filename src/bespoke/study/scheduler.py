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
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

from bespoke.callbacks.callback import Callback
from bespoke.data.population import Population
from bespoke.devices import chosen, elsewhere
from bespoke.digests import read_json, sealed
from bespoke.errors import RemoteLost, UserError
from bespoke.experiment.build import Bench, resolved
from bespoke.experiment.config import EngineConfig
from bespoke.federation.engine import Choice as EngineChoice
from bespoke.imported import bound_to_this_process, only_here
from bespoke.records import RunRecord
from bespoke.runs.events import Interrupted, Progress, Pruned, Silent
from bespoke.storage import write_text
from bespoke.study.job import Job, Judge, execute
from bespoke.study.ray_runs import RayRuns
from bespoke.study.run_pool import RunPool
from bespoke.study.run_process import RunProcess

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
    `cluster`: of Ray, over which runs are spread; None: processes of this machine.
    """

    def __init__(
        self, population: Population, folder: Path, most: int | None = 1, expected: int = 1,
        progress: Progress | None = None, stop: Callable[[], bool] = lambda: False, how: EngineChoice | None = None,
        callbacks: Sequence[Callback] = (), meanwhile: Callable[[], None] | None = None,
        cluster: EngineConfig | None = None,
    ) -> None:  # fmt: skip
        self.bench, self.folder, self.cache = Bench(population, folder), folder, folder / "stages"
        self.most, self.expected, self.most_is_given = most, expected, most is not None
        self.progress, self.stop, self.how = progress or Silent(), stop, how
        self.meanwhile = meanwhile
        self.callbacks = callbacks  # called in this process, wherever a run is made
        self.engine_file = "engine.json"  # how clients are executed; one file per model
        self.on_ray = RayRuns(cluster.address, folder, self.progress.note) if cluster else None
        self.elsewhere = elsewhere(cluster.device) if cluster else nullcontext()
        self.pool: RunPool | RayRuns | None = None  # once it is known that several runs are made at a time
        self.spent, self.made, self.bars = 0.0, 0, False

    def __enter__(self) -> Jobs:
        self.elsewhere.__enter__()
        if self.cache.exists():
            for leftover in self.cache.glob(".*"):  # leftovers of a process that was killed while it stored a stage
                shutil.rmtree(leftover, ignore_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pool:
            self.pool.close()
        self.elsewhere.__exit__(None, None, None)

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
            if self._apart() and self.pool is None:
                self.pool = self._new_pool(self._together_at_most())
            if self.on_ray or (self.most_is_given and self.most != 1):
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
            self.how = self.bench.engine_choice(self.bench.build(job.config, job.privacy))
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.folder / self.engine_file, json.dumps(sealed(self.how.to_json()), indent=1))
            self.progress.note(f"engine: {self.how.text()}")
        if (self.on_ray or self.most != 1) and (bound := bound_to_this_process(resolved(job.config))):
            if self.on_ray:
                raise UserError(f"engine.backend = 'ray': {only_here(bound[0])}")
            if self.most_is_given:
                raise UserError(f"{self.most} runs at a time, in processes of their own: {only_here(bound[0])}")
            self.most = 1
        if (self.on_ray or (self.most_is_given and self.most != 1)) and job.config.engine.workers:
            raise UserError(
                f"{self.most or 'several'} runs at a time, each with engine.workers = {job.config.engine.workers} "
                "processes: give one of the two, --jobs or --workers"
            )
        assert self.how is not None
        # also for runs made before the processes start: the bits of a result must not depend on the clock
        return replace(self.how, workers=0, threads=1) if self._apart() else self.how

    def _apart(self) -> bool:
        """Whether runs are made in processes of their own."""
        return self.on_ray is not None or self._together_at_most() != 1

    def _new_pool(self, size: int) -> RunPool | RayRuns:
        shared = self.bench.population, self.cache, size, self.callbacks
        if self.on_ray is None:
            return RunPool(*shared)
        gpus = self.how is not None and self.how.device.startswith("cuda")
        self.on_ray.prepare(*shared, gpus)
        return self.on_ray

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
            assert self.how is not None
            if self.on_ray:
                self.most = self.on_ray.most(self.how, self.expected)
            else:
                cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
                self.most = cores if self.expected > 1 and not self.how.workers else 1
        return self.most

    def text(self) -> str:
        """How the runs were executed, in words; also when all were finished before."""
        if self.how is None and not self._read_engine():
            return ""
        assert self.how is not None
        if not self._apart():
            return self.how.text()
        where = "spread over a Ray cluster" if self.on_ray else f"{self.most} runs at a time"
        return f"{replace(self.how, workers=0, threads=1).text()}; {where}"

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
            for process in self.pool.heard(busy, 0.2):
                asked = process.job
                try:
                    ended = process.receive(judge)
                except RemoteLost as lost:
                    trouble = trouble or self._replace(process, asked, lost, queue)
                    continue
                except Exception as error:
                    trouble = trouble or error
                    continue
                if ended is not None:
                    job, result = ended
                    queue.finish(job, result)
                    self.progress.advance(1)
        if trouble is not None:
            raise trouble

    def _replace(self, process: RunProcess, job: Job | None, lost: RemoteLost, queue: _Queue) -> BaseException | None:
        """The process is gone: its run goes on in another one, from its last checkpoint. Returns why it cannot."""
        assert self.pool is not None
        try:
            self.pool.replace(process, lost)
        except Exception as error:
            return error
        if job is not None:
            queue.held.insert(0, job)
        return None


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
