"""A worker process that makes one run at a time and reports its progress. scheduler.py starts these processes."""

from __future__ import annotations

import contextlib
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bespoke.callbacks.callback import Callback, CheckpointEvent, EndEvent, EvaluationEvent, Event, RoundEvent
from bespoke.errors import UserError, WorkerFailed
from bespoke.federation.processes import CONTEXT, Child, obey_parent

if TYPE_CHECKING:
    from bespoke.federation.engine import Choice as EngineChoice
    from bespoke.records import RunRecord
    from bespoke.study.job import Job, Judge

PROGRESS_SECONDS = 0.1  # between two messages of progress


class Relay:
    """Sends a run's progress to the process that draws the bars."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe, self.steps, self.last, self.last_sent = pipe, 0, "", 0.0

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self._flush()
        self.pipe.send(("begin", what, total, done))

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.steps, self.last = self.steps + steps, note or self.last
        if time.monotonic() - self.last_sent > PROGRESS_SECONDS:
            self._flush()

    def note(self, text: str) -> None:
        self.pipe.send(("note", text))

    def _flush(self) -> None:
        if self.steps:
            self.pipe.send(("advance", self.steps, self.last))
        self.steps, self.last, self.last_sent = 0, "", time.monotonic()


class ForwardingCallback(Callback):
    """Forwards events to the callbacks, which live in the process with the scheduler."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe

    def on_round(self, event: RoundEvent) -> None:
        self._forward("on_round", event)

    def on_evaluation(self, event: EvaluationEvent) -> None:
        self._forward("on_evaluation", event)

    def on_checkpoint(self, event: CheckpointEvent) -> None:
        self._forward("on_checkpoint", event)

    def on_end(self, event: EndEvent) -> None:
        self._forward("on_end", event)

    def _forward(self, moment: str, event: Event) -> None:
        self.pipe.send(("event", moment, event))
        problem = self.pipe.recv()
        if problem:
            raise UserError(problem)


class Pipe(Protocol):
    """Sends messages to the other end, and receives those from there."""

    def send(self, message: Any, /) -> None: ...
    def recv(self) -> Any: ...


def _serve(pipe: Connection, folder: Path, cache: Path, stopping: Connection, forwards: bool) -> None:
    """The worker's main function."""
    obey_parent()
    serve_runs(pipe, folder, cache, stopping.poll, forwards)


def serve_runs(pipe: Pipe, folder: Path, cache: Path, stop: Callable[[], bool], forwards: bool) -> None:
    """Makes runs from the pipe until it closes. `forwards`: events go to callbacks at the other end."""
    import torch

    import bespoke.study.job  # noqa: F401  (all that a run imports: a process that is ready works at once)
    from bespoke.data.population import Population
    from bespoke.experiment.build import Bench

    warnings.simplefilter("ignore", RuntimeWarning)  # as in the command line
    torch.set_num_threads(1)
    bench, relay = Bench(Population.open(folder, resident=True), cache.parent), Relay(pipe)
    callbacks = (ForwardingCallback(pipe),) if forwards else ()
    with contextlib.suppress(OSError):
        pipe.send(("ready",))

    def judge(rounds: int, value: float) -> bool:
        pipe.send(("point", rounds, value))
        return bool(pipe.recv())

    while True:
        try:
            job, how = pipe.recv()
        except (EOFError, OSError):
            return
        outcome = _outcome(job, bench, how, cache, relay, stop, judge, callbacks)
        with contextlib.suppress(OSError):  # the parent is gone; the next receive fails and ends the loop
            pipe.send(outcome)


def _outcome(
    job: Job, bench: Any, how: EngineChoice, cache: Path, relay: Relay, stop: Callable[[], bool],
    judge: Callable[[int, float], bool], callbacks: Sequence[Callback],
) -> tuple[Any, ...]:  # fmt: skip
    """Makes a run and returns its outcome as plain values."""
    from bespoke.runs.events import Interrupted, Pruned
    from bespoke.study.job import execute

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
    """The scheduler's side of one worker process."""

    def __init__(self, folder: Path, cache: Path, bar: Any, callbacks: Sequence[Callback] = ()) -> None:
        self.bar, self.job, self.stop_sent, self.callbacks = bar, None, False, callbacks
        self.imported = False
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

    def is_ready(self) -> bool:
        """Whether the process has finished its imports. A dead one is ready, too: its first job reports the death."""
        if not self.imported and self.pipe.poll():
            with contextlib.suppress(EOFError, OSError):
                self.pipe.recv()
            self.imported = True
        return self.imported

    def stop(self) -> None:
        """Asks the worker to stop after the current round; the run can be resumed."""
        if not self.stop_sent:
            self.stop_sent = True
            with contextlib.suppress(OSError):  # the process died; receive() reports it
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
        if kind == "ready":
            self.imported = True
            return None
        if kind == "point":
            rounds, value = rest
            worth = judge(job, rounds, value)
            with contextlib.suppress(OSError):  # the process died; receive() reports it
                self.pipe.send(worth)
            return None
        if kind == "event":
            self._notify(*rest)
            return None
        if kind in ("begin", "advance", "note"):
            getattr(self.bar, kind)(*rest)
            return None
        self.job = None
        if kind == "done":
            return job, rest[0]
        raise _raised(kind, rest, job.path.name)

    def _notify(self, moment: str, event: Event) -> None:
        """Calls the callbacks. The run continues after they return, or ends if one of them fails."""
        from bespoke.runs.run_callbacks import notify

        problem = ""
        try:
            notify(self.callbacks, moment, event)
        except Exception as error:
            problem = str(error)
            raise
        finally:
            with contextlib.suppress(OSError):  # the process died; receive() reports it
                self.pipe.send(problem)

    def _died(self, job: Job) -> WorkerFailed:
        return WorkerFailed(f"the process of the run {job.path.name} {self.child.death()}; try fewer --jobs")

    def close(self) -> None:
        self.pipe.close()
        self.stopping.close()
        self.child.close(at_once=self.job is not None)  # a run folder survives a kill
        if hasattr(self.bar, "close"):
            self.bar.close()


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
