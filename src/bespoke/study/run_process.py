"""A worker process that makes one run at a time and reports its progress. scheduler.py starts these processes."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bespoke.callbacks.callback import Callback, CheckpointTold, EndTold, EvaluationTold, RoundTold, Told
from bespoke.data.shared_copy import SharedCopy
from bespoke.errors import UserError
from bespoke.federation.processes import CONTEXT, Child, RemoteLost, WorkerFailed, obey_parent

if TYPE_CHECKING:
    from bespoke.data.population import Population
    from bespoke.federation.engine import Choice as EngineChoice
    from bespoke.records import RunRecord
    from bespoke.study.scheduler import Job, Judge

PROGRESS_SECONDS = 0.1  # between two messages of progress


class Relay:
    """Progress of a run, sent to the process that draws the bars."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe, self.steps, self.last, self.told = pipe, 0, "", 0.0

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self._flush()
        self.pipe.send(("begin", what, total, done))

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.steps, self.last = self.steps + steps, note or self.last
        if time.monotonic() - self.told > PROGRESS_SECONDS:
            self._flush()

    def note(self, text: str) -> None:
        self.pipe.send(("note", text))

    def _flush(self) -> None:
        if self.steps:
            self.pipe.send(("advance", self.steps, self.last))
        self.steps, self.last, self.told = 0, "", time.monotonic()


class ForwardingCallback(Callback):
    """Forwards events to the callbacks, which live in the process that gives the jobs."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe

    def on_round(self, told: RoundTold) -> None:
        self._tell("on_round", told)

    def on_evaluation(self, told: EvaluationTold) -> None:
        self._tell("on_evaluation", told)

    def on_checkpoint(self, told: CheckpointTold) -> None:
        self._tell("on_checkpoint", told)

    def on_end(self, told: EndTold) -> None:
        self._tell("on_end", told)

    def _tell(self, moment: str, told: Told) -> None:
        self.pipe.send(("told", moment, told))
        problem = self.pipe.recv()
        if problem:
            raise UserError(problem)


class Pipe(Protocol):
    """Messages to whoever is at the other end, and from there."""

    def send(self, message: Any, /) -> None: ...
    def recv(self) -> Any: ...


def _serve(pipe: Connection, folder: Path, cache: Path, stopping: Connection, told: bool) -> None:
    """The worker's main function."""
    obey_parent()
    serve_runs(pipe, folder, cache, stopping.poll, told)


def serve_runs(pipe: Pipe, folder: Path, cache: Path, stop: Callable[[], bool], told: bool) -> None:
    """Makes the runs that come through the pipe until it closes. `told`: there are callbacks at the other end."""
    import torch

    from bespoke.data.population import Population
    from bespoke.experiment.build import Bench

    warnings.simplefilter("ignore", RuntimeWarning)  # as in the command line
    torch.set_num_threads(1)
    bench, relay = Bench(Population.open(folder, resident=True), cache.parent), Relay(pipe)
    callbacks = (ForwardingCallback(pipe),) if told else ()

    def judge(rounds: int, value: float) -> bool:
        pipe.send(("point", rounds, value))
        return bool(pipe.recv())

    while True:
        try:
            job, how = pipe.recv()
        except (EOFError, OSError):
            return
        outcome = _outcome(job, bench, how, cache, relay, stop, judge, callbacks)
        with contextlib.suppress(OSError):  # nobody listens: the next look at the pipe ends this
            pipe.send(outcome)


def _outcome(
    job: Job, bench: Any, how: EngineChoice, cache: Path, relay: Relay, stop: Callable[[], bool],
    judge: Callable[[int, float], bool], callbacks: Sequence[Callback],
) -> tuple[Any, ...]:  # fmt: skip
    """Makes a run and returns its outcome as plain values."""
    from bespoke.runs.events import Interrupted, Pruned
    from bespoke.study.scheduler import execute

    try:
        return "done", execute(job, bench, how, cache, relay, stop, judge, callbacks)
    except Pruned:
        return "done", None
    except Interrupted:
        return "stopped", job.path.name
    except UserError as error:
        return "user", str(error)
    except OSError as error:
        if error.errno is None:
            return "failed", traceback.format_exc()
        return "system", error.errno, error.strerror, str(error.filename or job.path)
    except MemoryError:
        return "memory", job.path.name
    except Exception:
        return "failed", traceback.format_exc()


