"""Child processes: how they start, how they end with their parent, and how the death of one is reported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker, util
from multiprocessing.connection import wait
from typing import Any

from bespoke.errors import RemoteLost as RemoteLost
from bespoke.errors import WorkerFailed as WorkerFailed

CONTEXT = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in an unknown state
STOPPING = (signal.SIGINT, signal.SIGTERM)


class Child:
    """A process with so many threads, started at once. It ends when its parent ends, in whatever way."""

    def __init__(self, target: Any, arguments: tuple[Any, ...], threads: int) -> None:
        self.process = CONTEXT.Process(target=target, args=arguments, daemon=True)
        before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")}
        os.environ.update(dict.fromkeys(before, str(threads)))  # limits the child's thread pools
        try:
            with _uninterrupted():
                self.process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        # at exit, before multiprocessing sends SIGTERM, which the child ignores, and waits for it
        self._end = util.Finalize(None, self.process.kill, exitpriority=10)

    def close(self, at_once: bool = False) -> None:
        """Waits for the process to end by itself; kills it if it does not."""
        self._end.cancel()
        if not at_once:
            self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(timeout=5)

    def death(self) -> str:
        """How the process died, and the usual cause."""
        self.process.join(5)
        code, number = self.process.exitcode, self.process.pid
        if code is None:
            return f"(process {number}) does not answer any more"
        if code >= 0:
            return f"(process {number}) ended unexpectedly with exit code {code}"
        name = f"signal {-code}"
        with suppress(ValueError):  # a signal that has no name here
            name += f", {signal.Signals(-code).name}"
        cause = ", as the operating system does when memory runs out" if -code == 9 else ""
        return f"(process {number}) was killed ({name}){cause}"


def obey_parent() -> None:
    """To be called in a child: ignores Ctrl-C and SIGTERM, which the parent handles, and ends with the parent."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when its parent is gone, so that a killed parent leaves no process that uses its folders."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Blocks signals for processes started meanwhile. A Ctrl-C during their imports would end them with a traceback."""
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # else it would start later by itself, and unblock the signals
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
