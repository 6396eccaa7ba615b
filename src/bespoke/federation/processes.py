"""Child processes: how they start, how they end with their parent, and how the death of one is reported."""

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


class Child:
    """A process with so many threads, started at once. It ends when its parent ends, in whatever way."""

    def __init__(self, target: Any, arguments: tuple[Any, ...], threads: int) -> None:
        self.process = CONTEXT.Process(target=target, args=arguments, daemon=True)
        inherited = dict.fromkeys(THREADS, str(threads))  # limits the child's thread pools
        inherited |= {name: value for name, value in KEPT_MEMORY.items() if name not in os.environ}
        before = {name: os.environ.get(name) for name in inherited}
        os.environ.update(inherited)
        try:
            with _uninterrupted(), _without_main():
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
    """Blocks signals for processes started meanwhile. A Ctrl-C during their imports would end them with a traceback."""
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # else it would start later by itself, and unblock the signals
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