class RunProcess:
    """One worker process, as the process that gives it jobs sees it."""

    def __init__(self, folder: Path, cache: Path, bar: Any, callbacks: Sequence[Callback] = ()) -> None:
        self.bar, self.job, self.told, self.callbacks = bar, None, False, callbacks
        self.pipe, theirs = CONTEXT.Pipe()
        stopping, self.stopping = CONTEXT.Pipe(duplex=False)
        self.child = Child(_serve, (theirs, folder, cache, stopping, bool(callbacks)), 1)
        theirs.close()
        stopping.close()

    job: Job | None
    pipe: Any  # a Pipe; of a process of this machine a Connection
    stopping: Any

    def start(self, job: Job, how: EngineChoice) -> None:
        try:
            self.pipe.send((job, how))
        except OSError:
            raise self._died(job) from None
        self.job = job

    def stop(self) -> None:
        """Asks the worker to stop after the current round; the run can be resumed."""
        if not self.told:
            self.told = True
            with contextlib.suppress(OSError):  # it died; that is said where it is listened to
                self.stopping.send(True)

    def receive(self, judge: Judge) -> tuple[Job, RunRecord | None] | None:
        """Handles one message. When the job has ended, returns it with its result (None if it was pruned)."""
        job = self.job
        assert job is not None
        try:
            kind, *rest = self.pipe.recv()
        except (EOFError, OSError):
            self.job = None
            raise self._died(job) from None
        if kind == "point":
            rounds, value = rest
            worth = judge(job, rounds, value)
            with contextlib.suppress(OSError):  # it died; that is said where it is listened to
                self.pipe.send(worth)
            return None
        if kind == "told":
            self._tell(*rest)
            return None
        if kind in ("begin", "advance", "note"):
            getattr(self.bar, kind)(*rest)
            return None
        self.job = None
        if kind == "done":
            return job, rest[0]
        raise _raised(kind, rest, job.path.name)

    def _tell(self, moment: str, told: Told) -> None:
        """Calls the callbacks. The run continues after they return, or ends if one of them fails."""
        from bespoke.runs.told import tell

        problem = ""
        try:
            tell(self.callbacks, moment, told)
        except Exception as error:
            problem = str(error)
            raise
        finally:
            with contextlib.suppress(OSError):  # it died; that is said where it is listened to
                self.pipe.send(problem)

    def _died(self, job: Job) -> WorkerFailed:
        return WorkerFailed(f"the process of the run {job.path.name} {self.child.death()}; try fewer --jobs")

    def close(self) -> None:
        self.pipe.close()
        self.stopping.close()
        self.child.close(at_once=self.job is not None)  # in the middle of a run: its folder stands that
        if hasattr(self.bar, "close"):
            self.bar.close()


class Processes:
    """Worker processes of this machine, for a scheduler."""

    def __init__(self) -> None:
        self.shared: SharedCopy | None = None  # the population on disk, for the processes

    def most(self, how: EngineChoice, expected: int) -> int:
        """How many runs are made at a time, if nobody says it."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cores if expected > 1 and not how.workers else 1

    def open(
        self, population: Population, cache: Path, bars: Sequence[Any], callbacks: Sequence[Callback], gpus: bool
    ) -> list[RunProcess]:
        """A process for each bar."""
        self.shared = SharedCopy(population)
        return [RunProcess(self.shared.folder, cache, bar, callbacks) for bar in bars]

    def ready(self, processes: Sequence[RunProcess], seconds: float) -> list[RunProcess]:
        """Those that have something to say, or are gone."""
        heard = wait([process.pipe for process in processes], timeout=seconds)
        return [process for process in processes if process.pipe in heard]

    def another(self, process: RunProcess, lost: RemoteLost) -> RunProcess | None:
        """One in the place of one that is gone; or raises what happened."""
        raise lost

    def close(self) -> None:
        if self.shared:
            self.shared.close()
            self.shared = None


def _raised(kind: str, rest: list[Any], name: str) -> Exception:
    """The exception to raise here for an error in the worker process."""
    from bespoke.runs.events import Interrupted

    if kind == "stopped":
        return Interrupted(f"stopped in {name}")
    if kind == "user":
        return UserError(f"{name}: {rest[0]}")
    if kind == "system":
        number, reason, place = rest
        return OSError(number, reason, place)
    if kind == "memory":
        return MemoryError(name)
    return WorkerFailed(f"{name} failed:\n{rest[0]}")
