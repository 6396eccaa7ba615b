"""Runs in actors of a Ray cluster: an actor makes one run at a time, as a worker process does (run_process.py).

Messages are the same; here they go through calls of the actor instead of a pipe. Folders have to be on a file system
that all nodes share: run folders, the stages that runs share, and a copy of the population.
"""

from __future__ import annotations

import pickle
import queue
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bespoke.callbacks.callback import Callback
from bespoke.data.population import Population
from bespoke.data.shared_copy import SharedCopy
from bespoke.errors import RemoteLost, UserError
from bespoke.experiment.checks import checked
from bespoke.experiment.config import EngineConfig
from bespoke.federation.engine import Choice as EngineChoice
from bespoke.federation.ray_cluster import Cluster, Node, check_installed, set_up, setup, what_happened
from bespoke.plain import Named, TomlTable
from bespoke.runs.events import Silent
from bespoke.study.run_process import RunProcess, serve_runs

if TYPE_CHECKING:
    from bespoke.records import RunRecord
    from bespoke.study.job import Job, Judge

LOSSES = 10  # places that a study bears to lose
POLL_SECONDS = 5.0  # that an actor waits for something to say before it is asked again


class _Pipe:
    """The end of a pipe that the actor's worker loop holds; the other end are calls of the actor."""

    def __init__(self) -> None:
        self.inbox: queue.Queue[bytes | None] = queue.Queue()
        self.outbox: queue.Queue[bytes] = queue.Queue()

    def send(self, value: Any) -> None:
        self.outbox.put(pickle.dumps(value))

    def recv(self) -> Any:
        message = self.inbox.get()
        if message is None:
            raise EOFError
        return pickle.loads(message)


class RunActor:
    """In a process of the cluster. Its calls run side by side: one makes runs, the others bring and take messages."""

    def __init__(self) -> None:
        self.pipe, self.stopped = _Pipe(), False

    def serve(self, told: Named, folder: str, cache: str, callbacks: bool) -> str:
        """Make the runs that are brought, until it ends; returns why it cannot."""
        try:
            set_up(told)
            for path in (folder, str(Path(cache).parent)):
                if not Path(path).is_dir():
                    raise UserError(f"it does not reach {path}; choose an --out on a file system that all nodes share")
        except UserError as error:
            return str(error)
        serve_runs(self.pipe, Path(folder), Path(cache), lambda: self.stopped, callbacks)
        return ""

    def bring(self, message: bytes | None) -> None:
        self.pipe.inbox.put(message)

    def take(self) -> list[bytes]:
        """What there is to say; waits a while until there is something."""
        said = []
        with suppress(queue.Empty):
            said.append(self.pipe.outbox.get(timeout=POLL_SECONDS))
            while True:
                said.append(self.pipe.outbox.get_nowait())
        return said

    def stop(self) -> None:
        self.stopped = True


