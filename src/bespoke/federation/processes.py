"""Processes that work for this one: how they start, how they end with it, and what is said when one dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker, util
from multiprocessing.connection import wait
from types import ModuleType
from typing import Any

CONTEXT = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in an unknown state
STOPPING = (signal.SIGINT, signal.SIGTERM)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
# glibc gives large blocks back to the system and asks for them again in every step: 5,000 page faults a client of
# a CNN, 3 % of an LSTM's time. Blocks up to 32 MB stay in the process, 256 MB in all; other C libraries ignore this
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**28)}


class WorkerFailed(RuntimeError):
    """A worker process raised or died; its traceback, or how it died, is in the message."""


class RemoteLost(WorkerFailed):
    """A place where clients live is gone, and the state that it held with it."""


class Child:
    """A process with so many threads, started at once; it ends with the one that started it, however that ends."""

    def __init__(self, target: Any, arguments: tuple[Any, ...], threads: int) -> None:
        self.process = CONTEXT.Process(target=target, args=arguments, daemon=True)
        inherited = dict.fromkeys(THREADS, str(threads))  # no thread pool is built for nothing
        inherited |= {name: value for name, value in KEPT_MEMORY.items() if name not in os.environ}
        before = {name: os.environ.get(name) for name in inherited}
        os.environ.update(inherited)
        try:
            with _uninterrupted(), _without_main():
                self.process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        # before multiprocessing asks it to end by SIGTERM, which it does not hear, and waits for it
        self._end = util.Finalize(None, self.process.kill, exitpriority=10)

    def close(self, at_once: bool = False) -> None:
        """Wait until it has ended by itself, for it has nothing to do any more; if it does not, end it."""
        self._end.cancel()
        if not at_once:
            self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(timeout=5)

    def death(self) -> str:
        """How it died, and what that usually means."""
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
    """In such a process: leave Ctrl-C and SIGTERM to the parent, which says when to stop; end when it is gone."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Nobody is there to hear the results any more: a killed parent leaves no process that holds on to its folders."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@contextmanager
def _without_main() -> Iterator[None]:
    """Processes started meanwhile do not import the program's main module, of which they need nothing.

    A script that does not guard its calls by `if __name__ == "__main__"` would run in them once more.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes started meanwhile inherit the block: a Ctrl-C while they import would end them with a traceback."""
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # which starts by itself, and unblocks signals as it does
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
