"""A Ray cluster: one that runs at an address, or one on this machine that lives as long as it is needed.

What starts here listens on loopback alone, behind a token of this process, and keeps its files in a folder of its own,
which goes with it. Usage statistics and the dashboard are off.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from bespoke import __version__
from bespoke.errors import UserError, WorkerFailed, needs_extra
from bespoke.imported import TRUST
from bespoke.plain import Named

PREFIX = "bespoke-ray-"
CONNECT_SECONDS = 10.0  # that a cluster's head may take to answer
LEAVING_SECONDS = 30.0  # that Ray's processes may take to end
STORE = 2**30  # bytes at most that a cluster on this machine keeps of what is sent
LONGEST = 24  # characters of the folder of temporary files: a socket's path has room for no more
ALSO = ("BESPOKE_", TRUST)  # variables of the environment that places are told


def check_installed() -> None:
    """Refuse, before anything is written, what needs a package that is not there."""
    if find_spec("ray") is None:
        raise needs_extra("ray", "ray", "engine.backend = 'ray'")


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, as its places are shared out."""

    id: str
    address: str
    cpus: float
    gpus: float


def shared_out(nodes: Sequence[Node], many: int, gpus: bool, beside: Sequence[Node] = ()) -> list[Node]:
    """The nodes of so many places: each goes where a place has the most processors, or GPUs, to itself.

    beside: the nodes of places that are there already.
    """
    room = {node.id: node.gpus if gpus else node.cpus for node in nodes}
    usable = [node for node in nodes if room[node.id] >= 1]
    taken = {node.id: sum(other.id == node.id for other in beside) for node in usable}
    chosen = []
    for _ in range(many if usable else 0):
        best = min(usable, key=lambda node: (taken[node.id] + 1) / room[node.id])  # of equal ones the first
        taken[best.id] += 1
        chosen.append(best)
    return chosen


