"""Hosts in worker processes, each single-threaded: the way to use all cores for heavy models.

A worker opens the population from disk by itself (mapped, so the pages are shared), owns its clients' private state and
answers with partial sums. Messages are (name of a Host method, arguments) over a pipe, arrays as numpy.
"""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bespoke.data.population import Population
from bespoke.data.splits import Rows
from bespoke.errors import UserError
from bespoke.federation.host import Host
from bespoke.federation.partial import Partial
from bespoke.federation.processes import CONTEXT, Child, WorkerFailed, obey_parent
from bespoke.federation.work import ClientWork, Mode
from bespoke.tensors import tree_map


def _portable(value: Any) -> Any:
    """Tensors as numpy arrays: plain bytes in the pipe, no shared-memory handles to leak."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    if isinstance(value, dict):
        return {name: _portable(entry) for name, entry in value.items()}
    if isinstance(value, Partial):
        value.sums, value.each = _portable(value.sums), _portable(value.each)
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, Partial):
        value.sums = None if value.sums is None else tree_map(torch.as_tensor, value.sums)
        value.each = tree_map(torch.as_tensor, value.each)
        return value
    return _tensors(value)


def _tensors(value: Any) -> Any:
    """A tree of arrays as a tree of tensors; anything else as it is."""
    if isinstance(value, dict):
        return {name: _tensors(entry) for name, entry in value.items()}
    return torch.as_tensor(value) if isinstance(value, np.ndarray | np.generic) else value


def _send(pipe: Connection, value: Any) -> None:
    """Send a value; arrays go as they lie in memory, not copied into a pickle first."""
    arrays: list[memoryview] = []
    rest = pickle.dumps(value, protocol=5, buffer_callback=lambda array: arrays.append(array.raw()))
    pipe.send((rest, [array.nbytes for array in arrays]))
    for array in arrays:
        pipe.send_bytes(array)


def _receive(pipe: Connection) -> Any:
    rest, sizes = pipe.recv()
    arrays = [bytearray(size) for size in sizes]  # writable, so that sums can be added to where they are
    for array in arrays:
        pipe.recv_bytes_into(array)
    return pickle.loads(rest, buffers=arrays)


def _serve(pipe: Connection, folder: Path, mode: Mode) -> None:
    """The worker's loop: run Host methods until the pipe closes."""
    obey_parent()
    torch.set_num_threads(mode.threads)
    host = Host(Population.open(folder, resident=True), mode)
    while True:
        try:
            name, arguments = _receive(pipe)
        except (EOFError, OSError):
            return
        try:
            if name == "open":
                work, params = arguments
                host.open(_rebound(work, host.population), _tensors(params))
                answer: Any = None
            elif name == "move":
                population = Population.open(arguments[0], resident=True)
                host.move(population, _rebound(arguments[1], population))
                answer = None
            elif name in ("train", "examine", "values", "personal"):
                shared, own, *rest = arguments
                rest = [_rebound(value, host.population) for value in rest]
                answer = _portable(getattr(host, name)(_tensors(shared), _tensors(own), *rest))
            else:
                answer = _portable(getattr(host, name)(*map(_tensors, arguments)))
            result = True, answer
        except UserError as error:
            result = False, error
        except Exception:
            result = False, traceback.format_exc()
        with suppress(OSError):  # nobody listens: the next look at the pipe ends this
            _send(pipe, result)


def _rebound(value: Any, population: Population | None) -> Any:
    """Rows and work with another population: none on the way to a worker, which has its own map of it."""
    if isinstance(value, Rows):
        return replace(value, population=population)  # type: ignore[arg-type]
    if isinstance(value, ClientWork):
        return replace(value, train=_rebound(value.train, population))
    if isinstance(value, dict):
        return {name: _rebound(entry, population) for name, entry in value.items()}
    return value


class Worker:
    """A Host in another process. `start` sends a call, `finish` waits for its answer, so that workers overlap."""

    def __init__(self, folder: Path, mode: Mode, name: str = "a worker") -> None:
        self.name = name
        self.pipe, theirs = CONTEXT.Pipe()
        self.child = Child(_serve, (theirs, folder, mode), mode.threads)
        theirs.close()

    def start(self, name: str, *arguments: Any) -> None:
        try:
            _send(self.pipe, (name, tuple(_portable(_rebound(value, None)) for value in arguments)))
        except OSError:
            raise self._died() from None

    def finish(self) -> Any:
        try:
            fine, answer = _receive(self.pipe)
        except (EOFError, OSError):
            raise self._died() from None
        if not fine and isinstance(answer, UserError):
            raise answer
        if not fine:
            raise WorkerFailed(f"{self.name} failed:\n{answer}")
        return _restored(answer)

    def _died(self) -> WorkerFailed:
        return WorkerFailed(f"{self.name} {self.child.death()}; try fewer workers (--workers or engine.workers)")

    def close(self) -> None:
        self.pipe.close()
        self.child.close()