class _Calls:
    """The end of the pipe on the side of the one who gives the jobs; and the request to stop."""

    def __init__(self, ray: Any, handle: Any, name: str, serving: Any) -> None:
        self.ray, self.handle, self.name, self.serving = ray, handle, name, serving
        self.said: deque[Any] = deque()
        self.coming = handle.take.remote()

    def send(self, message: Any) -> None:
        if message is True:  # of `stopping`
            self.handle.stop.remote()
        else:
            self.handle.bring.remote(pickle.dumps(message))  # there is one at a time

    def recv(self) -> Any:
        while not self.said:
            self.ray.wait([self.coming, self.serving], num_returns=1)
            self.look()
        return self.said.popleft()

    def look(self) -> None:
        """Take what has come; a place that has ended says why, as an error."""
        done, _ = self.ray.wait([self.coming, self.serving], num_returns=2, timeout=0)
        if self.serving in done:
            problem = self._get(self.serving)
            raise UserError(f"{self.name}: {problem}")
        if self.coming in done:
            self.said.extend(pickle.loads(message) for message in self._get(self.coming))
            self.coming = self.handle.take.remote()

    def _get(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            if "No module named 'bespoke" in str(error):
                raise UserError(f"{self.name}: this bespoke is not installed there; install it on all nodes") from None
            raise RemoteLost(f"{self.name} is gone ({what_happened(error)})") from None

    def close(self) -> None:
        with suppress(Exception):  # it may be gone, and the cluster with it
            self.ray.kill(self.handle, no_restart=True)


class RunPlace(RunProcess):
    """One actor, as the process that gives it jobs sees it."""

    def __init__(
        self, ray: Any, handle: Any, node: Node, folder: Path, cache: Path, bar: Any, callbacks: Sequence[Callback]
    ) -> None:
        self.bar, self.job, self.stop_sent, self.callbacks, self.node = bar, None, False, callbacks, node
        self.imported = True  # what it has not yet done it does before its first run
        serving = handle.serve.remote(setup(), str(folder), str(cache), bool(callbacks))
        self.calls = _Calls(ray, handle, f"the place on {node.address}", serving)
        self.pipe = self.stopping = self.calls
        self.trouble: Exception | None = None

    def heard(self) -> bool:
        """Whether there is something to receive; an error is one, too."""
        try:
            if not self.calls.said:
                self.calls.look()
        except (RemoteLost, UserError) as error:
            self.trouble = error
            return True
        return bool(self.calls.said)

    def receive(self, judge: Judge) -> tuple[Job, RunRecord | None] | None:
        if self.trouble is not None:
            self.job = None
            raise self.trouble
        return super().receive(judge)

    def close(self, keep_bar: bool = False) -> None:
        self.calls.close()
        if hasattr(self.bar, "close") and not keep_bar:
            self.bar.close()


class RayRuns:
    """Places of a Ray cluster, for a scheduler; the cluster is connected to when the first run needs it."""

    def __init__(self, address: str | None, folder: Path, note: Callable[[str], None]) -> None:
        check_installed()
        self.cluster, self.folder, self.note = Cluster(address, note), folder / ".rows", note
        self.shared: SharedCopy | None = None  # the population on disk, for the places
        self.processes: list[RunProcess] = []
        self.connected, self.losses = False, 0

    def _connect(self) -> Cluster:
        if not self.connected:
            self.cluster.__enter__()
            self.connected = True
        return self.cluster

    def most(self, how: EngineChoice, expected: int) -> int:
        """The default number of runs at a time: one on each processor, or on each GPU."""
        return min(self._connect().most(how.device.startswith("cuda")), max(expected, 1))

    def prepare(
        self, population: Population, cache: Path, size: int, callbacks: Sequence[Callback], gpus: bool
    ) -> None:
        """What `started` needs to make so many places, each with a GPU if there are some."""
        self.population, self.cache, self.size, self.callbacks, self.gpus = population, cache, size, callbacks, gpus

    def start(self, after: float = 0.0) -> None:
        """Places are made where they are first needed: no run is made in this process meanwhile."""

    def postpone(self) -> None:
        """Nothing has been begun."""

    @property
    def ready(self) -> bool:
        """Whether there are places."""
        return bool(self.processes)

    def started(self) -> list[RunProcess]:
        """The places, spread over the cluster; makes them at the first call."""
        if not self.processes:
            self.note(f"{self._connect().text()}; a run at a time on each of {self.size} places")
            self.folder.mkdir(parents=True, exist_ok=True)
            self.shared = SharedCopy(self.population, self.folder)
            self.processes.extend(self._places([Silent() for _ in range(self.size)]))
        return self.processes

    def _nodes(self) -> list[Node]:
        """The node of each place."""
        return [process.node for process in self.processes if isinstance(process, RunPlace)]

    def _places(self, bars: Sequence[Any]) -> list[RunPlace]:
        """A place for each bar."""
        cluster, shared = self._connect(), self.shared
        assert shared is not None
        handles = cluster.actors(RunActor, len(bars), self.gpus, self._nodes(), max_concurrency=4)
        return [
            RunPlace(cluster.ray, handle, node, shared.folder, self.cache, bar, self.callbacks)
            for (handle, node), bar in zip(handles, bars)
        ]

    def heard(self, processes: Sequence[RunProcess], seconds: float) -> list[RunProcess]:
        """Those of them that sent something or are gone; waits so long for the first."""
        places = [place for place in processes if isinstance(place, RunPlace)]
        if not any(place.calls.said for place in places):
            waited = [reference for place in places for reference in (place.calls.coming, place.calls.serving)]
            self.cluster.ray.wait(waited, num_returns=1, timeout=seconds)
        return [place for place in places if place.heard()]

    def replace(self, process: RunProcess, lost: RemoteLost) -> None:
        """Another place instead of one that is gone, if there is room for one; raises what happened after too many."""
        self.losses += 1
        if self.losses > LOSSES:
            raise lost
        self.note(f"{lost}; its run goes on elsewhere")
        assert isinstance(process, RunPlace)
        process.close(keep_bar=True)
        self.processes.remove(process)
        nodes = self.cluster.nodes()
        room = sum(int(node.gpus if self.gpus else node.cpus) for node in nodes)
        taken = sum(node.id in {place.id for place in nodes} for node in self._nodes())
        if not self.processes or room > taken:
            self.processes.extend(self._places([process.bar]))

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.processes = []
        if self.shared:
            self.shared.close()
            self.shared = None
            with suppress(OSError):
                self.folder.rmdir()
        if self.connected:
            self.cluster.__exit__()
            self.connected = False


def on_cluster(base: TomlTable) -> tuple[TomlTable, EngineConfig | None]:
    """The experiments of a study without the cluster, over which the runs are spread; each is made by one process."""
    table = base.get("engine")
    if not isinstance(table, dict) or not {"backend", "address"} & set(table):
        return base, None
    found = checked({**base, "stage": base.get("stage") or [{"method": "fedavg", "rounds": 1}]}, "engine").engine
    rest = {name: value for name, value in table.items() if name not in ("backend", "address")}
    return {**base, "engine": rest}, found if found.on_ray else None
