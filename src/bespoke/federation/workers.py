"""Hosts in single-threaded worker processes, which use all cores for heavy models.

A worker maps the population from disk, so that the pages are shared. It owns its clients' private state and answers
with partial sums. Calls go through a pipe by pickle, because both ends are this program.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bespoke.data.population import Population
from bespoke.data.shared_copy import SharedCopy
from bespoke.errors import RemoteLost
from bespoke.federation.calls import Call, Settle, serve
from bespoke.federation.host import Host
from bespoke.federation.portable import answer_of, outcome_of, portable, rebound, restored
from bespoke.federation.processes import CONTEXT, Child, obey_parent
from bespoke.federation.work import Mode


def _send(pipe: Connection, value: Any) -> None:
    """Sends a value. Arrays are sent from their memory, without a copy in a pickle."""
    arrays: list[memoryview] = []
    rest = pickle.dumps(value, protocol=5, buffer_callback=lambda array: arrays.append(array.raw()))
    pipe.send((rest, [array.nbytes for array in arrays]))
    for array in arrays:
        pipe.send_bytes(array)


def _receive(pipe: Connection) -> Any:
    rest, sizes = pipe.recv()
    arrays = [bytearray(size) for size in sizes]  # writable, so that sums can be added in place
    for array in arrays:
        pipe.recv_bytes_into(array)
    return pickle.loads(rest, buffers=arrays)


class Served:
    """A host of a population on disk, in a process of its own."""

    def __init__(self, folder: Path, mode: Mode) -> None:
        torch.set_num_threads(mode.threads)
        self.population = Population.open(folder, resident=True)
        self.host = Host(self.population, mode)

    def call(self, operation: str, values: dict[str, Any], settle: Settle | None, elsewhere: Path | None) -> Any:
        """Executes a call; `elsewhere`: where the population lies from now on, if it has moved."""
        if elsewhere is not None:
            self.population = Population.open(elsewhere, resident=True)
        values = {name: rebound(restored(value), self.population) for name, value in values.items()}
        return serve(self.host, Call(operation, values, settle))


def _serve(pipe: Connection, folder: Path, mode: Mode) -> None:
    """The worker's loop: executes calls until the pipe closes."""
    obey_parent()
    served = Served(folder, mode)
    while True:
        try:
            asked = _receive(pipe)
        except (EOFError, OSError):
            return
        outcome = outcome_of(partial(served.call, *asked))
        with suppress(OSError):  # the parent is gone; the next receive fails and ends the loop
            _send(pipe, outcome)


class Lending:
    """The population on disk, for several workers to map. A move replaces it by another one."""

    def __init__(self, population: Population, workers: int, place: Path | None = None) -> None:
        """`place`: the folder that it lies in, if not that of temporary files."""
        self.population, self.place, self.copy = population, place, SharedCopy(population, place)
        self.before: SharedCopy | None = None  # the previous copy, until all workers have moved
        self.workers, self.moved = workers, 0

    def folder_of(self, population: Population) -> Path:
        if population is not self.population:
            self.before, self.copy = self.copy, SharedCopy(population, self.place)
            self.population, self.moved = population, 0
        return self.copy.folder

    def worker_moved(self) -> None:
        """Counts a worker that has opened the current population. The last one closes the previous copy."""
        self.moved += 1
        if self.before is not None and self.moved == self.workers:
            self.before.close()
            self.before = None

    def close(self) -> None:
        """Counts a worker that has ended. The last one closes the copies."""
        self.workers -= 1
        if not self.workers:
            for copy in (self.before, self.copy):
                if copy is not None:
                    copy.close()


class Worker:
    """A remote whose host lives in a process of its own."""

    def __init__(self, lending: Lending, mode: Mode, name: str = "a worker") -> None:
        self.name, self.lending = name, lending
        self.operation = ""  # of the last call
        self.pipe, theirs = CONTEXT.Pipe()
        self.child = Child(_serve, (theirs, lending.copy.folder, mode), mode.threads)
        theirs.close()

    def start(self, call: Call) -> None:
        self.operation = call.operation
        moves = call.operation == "move"
        elsewhere = self.lending.folder_of(call.values["train"].population) if moves else None
        values = {name: portable(rebound(value, None)) for name, value in call.values.items()}
        try:
            _send(self.pipe, (call.operation, values, call.settle, elsewhere))
        except OSError:
            raise self._died() from None

    def finish(self) -> Any:
        try:
            outcome = _receive(self.pipe)
        except (EOFError, OSError):
            raise self._died() from None
        answer = answer_of(outcome, self.name)
        if self.operation == "move":
            self.lending.worker_moved()
        return answer

    def alive(self) -> bool:
        return self.child.process.is_alive()

    def _died(self) -> RemoteLost:
        return RemoteLost(f"{self.name} {self.child.death()}; try fewer workers (--workers or engine.workers)")

    def close(self) -> None:
        self.pipe.close()
        self.child.close()
        self.lending.close()
