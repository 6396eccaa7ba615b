"""Executes runs one after the other, or several at a time in processes of their own.

Each run has a folder of its own, so nothing is shared but the data (mapped from disk) and the trained stages in
`stages/`: a run that starts from a stage which another one is training waits for it. Several at a time, every run has
one thread; what it computes is the same up to rounding.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any

from bespoke.callbacks.callback import Callback
from bespoke.data.population import Population
from bespoke.devices import chosen, elsewhere
from bespoke.digests import read_json, sealed
from bespoke.errors import UserError
from bespoke.experiment.build import Bench, resolved, to_toml
from bespoke.experiment.config import EngineConfig, ExperimentConfig
from bespoke.experiment.experiment import engine_choice, stage_key
from bespoke.federation.engine import Choice as EngineChoice
from bespoke.federation.processes import RemoteLost
from bespoke.imported import bound_to_this_process, only_here
from bespoke.privacy.settings import PrivacyConfig
from bespoke.records import RunRecord
from bespoke.runs.events import Interrupted, Progress, Pruned, Silent
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.storage import write_text
from bespoke.study.ray_runs import RayRuns
from bespoke.study.references import reference
from bespoke.study.run_process import Processes, RunProcess

_UNKNOWN_ENGINE = (
    "how clients are executed is not known, and results would differ in their last digits: put the file back, or begin "
    "in another folder with --out"
)
START_SECONDS = 4.0  # what starting processes costs; work that is shorter than twice that is done before they are up
Judge = Callable[["Job", int, float], bool]  # (job, rounds done, validation metric) -> worth going on


@dataclass(frozen=True)
class Job:
    """A run to be made in a folder."""

    path: Path
    config: ExperimentConfig
    select_only: bool = False  # for tuning: never looks at query rows
    own_engine: bool = False  # its model is not that of the other jobs: how to execute it is found out anew
    judged: bool = False  # its learning curve is shown to the judge
    begins_with: str = ""  # a reference (see references.py) whose parameters it starts from
    privacy: PrivacyConfig | None = None  # of the runs beside one that is not private: it sees the data as they do

    @cached_property
    def stages(self) -> list[str]:
        """What the cache calls its stages; empty for one without rounds, which is never there."""
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
            write_text(begun, to_toml(self.config))  # it was lost; result.json tells whether it was this one
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
    """Makes or resumes the run in this process. `callbacks` observe it; those of the experiment may end its stages."""
    if stop():  # a method without rounds is never asked inside a run
        raise Interrupted(f"stopped before {job.path.name}")

    def point(rounds: int, value: float) -> None:
        if not judge(rounds, value):
            raise Pruned(job.path.name)

    experiment = bench.build(job.config, job.privacy)
    # a method may learn another part of the model than the others do, such as the last layer in place of a prefix
    another = any(type(stage.method.task) is not type(experiment.task) for stage in experiment.stages)
    if job.own_engine or another:
        found = engine_choice(experiment)
        # alone in its process it may use what it likes; beside others it is as narrow as they are
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
    """Makes runs of one population. Use as a context manager: its processes end with it.

    `most`: how many at a time; None: as many as there are cores, if a run is light enough to share them.
    `expected`: about how many runs there will be in all.
    """

    def __init__(
        self, population: Population, folder: Path, most: int | None = 1, expected: int = 1,
        progress: Progress | None = None, stop: Callable[[], bool] = lambda: False, how: EngineChoice | None = None,
        callbacks: Sequence[Callback] = (), places: EngineConfig | None = None,
    ) -> None:  # fmt: skip
        """`places`: the Ray cluster over which runs are spread, if not processes of this machine."""
        self.bench, self.folder, self.cache = Bench(population, folder), folder, folder / "stages"
        self.most, self.expected, self.told = most, expected, most is not None
        self.progress, self.stop, self.how = progress or Silent(), stop, how
        self.callbacks = callbacks  # told here, wherever a run is made
        self.engine_file = "engine.json"  # how clients are executed; another model has another
        self.processes: list[RunProcess] = []
        self.places = places
        self.pool: Processes | RayRuns = RayRuns(places.address, folder, self.progress.note) if places else Processes()
        self.far = elsewhere(places.device) if places else nullcontext()
        self.spent, self.made = 0.0, 0

    def __enter__(self) -> Jobs:
        self.far.__enter__()
        if self.cache.exists():
            for left in self.cache.glob(".*"):  # by a process that was killed while it put a stage there
                shutil.rmtree(left, ignore_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.close()
        self.processes = []
        self.pool.close()
        self.far.__exit__(None, None, None)

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
        """Make all runs that `source` gives; it is asked again after each, until it has none and none is going on.

        `done` is told the result, None of a run that the judge ended.
        """
        queue = _Queue(source, done, self.cache, total)
        while not self.processes:
            job = queue.next([])
            if job is None:
                return
            how = self._engine(job)
            if self.places or (self.told and self.most != 1):
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
            if self.most != 1 and queue.left * self.spent / self.made > 2 * START_SECONDS:
                break
        self._together(queue, judge)

    # -- how ----------------------------------------------------------------------------------------------------------
    def _engine(self, job: Job) -> EngineChoice:
        """How clients are executed in all runs; decided once, with the first run."""
        if self.how is None and not self._read_engine():
            self.how = engine_choice(self.bench.build(job.config, job.privacy))
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.folder / self.engine_file, json.dumps(sealed(self.how.to_json()), indent=1))
            self.progress.note(f"engine: {self.how.text()}")
        if (self.places or self.most != 1) and (bound := bound_to_this_process(resolved(job.config))):
            if self.places:
                raise UserError(f"engine.backend = 'ray': {only_here(bound[0])}")
            if self.told:
                raise UserError(f"{self.most} runs at a time, in processes of their own: {only_here(bound[0])}")
            self.most = 1
        if (self.places or (self.told and self.most != 1)) and job.config.engine.workers:
            raise UserError(
                f"{self.most or 'several'} runs at a time, each with engine.workers = {job.config.engine.workers} "
                "processes: give one of the two, --jobs or --workers"
            )
        assert self.how is not None
        # the same for the runs made before the processes are up, or the bits of a result would depend on the clock
        return replace(self.how, workers=0, threads=1) if self._apart() else self.how

    def _apart(self) -> bool:
        """Whether runs are made in processes of their own."""
        return self.places is not None or self._together_at_most() != 1

    def _read_engine(self) -> bool:
        """Whether it is known how clients were executed by the process before this one."""
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
        """How many runs are made at a time."""
        if self.most is None:
            assert self.how is not None
            self.most = self.pool.most(self.how, self.expected)
        return self.most

    def text(self) -> str:
        """How the runs were executed, in words; also when all were finished before."""
        if self.how is None and not self._read_engine():
            return ""
        assert self.how is not None
        if not self._apart():
            return self.how.text()
        where = "spread over a Ray cluster" if self.places else f"{self.most} runs at a time"
        return f"{replace(self.how, workers=0, threads=1).text()}; {where}"

    # -- several at a time --------------------------------------------------------------------------------------------
    def _start(self, queue: _Queue) -> None:
        if self.processes:
            return
        most = self._together_at_most()
        self.progress.begin(f"{most} runs at a time", queue.total, queue.total - queue.left)
        bar: Callable[[], Any] = getattr(self.progress, "lane", Silent)
        gpus = self.how is not None and self.how.device.startswith("cuda")
        bars = [bar() for _ in range(most)]
        self.processes = self.pool.open(self.bench.population, self.cache, bars, self.callbacks, gpus)

    def _together(self, queue: _Queue, judge: Judge) -> None:
        """Gives jobs to free processes. On Ctrl-C or an error, all stop after their round, then the error is raised."""
        before = bool(self.processes)
        self._start(queue)
        if before:
            self.progress.begin(f"{self.most} runs at a time", queue.total, queue.total - queue.left)
        trouble: BaseException | None = None
        while True:
            busy = [process for process in self.processes if process.job]
            if trouble is None and self.stop():
                trouble = Interrupted(f"stopped with {queue.left} of {queue.total} runs unfinished")
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
            for process in self.pool.ready(busy, 0.2):
                asked = process.job
                try:
                    ended = process.receive(judge)
                except RemoteLost as lost:
                    trouble = trouble or self._lost(process, asked, lost, queue)
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

    def _lost(self, process: RunProcess, job: Job | None, lost: RemoteLost, queue: _Queue) -> BaseException | None:
        """A place is gone: its run goes on at another one from its last checkpoint. Returns why it cannot."""
        try:
            another = self.pool.another(process, lost)
        except Exception as error:
            return error
        self.processes.remove(process)
        self.processes += [another] if another is not None else []
        if job is not None:
            queue.held.insert(0, job)
        return None


@dataclass
class _Queue:
    """Jobs still to be made: those that wait for a stage which another one trains, then what the source gives."""

    source: Callable[[], Job | None]
    done: Callable[[Job, RunRecord | None], None]
    cache: Path
    total: int
    left: int = 0

    def __post_init__(self) -> None:
        self.left, self.held = self.total, list[Job]()

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
        self.left -= 1
        self.done(job, result)
