"""The engine: spreads a cohort over hosts, one in this process or several in worker processes, and adds up."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.shared_copy import Lent
from bespoke.data.splits import Query, Support, Train, Validation
from bespoke.declarations import Reveal, reveals
from bespoke.devices import of_worker
from bespoke.errors import UserError
from bespoke.federation.batches import steps_of
from bespoke.federation.examine import ROWS, Scores, fill
from bespoke.federation.held import settle
from bespoke.federation.host import Host
from bespoke.federation.partial import Partial
from bespoke.federation.processes import WorkerFailed
from bespoke.federation.work import ClientWork, Mode
from bespoke.federation.workers import Worker
from bespoke.messages.robust.exchange import Combined
from bespoke.messages.transform import State
from bespoke.method import Cohort, Method
from bespoke.task import Gradient, Precision
from bespoke.tensors import Params, Tree, leaves, nbytes, stack, take, tree_map

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Choice:
    """How clients are executed. Kept in the run folder, so that a resumed run is executed the same way."""

    vectorized: bool
    chunk: int
    workers: int  # 0: in this process
    threads: int  # torch threads of each host
    gradient: Gradient
    reason: str
    precision: Precision = "float32"
    device: str = "cpu"  # "cuda": all GPUs, which workers share

    def text(self) -> str:
        how = f"vectorized over clients, {self.chunk} at a time" if self.vectorized else "one client at a time"
        how += {"fused": ", compiled descent", "closed-form": ", gradient in closed form"}.get(self.gradient, "")
        how += ", products in bfloat16" if self.precision == "bf16" else ""
        where = (
            f"{self.workers} single-threaded worker processes"
            if self.workers
            else f"in process, {self.threads} threads"
        )
        where += "" if self.device == "cpu" else f", on {self.device}"
        return f"{how}, {where} ({self.reason})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Secured:
    """Secure sums in a round: bytes of the protocol beside the broadcast, and why a cohort was not added up."""

    bytes_up: int
    bytes_down: int
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundResult:
    """A cohort for the server, and what the round cost."""

    cohort: Cohort
    bytes_up: int
    bytes_down: int
    steps: int
    examples: int
    state: State = field(default_factory=dict)  # of the transforms, for the next round
    ruled: Combined | None = None  # what a robust rule did
    norms: dict[int, float] = field(default_factory=dict)  # of each client's change: for the one who simulates
    observed: dict[str, Any] = field(default_factory=dict)  # by the transforms, for the round's log
    secure: Secured | None = None  # what secure sums cost, and what they refused


class Engine:
    """Runs client work on hosts. Use as a context manager: workers end with it."""

    def __init__(self, population: Population, choice: Choice) -> None:
        self.population, self.choice = population, choice
        mode = Mode(choice.vectorized, choice.chunk, choice.threads, choice.gradient, choice.precision, choice.device)
        self.lent: Lent | None = None  # the population on disk, for the workers
        self.workers: list[Worker] = []
        self.host: Host | None = None
        self.sums: Any = None  # secure sums, where there are any
        if choice.workers:
            self.lent = Lent(population)
            names = [f"worker {place + 1} of {choice.workers}" for place in range(choice.workers)]
            modes = [replace(mode, device=of_worker(choice.device, place)) for place in range(choice.workers)]
            self.workers = [Worker(self.lent.folder, *told) for told in zip(modes, names)]
        else:
            self.host = Host(population, mode)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers = []
        if self.lent:
            self.lent.close()

    # -- the same call on every host -----------------------------------------------------------------------------------
    def _all(self, name: str, *arguments: Any) -> list[Any]:
        if self.host:
            return [getattr(self.host, name)(*arguments)]
        for worker in self.workers:
            worker.start(name, *arguments)
        return self._answers()

    def _answers(self) -> list[Any]:
        """What every worker says to what it was asked; all are heard out before a failure of one is raised."""
        answers, failure = [], None
        for worker in self.workers:
            try:
                answers.append(worker.finish())
            except WorkerFailed as error:
                failure = failure or error
        if failure:
            raise failure
        return answers

    def open(self, work: ClientWork, params: Params) -> None:
        """Begin a stage: a method, its rows, and the parameters its private state starts from."""
        self.work = work
        self.layered = bool(work.method.task.layers)
        self.stateful = bool(work.method.init_private(params)) or work.remembers or self.layered
        if work.secure is not None and self.sums is None:
            from bespoke.federation.masked import SecureSums  # needs cryptography, an extra

            self.sums = SecureSums(work.secure, self.population.keys)
        self._all("open", work, params)

    def move(self, train: Train) -> None:
        """Go on with other rows of the same clients; their private state stays where it is."""
        self.population, self.work = train.population, replace(self.work, train=train)
        if self.host:
            self.host.move(train.population, train)
            return
        before, self.lent = self.lent, Lent(train.population)
        self._all("move", self.lent.folder, train)
        if before:
            before.close()

    def home(self, clients: Ints) -> Ints:
        """The worker that owns a client's private state."""
        return (self.population.keys[clients] % np.uint64(max(len(self.workers), 1))).astype(np.int64)

    def _shares(self, clients: Ints, weight: Ints) -> list[Ints]:
        """Positions of the cohort for each worker: at their home if something of theirs lies there, else by work."""
        if self.stateful or self.work.masks:
            home = self.home(clients)
            return [np.flatnonzero(home == w) for w in range(len(self.workers))]
        load = np.zeros(len(self.workers))
        shares: list[list[int]] = [[] for _ in self.workers]
        for position in np.argsort(-weight, kind="stable"):  # longest first, to whoever has least
            target = int(np.argmin(load))
            load[target] += weight[position]
            shares[target].append(int(position))
        return [np.array(sorted(share), dtype=np.int64) for share in shares]

    def _own(self, server: Tree, clients: Ints) -> Tree | None:
        return unicast(self.work.method, server, clients)

    def _rows(self, server: Tree, clients: Ints) -> Ints | None:
        """Whose group's row of the broadcast each client is sent; None if there are no groups."""
        groups = self.work.method.groups(server)
        return None if groups is None else groups[torch.from_numpy(clients)].numpy()

    # -- a round -------------------------------------------------------------------------------------------------------
    def round(
        self, server: Tree, clients: Ints, key: int, coming: Ints | None = None, state: State | None = None,
        number: int = 0, contacted: Ints | None = None,
    ) -> RoundResult:  # fmt: skip
        """Run one round on a cohort and hand back sums.

        `coming`: who takes part in the next, if that is known; `state`: of the transforms, as the last round left it;
        `number`: of the round, from 1, which clients' schedules go by;
        `contacted`: the clients, and those that do not answer: secure sums have to get over their loss.
        """
        method, sent_to, refused = self.work.method, len(clients), []
        everyone = clients if contacted is None else contacted
        if self.work.masks:
            clients, refused = self.sums.enough(everyone, clients, self._rows(server, everyone))
        state = self.start() if state is None else state
        if state:
            self._all("tell", state)
        shared, own = method.broadcast(server), self._own(server, clients) if len(clients) else None
        rows = self._rows(server, clients)
        if not len(clients):
            merged = Partial()
        elif self.host:
            merged = self.host.train(shared, own, clients, key, coming, rows, number)
        else:
            sizes = self.work.train.sizes(clients)
            shares = self._shares(clients, steps_of(sizes, method.batching()))
            for worker, share in zip(self.workers, shares):
                mine = take(own, torch.from_numpy(share)) if own else None
                worker.start("train", shared, mine, clients[share], key, None, _some(rows, share), number)
            merged = Partial()
            for part in self._answers():
                merged.merge(part)
            merged.joined()
        if merged.sums is None and any(transform.covers for transform in self.work.transforms):
            empty = self.template()  # that nobody sent anything must not be seen
            if rows is not None:
                empty = tree_map(lambda leaf: leaf.new_zeros((len(leaves(shared)[0]), *leaf.shape)), empty)
            sent = reveals(method.uplink)
            merged.sums = {name: empty[name] for name, reveal in sent.items() if reveal is not Reveal.EACH}
        cohort = Cohort(merged.sums or {}, merged.each, tuple(merged.clients), tuple(merged.excluded))
        secure = None
        if self.work.masks:
            cohort, secure = self._masked(cohort, everyone, self._rows(server, everyone), shared, refused)
        ruled = self._settled(cohort, clients, rows, shared) if self.work.holds and cohort.clients else None
        if ruled is not None:
            cohort = replace(cohort, sums=ruled.sums, each=ruled.each, clients=ruled.clients)
        observed: dict[str, Any] = {}
        for transform in reversed(self.work.transforms):
            observed |= transform.observe(cohort, state)
            cohort, state = transform.server(cohort, state, key)
        down = (broadcast_bytes(method, server) + 4 * len(state)) * sent_to + (nbytes(own) if own else 0)
        up, down = merged.bytes_up + (ruled.bytes_up if ruled else 0), down + (ruled.bytes_down if ruled else 0)
        norms = dict(zip(merged.clients, merged.norms))
        return RoundResult(cohort, up, down, merged.steps, merged.examples, state, ruled, norms, observed, secure)

    def _settled(self, cohort: Cohort, asked: Ints, rows: Ints | None, shared: Tree) -> Combined:
        """A cohort by the robust rule, of the messages that hosts hold."""
        mine = None
        if rows is not None:
            mine = rows[np.argsort(asked)[np.searchsorted(np.sort(asked), cohort.clients)]]

        def ask(what: str, told: Tree) -> list[Tree]:
            return [found for found in self._all("answer", what, told) if found is not None]

        many = len(leaves(shared)[0]) if rows is not None else 1
        work = self.work
        return settle(work.method, work.robust, work.collusion, ask, cohort.clients, mine, many)

    def _masked(
        self, cohort: Cohort, contacted: Ints, rows: Ints | None, shared: Tree, refused: list[str]
    ) -> tuple[Cohort, Secured]:
        """A cohort by secure sums, of the messages that hosts hold, and what it cost."""
        ready = np.sort(np.array(cohort.clients, np.int64))
        many = len(leaves(shared)[0]) if rows is not None else 1
        found = self.sums.add_up(self._secure, contacted, ready, rows, many)
        self._all("settle", np.array(found.clients, np.int64))
        sums = found.sums or cohort.sums  # empty, or the zeros that noise has to cover
        secured = Secured(found.bytes_up, found.bytes_down, (*refused, *found.refused))
        return replace(cohort, sums=sums, clients=found.clients), secured

    def _secure(self, step: str, told: dict[int, Any]) -> dict[int, Any]:
        """A step of secure sums: each client is asked where it lives; one that refuses ends the run."""
        if self.host or step in ("directory", "form"):
            answers = self._all("secure", step, told)
        else:
            clients = np.array(list(told), np.int64)
            home = self.home(clients)
            for place, worker in enumerate(self.workers):
                worker.start("secure", step, {client: told[client] for client in clients[home == place].tolist()})
            answers = self._answers()
        for _, refusal in answers:
            if refusal:
                raise UserError(refusal)
        return {client: said for found, _ in answers for client, said in found.items()}

    def start(self) -> State:
        """The transforms' state before the first round of a stage."""
        return {name: value for transform in self.work.transforms for name, value in transform.start().items()}

    def template(self) -> Tree:
        """What a message of the stage looks like, all zeros."""
        if self.host:
            return self.host.template()
        self.workers[0].start("template")
        template: Tree = self.workers[0].finish()
        return template

    # -- personal models -----------------------------------------------------------------------------------------------
    def examine(
        self, server: Tree, clients: Ints, support: Support, parts: dict[str, Support | Validation | Query], key: int,
        by_row: str = "",
    ) -> Scores:  # fmt: skip
        """Scores of every candidate personal model of these clients: part -> metric sum -> (clients, candidates).

        by_row: the metric of which each query row's part is wanted too, as ROWS: (rows, candidates).
        """
        method = self.work.method
        shared, own, rows = method.broadcast(server), self._own(server, clients), self._rows(server, clients)
        parts = {name: part for name, part in parts.items() if part.sizes(clients).sum()}
        if self.host:
            return self.host.examine(shared, own, clients, support, parts, key, rows, by_row)
        shares = self._shares(clients, support.sizes(clients) + 1)
        for worker, share in zip(self.workers, shares):
            mine = take(own, torch.from_numpy(share)) if own else None
            worker.start("examine", shared, mine, clients[share], support, parts, key, _some(rows, share), by_row)
        out: Scores = {}
        for answer, share in zip(self._answers(), shares):
            for part, sums in answer.items():
                for metric, values in sums.items():
                    sizes = parts[part].sizes(clients)
                    many, places = len(clients), share
                    if metric == ROWS:
                        many, places = int(sizes.sum()), _stretches(sizes, share)
                    fill(out.setdefault(part, {}), metric, many, places, np.asarray(values))
        return out

    def personal(self, server: Tree, client: int, support: Support, candidate: int, key: int) -> Params:
        """One client's chosen personal model."""
        shared, own = self.work.method.broadcast(server), self._own(server, np.array([client]))
        rows = self._rows(server, np.array([client]))
        if self.host:
            return self.host.personal(shared, own, client, support, candidate, key, rows)
        worker = self.workers[int(self.home(np.array([client]))[0])]
        worker.start("personal", shared, own, client, support, candidate, key, rows)
        params: Params = worker.finish()
        return params

    # -- private state on disk -----------------------------------------------------------------------------------------
    def save_private(self, folder: Path, name: str, only_dirty: bool = True, run: str = "") -> list[str]:
        """Each host writes its own clients' rows; returns the names of all files that private state now lies in."""
        if not self.stateful:
            return []
        paths = [folder / f"{name}-{place}.safetensors" for place in range(max(len(self.workers), 1))]
        if self.host:
            return self.host.save_private(paths[0], only_dirty, run)
        for worker, path in zip(self.workers, paths):
            worker.start("save_private", path, only_dirty, run)
        return list(dict.fromkeys(segment for segments in self._answers() for segment in segments))

    def kept_layers(self) -> list[str]:
        """The files of clients' own layers that a stage before this one left."""
        return [name for names in self._all("kept_layers") for name in names] if self.layered else []

    def load_private(self, paths: list[Path]) -> None:
        """Give each host the rows of its own clients, in the order written."""
        for path in paths:
            if self.host:
                self.host.load_private(path)
                continue
            from bespoke.storage import open_arrays

            clients = open_arrays(path)[0]["clients"].numpy()
            home = self.home(clients)
            for place, worker in enumerate(self.workers):
                worker.start("load_private", path, set(clients[home == place].tolist()))
            self._answers()


def _stretches(sizes: Ints, share: Ints) -> Ints:
    """The places of the rows of some clients, where all clients' rows lie one after the other."""
    begins = np.cumsum(sizes) - sizes
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(begins[i], begins[i] + sizes[i]) for i in share)])


def _some(rows: Ints | None, share: Ints) -> Ints | None:
    return None if rows is None else rows[share]


def broadcast_bytes(method: Method, server: Tree) -> int:
    """What one client is sent of the broadcast: all of it, or its group's row."""
    shared = method.broadcast(server)
    return nbytes(shared if method.groups(server) is None else take(shared, 0))


def unicast(method: Method, server: Tree, clients: Ints) -> Tree | None:
    """What each of these clients is sent for itself, stacked; None if the method sends nothing so, or to nobody."""
    if type(method).unicast is Method.unicast or not len(clients):
        return None
    return stack([method.unicast(server, int(client)) for client in clients])