class Cluster:
    """A cluster that this process is connected to. Use as a context manager."""

    def __init__(self, address: str | None, note: Callable[[str], None] = lambda _: None) -> None:
        check_installed()
        self.address, self.note = address, note
        self.folder: Path | None = None  # of a cluster of this machine
        self.lock: FileLock | None = None
        self.connected = False
        self.ray: Any = None

    def __enter__(self) -> Cluster:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if self.address is None:
            # the machine's outer address would be listened on instead of loopback; read when ray is first imported
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        import ray

        self.ray = ray
        if ray.is_initialized():  # by the program that this is part of
            return self
        with _own_signals():
            if self.address is None:
                self._start()
            else:
                self._connect(self.address)
        self.connected = True
        return self

    def __exit__(self, *_: object) -> None:
        if self.connected:
            with _own_signals():
                self.ray.shutdown()
            self.connected = False
        self._clean()

    def _start(self) -> None:
        base = Path(tempfile.gettempdir())
        base = base if len(str(base)) <= LONGEST else Path("/tmp")
        _clear(base)
        self.folder = base / f"{PREFIX}{secrets.token_hex(4)}"
        self.lock = FileLock(f"{self.folder}.lock")
        self.lock.acquire()
        self.folder.mkdir(0o700)
        os.environ.setdefault("RAY_AUTH_TOKEN", _token())  # else Ray leaves one in the home folder
        self.note("starting Ray on this machine, which takes some 15 seconds; with --address it would be connected to")
        try:
            self.ray.init(
                include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _temp_dir=str(self.folder),
                _node_ip_address="127.0.0.1", object_store_memory=min(STORE, _free(Path("/dev/shm")) // 3),
            )  # fmt: skip
        except BaseException as error:
            self._clean()
            if not isinstance(error, Exception):
                raise
            raise WorkerFailed(
                f"Ray did not start on this machine ({_first(error)}); try again when it is less busy, or leave out "
                "--engine ray: one machine's own processes do the same work"
            ) from None

    def _connect(self, address: str) -> None:
        try:
            if address != "auto":  # Ray would try for minutes, and then end this process
                host, _, port = address.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
            self.ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            raise UserError(
                f"engine.address = {address!r}: no Ray cluster can be used there ({_first(error)}); start one with "
                "`ray start --head`, or leave the address out to use this machine"
            ) from None

    def _clean(self) -> None:
        if self.folder is not None and self.lock is not None:
            until = time.monotonic() + LEAVING_SECONDS
            while self.folder.exists() and time.monotonic() < until:  # a process of Ray may yet write its last lines
                shutil.rmtree(self.folder, ignore_errors=True)
                time.sleep(0.05)
            self.lock.release()
            Path(self.lock.lock_file).unlink(missing_ok=True)
            self.folder = self.lock = None

    # -- what there is -------------------------------------------------------------------------------------------------
    def nodes(self) -> list[Node]:
        """The machines that are there now, that of this process first."""
        here = self.ray.get_runtime_context().get_node_id()
        found = [
            Node(
                node["NodeID"], node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0),
                node["Resources"].get("GPU", 0.0),
            )
            for node in self.ray.nodes() if node["Alive"]
        ]  # fmt: skip
        return sorted(found, key=lambda node: (node.id != here, node.id))

    def most(self, gpus: bool) -> int:
        """How many places have a processor, or a GPU, to themselves."""
        many = sum(int(node.gpus if gpus else node.cpus) for node in self.nodes())
        if not many:
            what = "GPU; use engine.device = 'cpu'" if gpus else "processor"
            raise UserError(f"engine.backend = 'ray': no node of the cluster has a {what}")
        return many

    def text(self) -> str:
        nodes = self.nodes()
        where = "on this machine" if self.address is None else f"at {self.address}"
        cpus, gpus = (int(sum(getattr(node, kind) for node in nodes)) for kind in ("cpus", "gpus"))
        also = f" and {gpus} GPUs" if gpus else ""
        return f"Ray {where}: {len(nodes)} node{'s' * (len(nodes) != 1)} with {cpus} processors{also}"

    # -- actors --------------------------------------------------------------------------------------------------------
    def actors(
        self, kind: type, many: int, gpus: bool = False, beside: Sequence[Node] = (), **options: Any
    ) -> list[tuple[Any, Node]]:
        """So many actors of a class, which takes no arguments, and where they are; `beside`: where there are others.

        Where there are more than processors, as after the loss of a node, they share them.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        chosen = shared_out(self.nodes(), many, gpus, beside)
        if len(chosen) < many:
            self.most(gpus)  # says what is missing
        made = []
        for node in chosen:
            there = sum(other.id == node.id for other in (*chosen, *beside))
            crowded = there > (node.gpus if gpus else node.cpus)
            wants = {"num_gpus": node.gpus / there if crowded else 1, "num_cpus": 0} if gpus else {}
            wants = wants or {"num_cpus": 0 if crowded else 1}
            actor = self.ray.remote(kind).options(
                max_restarts=0, max_task_retries=0, **wants, **options,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.id, soft=False),
            )  # fmt: skip
            made.append((actor.remote(), node))
        return made


def setup() -> Named:
    """What an actor has to know of this process before it can unpickle what it is sent."""
    import sys

    told = {name: value for name, value in os.environ.items() if name.startswith(ALSO)}
    return {"version": __version__, "environment": told, "path": list(sys.path), "folder": os.getcwd()}


def set_up(told: Named) -> None:
    """In an actor: find the same modules as the process that asks, and refuse another version."""
    import sys

    if told["version"] != __version__:
        raise UserError(f"there is bespoke {__version__}, and {told['version']} here; install the same version")
    os.environ |= told["environment"]
    if Path(told["folder"]).is_dir():
        os.chdir(told["folder"])
    sys.path += [entry for entry in told["path"] if entry not in sys.path and Path(entry).exists()]


def what_happened(error: BaseException) -> str:
    """The first lines of an error of Ray, which goes on at length."""
    return _first(error)


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".:") if lines else type(error).__name__


@cache
def _token() -> str:
    """The secret of clusters that this process starts; Ray reads it once in a process."""
    return secrets.token_hex(32)


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free if folder.is_dir() else 3 * STORE


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray puts a handler of its own in the place of whoever stops a run after its round."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _clear(base: Path) -> None:
    """Remove folders that killed processes left behind."""
    for folder in base.glob(f"{PREFIX}*/"):
        path = Path(f"{folder}.lock")
        if not path.exists():
            continue
        try:
            lock = FileLock(path, timeout=0)
            lock.acquire()
        except (Timeout, OSError):  # its owner lives, or is another user
            continue
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
        path.unlink(missing_ok=True)
