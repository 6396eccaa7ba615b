"""A Ray cluster of two nodes on this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil


@dataclass
class TwoNodes:
    """Two nodes with a processor each; the second says that it has a GPU, which it has not."""

    cluster: Any
    folder: Path
    second: Any = None
    seen: set[int] = field(default_factory=set)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def processes(self) -> list[psutil.Process]:
        """Every process that belongs to the cluster, whatever it calls itself now."""
        raylets = [p for p in psutil.Process().children(recursive=True) if _of(p, str(self.folder))]
        found = {child.pid: child for p in raylets for child in [p, *_children(p)]}
        self.seen |= set(found)
        return list(found.values())

    def actors(self, kind: str = "HostActor") -> list[psutil.Process]:
        return [p for p in self.processes() if _name(p).startswith(f"ray::{kind}")]


def _of(process: psutil.Process, folder: str) -> bool:
    try:
        return any(folder in word for word in process.cmdline())
    except psutil.Error:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Start the cluster; at the end nothing of it may be left."""
    before = dict(os.environ)
    # read when ray is first imported: nothing but loopback is listened on, and who connects needs the token
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex()}
    try:
        with _started() as nodes:
            yield nodes
    finally:
        for name in os.environ.keys() - before.keys():
            os.environ.pop(name)
        os.environ.update(before)


@contextmanager
def _started(tries: int = 3) -> Iterator[TwoNodes]:
    import ray
    from ray.cluster_utils import Cluster

    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a socket's path must be short
    os.environ["RAY_TMPDIR"] = str(folder)
    health = {"health_check_period_ms": 500, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 3}
    plain = {
        "include_dashboard": False, "num_cpus": 1, "object_store_memory": 100 * 2**20, "node_ip_address": "127.0.0.1",
    }  # fmt: skip
    nodes = TwoNodes(Cluster(), folder)
    try:
        try:
            nodes.cluster.add_node(**plain, _system_config=health)
            nodes.second = nodes.cluster.add_node(**plain, num_gpus=1)
            tries = 0
        except Exception:  # a node may take 30 seconds, which on a very busy machine it does not keep to
            if tries == 1:
                raise
        if not tries:
            yield nodes
    finally:
        for process in nodes.processes():
            if tries:  # it was not up in time
                with suppress(psutil.Error):
                    process.kill()
        ray.shutdown()
        nodes.cluster.shutdown()
        until = time.monotonic() + 20
        while (left := [pid for pid in nodes.seen if psutil.pid_exists(pid)]) and time.monotonic() < until:
            time.sleep(0.2)
        shutil.rmtree(folder, ignore_errors=True)
        assert not left or tries, "processes of the cluster outlive it"
    if tries:
        with _started(tries - 1) as again:
            yield again
