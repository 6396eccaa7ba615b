"""Hosts in Ray actors: places of a simulation on the machines of a cluster.

An actor opens the population from a folder that its node reaches, owns its clients' private state and answers with
partial sums, as a worker process does (workers.py). What all places are sent alike goes into Ray's store once. Values
travel by pickle: only between processes of this program, on a cluster that is trusted (docs/security.md).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bespoke.data.population import Population
from bespoke.errors import RemoteLost, UserError, WorkerFailed
from bespoke.federation.calls import Call
from bespoke.federation.execution import Choice
from bespoke.federation.portable import answer_of, outcome_of, portable, rebound
from bespoke.federation.ray_cluster import Cluster, Node, set_up, setup, what_happened
from bespoke.federation.remote import Remote
from bespoke.federation.work import Mode
from bespoke.federation.workers import Lending, Served
from bespoke.plain import Named

START_SECONDS = 300.0  # that a place may take until it is there, on a cluster that is busy
SHARED = frozenset({"shared", "params", "work", "train", "support", "parts"})  # values that are the same everywhere


class HostActor:
    """In a process of the cluster: a host, and its calls one by one."""

    def begin(self, told: Named, name: str, folder: str, mode: Mode) -> bytes:
        """Opens the population; `told`: what this process has to know of the one that asks, which calls it `name`."""

        def carry_out() -> None:
            set_up(told)
            import torch

            if mode.device != "cpu" and not torch.cuda.is_available():
                raise UserError(
                    f"{name}: no GPU that PyTorch can use was given to it; install a PyTorch with CUDA there"
                )
            if not Path(folder).is_dir():
                raise UserError(
                    f"{name}: it does not reach {folder}; choose an --out on a file system that all nodes share"
                )
            self.served = Served(Path(folder), mode)

        return pickle.dumps(outcome_of(carry_out))

    def call(self, rest: bytes, names: list[str], *shared: bytes) -> bytes:
        """Carries out a call: its own values, and by name those that all places share."""

        def carry_out() -> Any:
            operation, values, settle, elsewhere = pickle.loads(rest)
            values |= {name: pickle.loads(value) for name, value in zip(names, shared)}
            return self.served.call(operation, values, settle, elsewhere)

        return pickle.dumps(outcome_of(carry_out))


class Store:
    """What all places are sent is put into Ray's store once, and stays there until there is something else."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.last: dict[str, tuple[Any, Any]] = {}  # by name: the value, and where it lies

    def put(self, name: str, value: Any) -> Any:
        held = self.last.get(name)
        if held is None or held[0] is not value:
            self.last.pop(name, None)
            held = self.last[name] = value, self.ray.put(pickle.dumps(portable(rebound(value, None))))
        return held[1]


class Actor:
    """A remote whose host lives in an actor."""

    def __init__(self, handle: Any, node: Node, name: str, lending: Lending, store: Store) -> None:
        self.handle, self.node, self.lending, self.store = handle, node, lending, store
        self.name = f"{name} (on {node.address})"
        self.operation, self.pending = "", None  # what it was asked for last, and its answer to come

    def begin(self, mode: Mode) -> None:
        """Start to open the population; `finish` says how that went."""
        self.pending = self.handle.begin.remote(setup(), self.name, str(self.lending.copy.folder), mode)

    def start(self, call: Call) -> None:
        self.operation = call.operation
        moves = call.operation == "move"
        elsewhere = self.lending.folder_of(call.values["train"].population) if moves else None
        names = [name for name, value in call.values.items() if name in SHARED and value is not None]
        own = {name: portable(rebound(v, None)) for name, v in call.values.items() if name not in names}
        rest = pickle.dumps((call.operation, own, call.settle, elsewhere))
        shared = [self.store.put(name, call.values[name]) for name in names]
        self.pending = self.handle.call.remote(rest, names, *shared)

    def finish(self) -> Any:
        errors = self.store.ray.exceptions
        pending, self.pending = self.pending, None
        try:
            outcome = pickle.loads(self.store.ray.get(pending))
        except errors.RayError as error:
            if "No module named 'bespoke" in str(error):
                raise UserError(f"{self.name}: this bespoke is not installed there; install it on all nodes") from None
            if isinstance(error, errors.RayTaskError):  # not of the host, whose errors are answers
                raise WorkerFailed(f"{self.name} failed:\n{error}") from None
            raise RemoteLost(f"{self.name} is gone ({what_happened(error)})") from None
        answer = answer_of(outcome, self.name)
        if self.operation == "move":
            self.lending.worker_moved()
        return answer

    def alive(self) -> bool:
        """Whether it is there, as far as the cluster knows; one that is busy is."""
        ray = self.store.ray
        ready = self.handle.__ray_ready__.remote()
        done, _ = ray.wait([ready], timeout=1.0)
        try:
            return not done or bool(ray.get(ready))
        except ray.exceptions.RayError:
            return False

    def close(self) -> None:
        with suppress(Exception):  # it may be gone, and the cluster with it
            self.store.ray.kill(self.handle, no_restart=True)
        self.lending.close()


def actors(cluster: Cluster, population: Population, choice: Choice, folder: Path) -> list[Remote]:
    """Remotes in actors that hold this population, as many as workers were chosen; each gets a GPU, if chosen.

    `folder` is one that all nodes reach: a copy of the population lies there as long as they live.
    """
    ray, many, gpus = cluster.ray, max(choice.workers, 1), choice.device.startswith("cuda")
    lending, store = Lending(population, many, folder), Store(ray)
    made: list[Actor] = []
    try:
        handles = cluster.actors(HostActor, many, gpus)
        made = [
            Actor(handle, node, f"actor {place} of {many}", lending, store)
            for place, (handle, node) in enumerate(handles, 1)
        ]
        mode = replace(choice.mode(), device="cuda:0" if gpus else choice.device)
        for actor in made:
            actor.begin(mode)
        _wait(cluster, made)
        for actor in made:
            actor.finish()
    except BaseException:
        lending.workers = max(len(made), 1)
        for actor in made:
            actor.close()
        if not made:
            lending.close()
        raise
    return list(made)


def _wait(cluster: Cluster, made: Sequence[Actor]) -> None:
    """Until all places are there; those that others use the processors of have to wait."""
    waiting, ray = [actor.pending for actor in made], cluster.ray
    _, left = ray.wait(waiting, num_returns=len(waiting), timeout=START_SECONDS / 10)
    if left:
        cluster.note(f"waiting for the cluster to start {len(left)} of {len(waiting)} places")
        _, left = ray.wait(waiting, num_returns=len(waiting), timeout=START_SECONDS)
    if left:
        raise UserError(
            f"the cluster has not started {len(left)} of {len(waiting)} places in {START_SECONDS:.0f} seconds: its "
            "processors are in use; ask for fewer (--set engine.workers=N), or wait until it has room"
        )
