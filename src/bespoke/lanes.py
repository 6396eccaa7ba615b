"""A process that makes runs, one at a time, and says how far it is. See jobs.py, whose processes these are."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bespoke.engines.workers import WorkerFailed
from bespoke.errors import UserError

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


def _serve(pipe: Connection, folder: Path, cache: Path, stopping: Any) -> None:
    """The process: makes the runs it is given until the pipe closes."""
    import torch

    from bespoke.data.population import Population
    from bespoke.experiments import Bench

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it says when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore", RuntimeWarning)  # as in the command line
    torch.set_num_threads(1)
    bench, relay = Bench(Population.open(folder, resident=True), cache.parent), Relay(pipe)

    def judge(rounds: int, value: float) -> bool:
        pipe.send(("point", rounds, value))
        return bool(pipe.recv())

    while True:
        try:
            job, how = pipe.recv()
        except EOFError:
            return
        outcome = _outcome(job, bench, how, cache, relay, stopping.is_set, judge)
        with contextlib.suppress(BrokenPipeError):  # nobody listens: the next look at the pipe ends this
            pipe.send(outcome)


def _end_with_parent() -> None:
    """Nobody is there to hear the results any more: a killed parent leaves no process that holds on to its folders."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


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


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes started meanwhile inherit the block: a Ctrl-C while they import would end them with a traceback."""
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # which starts by itself, and unblocks signals as it does
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class Lane:
    """One such process, seen from the one that gives it jobs."""

    def __init__(self, folder: Path, cache: Path, bar: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in an unknown state
        self.bar, self.job, self.stopping = bar, None, context.Event()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, folder, cache, self.stopping), daemon=True)
        before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")}
        os.environ.update(dict.fromkeys(before, "1"))
        try:
            with _uninterrupted():
                self.process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        theirs.close()

    job: Job | None

    def start(self, job: Job, how: EngineChoice) -> None:
        try:
            self.pipe.send((job, how))
        except OSError:
            raise self._died(job) from None
        self.job = job

    def stop(self) -> None:
        """After the current round; the run can be resumed."""
        self.stopping.set()

    def hear(self, judge: Judge) -> tuple[Job, Result | None] | None:
        """One message; the job and its result (None if the judge ended it) when it has ended."""
        job = self.job
        assert job is not None
        try:
            kind, *rest = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.job = None
            raise self._died(job) from None
        if kind == "point":
            rounds, value = rest
            self.pipe.send(judge(job, rounds, value))
            return None
        if kind in ("begin", "advance", "note"):
            getattr(self.bar, kind)(*rest)
            return None
        self.job = None
        if kind == "done":
            return job, rest[0]
        raise _raised(kind, rest, job.path.name)

    def _died(self, job: Job) -> WorkerFailed:
        self.process.join(5)
        code = self.process.exitcode
        return WorkerFailed(f"the process of {job.path.name} died (exit code {code}); out of memory? Use fewer --jobs")

    def close(self) -> None:
        self.pipe.close()
        if self.job is not None:
            self.process.terminate()  # in the middle of a run: its folder stands that
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.terminate()
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
