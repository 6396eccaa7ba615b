"""A pool of processes that make runs. It starts in the background, because the imports of a process take seconds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from bespoke.callbacks.callback import Callback
from bespoke.data.population import Population
from bespoke.data.shared_copy import SharedCopy
from bespoke.errors import RemoteLost
from bespoke.runs.events import Silent
from bespoke.study.run_process import RunProcess


class RunPool:
    """`size` processes with one population. Until they are ready, the caller may make runs itself."""

    def __init__(self, population: Population, cache: Path, size: int, callbacks: Sequence[Callback]) -> None:
        self.population, self.cache, self.size, self.callbacks = population, cache, size, callbacks
        self.processes: list[RunProcess] = []
        self._shared: SharedCopy | None = None  # the population on disk
        self._timer: threading.Timer | None = None

    def start(self, after: float = 0.0) -> None:
        """Starts the processes in a thread, after so many seconds; `postpone` before then prevents it."""
        if self._timer is None:
            self._timer = threading.Timer(after, self._in_background)
            self._timer.daemon = True
            self._timer.start()

    def postpone(self) -> None:
        """Prevents a start that is still to come. A start that has begun goes on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join(0.01)
            if not self._timer.is_alive() and not self.processes:
                self._timer = None

    @property
    def ready(self) -> bool:
        """Whether all processes have finished their imports."""
        return len(self.processes) == self.size and all(process.is_ready() for process in self.processes)

    def started(self) -> list[RunProcess]:
        """The processes, which may still be importing; starts them now if they are not started."""
        if self._timer is not None:
            self._timer.join()
        self._start()
        return self.processes

    def heard(self, processes: Sequence[RunProcess], seconds: float) -> list[RunProcess]:
        """Those of them that sent something or died; waits so long for the first."""
        found = wait([process.pipe for process in processes], timeout=seconds)
        return [process for process in processes if process.pipe in found]

    def replace(self, process: RunProcess, lost: RemoteLost) -> None:
        """A process of this machine that is gone is not replaced: whatever ended it would end another one, too."""
        raise lost

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        for process in self.processes:
            process.close()
        self.processes = []
        if self._shared:
            self._shared.close()

    def _in_background(self) -> None:
        with contextlib.suppress(Exception):  # `started` tries again, in the thread that can report the error
            self._start()

    def _start(self) -> None:
        self._shared = self._shared or SharedCopy(self.population)
        while len(self.processes) < self.size:
            self.processes.append(RunProcess(self._shared.folder, self.cache, Silent(), self.callbacks))
