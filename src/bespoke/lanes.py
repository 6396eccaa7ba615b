"""A process that makes runs, one at a time, and says how far it is. See jobs.py, whose processes these are."""

from __future__ import annotations

import contextlib
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bespoke.errors import UserError
from bespoke.processes import CONTEXT, Child, WorkerFailed, obey_parent

if TYPE_CHECKING:
    from bespoke.engines.engine import Choice as EngineChoice
    from bespoke.jobs import Job, Judge, Result

TELL_SECONDS = 0.1  # between two messages of progress


class Relay:
    """Progress of a run, sent to the process that draws the bars."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.steps, self.last, self.told = pipe, 0, "", 0.0

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self._flush()
        self.pipe.send(("begin", what, total, done))

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.steps, self.last = self.steps + steps, note or self.last
        if time.monotonic() - self.told > TELL_SECONDS:
            self._flush()

    def note(self, text: str) -> None:
        self.pipe.send(("note", text))

    def _flush(self) -> None:
        if self.steps:
            self.pipe.send(("advance", self.steps, self.last))
        self.steps, self.last, self.told = 0, "", time.monotonic()


def _serve(pipe: Connection, folder: Path, cache: Path, stopping: Connection) -> None:
    """The process: makes the runs it is given until the pipe closes."""
    import torch

    from bespoke.data.population import Population
    from bespoke.experiments import Bench

    obey_parent()
    warnings.simplefilter("ignore", RuntimeWarning)  # as in the command line
    torch.set_num_threads(1)
    bench, relay = Bench(Population.open(folder, resident=True), cache.parent), Relay(pipe)

    def judge(rounds: int, value: float) -> bool:
        pipe.send(("point", rounds, value))
        return bool(pipe.recv())

    while True:
        try:
            job, how = pipe.recv()
        except (EOFError, OSError):
            return
        outcome = _outcome(job, bench, how, cache, relay, stopping.poll, judge)
        with contextlib.suppress(OSError):  # nobody listens: the next look at the pipe ends this
            pipe.send(outcome)


def _outcome(
    job: Job, bench: Any, how: EngineChoice, cache: Path, relay: Relay, stop: Callable[[], bool],
    judge: Callable[[int, float], bool],
) -> tuple[Any, ...]:  # fmt: skip
    """What became of a run, as plain values."""
    from bespoke.jobs import execute
    from bespoke.watcher import Interrupted, Pruned

    try:
        return "done", execute(job, bench, how, cache, relay, stop, judge)
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


class Lane:
    """One such process, seen from the one that gives it jobs."""

    def __init__(self, folder: Path, cache: Path, bar: Any) -> None:
        self.bar, self.job, self.told = bar, None, False
        self.pipe, theirs = CONTEXT.Pipe()
        stopping, self.stopping = CONTEXT.Pipe(duplex=False)
        self.child = Child(_serve, (theirs, folder, cache, stopping), 1)
        theirs.close()
        stopping.close()

    job: Job | None

    def start(self, job: Job, how: EngineChoice) -> None:
        try:
            self.pipe.send((job, how))
        except OSError:
            raise self._died(job) from None
        self.job = job

    def stop(self) -> None:
        """After the current round; the run can be resumed."""
        if not self.told:
            self.told = True
            with contextlib.suppress(OSError):  # it died; that is said where it is listened to
                self.stopping.send(True)

    def hear(self, judge: Judge) -> tuple[Job, Result | None] | None:
        """One message; the job and its result (None if the judge ended it) when it has ended."""
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
        if kind in ("begin", "advance", "note"):
            getattr(self.bar, kind)(*rest)
            return None
        self.job = None
        if kind == "done":
            return job, rest[0]
        raise _raised(kind, rest, job.path.name)

    def _died(self, job: Job) -> WorkerFailed:
        return WorkerFailed(f"the process of the run {job.path.name} {self.child.death()}; try fewer --jobs")

    def close(self) -> None:
        self.pipe.close()
        self.stopping.close()
        self.child.close(at_once=self.job is not None)  # in the middle of a run: its folder stands that
        if hasattr(self.bar, "close"):
            self.bar.close()


def _raised(kind: str, rest: list[Any], name: str) -> Exception:
    """What went wrong in the process, as the exception that it was there."""
    from bespoke.watcher import Interrupted

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
