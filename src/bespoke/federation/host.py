"""A host runs client work. It owns the rows and private state of some clients and returns sums, never single updates.

The same host runs in this process, in a worker process, in a Ray actor or at a site of a federation. Its methods are
the operations of calls.py. New private state is provisional until `settle` keeps or discards it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.data.population import Population
from bespoke.data.splits import Query, Rows, Support, Train, Validation
from bespoke.data.standardize import moments
from bespoke.declarations import stacks
from bespoke.devices import CPU, has_double, home, onto, working_on
from bespoke.errors import RemoteLost, UserError
from bespoke.federation.batches import WHOLE, Layout, Orders, SlicedBatches, StackedBatches, columns_of, work_of
from bespoke.federation.chunks import Chunks
from bespoke.federation.examine import HELD, Scores, ScoreTables, candidates, scores, vectorized_scores
from bespoke.federation.held import Held
from bespoke.federation.local_layers import SUFFIX, LocalLayers
from bespoke.federation.partial import Partial, collect
from bespoke.federation.private_state import PrivateTable
from bespoke.federation.roster import Roster
from bespoke.federation.work import ClientWork, Mode
from bespoke.messages.transform import Outgoing, State
from bespoke.models.fast import kernels
from bespoke.storage import open_arrays
from bespoke.tensors import Params, Tree, leaves, nbytes, stack, take, zeros_like

Ints = NDArray[np.int64]
AnyRows = TypeVar("AnyRows", bound=Rows)


@dataclass(frozen=True)
class CohortPlan:
    """A cohort's layout and its chunks. A cohort that repeats, as silos do, is planned once."""

    layout: Layout
    chunks: list[Ints]
    steps: int
    examples: int


@dataclass
class Provisional:
    """Clients' private state after a round that is not settled: rows of the tables, in chunks."""

    key: int  # the round's
    chunks: list[tuple[Ints, NDArray[np.uint8], NDArray[np.uint8] | None]] = field(default_factory=list)


class Host:
    """Runs clients of one population in this process."""

    def __init__(self, population: Population, mode: Mode) -> None:
        self.population, self.mode = population, mode
        self.device = torch.device(mode.device)
        self.private = PrivateTable({})
        self.layers: LocalLayers | None = None  # layers that stay on clients, through all stages
        self.members: Any = None  # of secure sums; their identities live as long as the host
        self.provisional: Provisional | None = None  # of the last round, until `settle`
        self.settled: int | None = None  # the key of the last settled round

    def hello(self) -> Roster:
        """The clients that live here."""
        return Roster.of(self.population)

    def moments(self, train: Train, centres: dict[str, float]) -> Tree:
        """Sums of this place's training rows, from which means and deviations of the federation follow."""
        return moments(self.population, self._held(train), centres)

    def open(self, work: ClientWork, params: Params) -> None:
        """Begins a stage. `params` are the parameters from which private state starts."""
        task = work.method.task
        task.linear()  # called now and cached: it makes a network, which is not possible inside vmap
        task = task.differentiated(self.mode.gradient, self.mode.precision)
        self.work = replace(work, method=replace(work.method, task=task))
        self.train_rows = self._held(work.train)
        if task.layers and (self.layers is None or self.layers.start.keys() != task.layers.keys()):
            self.layers = LocalLayers(task.layers)
        params = self.layers.whole(params) if self.layers else params
        self.params, self.transform_state = params, State()
        self.private = PrivateTable(self._initial(params))
        # compiled descent takes all clients at once; if the rest of the method does too, nothing needs vmap
        compiled = self.mode.gradient == "fused" and task.has_closed_form
        self.stacks = compiled and stacks(work.method.client_round) and not task.safe
        self.plan: CohortPlan | None = None
        self.held: Held | None = None
        self.provisional = None

    def _initial(self, params: Params) -> Tree:
        """A client's private state before its first round: the method's, and the transforms' memory."""
        private = self.work.method.init_private(params)
        if not self.work.remembers:
            return private
        memory: Tree = {}
        for transform in self.work.transforms:
            memory |= transform.memory(self.template())
        return {"method": private, "memory": memory}

    def template(self) -> Tree:
        """A client's message with all values zero. Its form is found by training one client as in a first round."""
        method, client = self.work.method, self.train_rows.clients[:1]
        down = self.work.sample
        if down is None:
            down = self.work.first_sent(self.params, Roster.of(self.population), int(client[0]))
        orders = Orders.draw(self.train_rows, client, method.batching(), 0, self.device)
        private = method.init_private(self.params)
        layers = self.layers.start if self.layers else {}
        with working_on(self.device):
            batches = self._batches(orders, 0)
            _, up, _ = self._client_round(self._put(down), self._put(private), batches, self._put(layers))
        return zeros_like(home(up))

    def _batches(self, orders: Orders, position: int) -> SlicedBatches:
        """One client's batches."""
        sliced = orders.sliced(position)
        return replace(sliced, draws=True) if self.work.method.task.draws else sliced

    def _stacked(self, orders: Orders, positions: Ints) -> StackedBatches:
        """Several clients' batches."""
        stacked = orders.stacked(positions)
        return replace(stacked, draws=True) if self.work.method.task.draws else stacked

    def move(self, train: Train) -> None:
        """Replaces the clients' rows by these; private state stays."""
        self.population = train.population
        self.train_rows, self.plan = train, None

    def _use_threads(self) -> None:
        # compiled descent has its own threads, which sleep while they wait. The rest is too little work for torch's
        # thread pool, whose spinning costs more than it gains on a busy machine
        fused = self.mode.gradient == "fused"
        torch.set_num_threads(1 if fused else self.mode.threads)
        kernels.use_threads(self.mode.threads)

    def _put(self, tree: Tree) -> Tree:
        return onto(tree, self.device)

    def _held(self, rows: AnyRows) -> AnyRows:
        """The same part of this host's rows: a split says which clients and rows, the host has the data."""
        return rows if rows.population is self.population else replace(rows, population=self.population)

    # -- training ----------------------------------------------------------------------------------------------------
    def train(
        self, shared: Tree, own: Tree | None, clients: Ints, key: int, next_clients: Ints | None = None,
        rows: Ints | None = None, number: int = 0, transform_state: State | None = None,
    ) -> Partial:  # fmt: skip
        """Runs one round on these clients.

        own: the unicast messages, stacked, one row a client. next_clients: the next cohort, whose rows are read ahead.
        rows: with groups, each client's row of `shared` and of the sums. number: the round's number from 1, for
        schedules. transform_state: what the server sends all clients for the transforms.

        New private state is provisional under the round's key. A repeated round replaces it.
        """
        self._use_threads()
        self.transform_state = transform_state or self.transform_state
        self.provisional = Provisional(key)
        method = self.work.method
        batching = method.batching()
        if self.plan is None or not self.plan.layout.serves(self.train_rows, clients, batching):
            self.plan = self._planned(Layout(self.train_rows, clients, batching, self.device))
        orders = self.plan.layout.draw(key, number)
        shared, own = self._put(shared), self._put(own) if own else None
        if next_clients is not None:
            self.population.expect(next_clients, columns_of(self.population))
        # noise and norms are computed in float64
        counter = CPU if self.work.transforms and not has_double(self.device) else self.device
        result = Partial(steps=self.plan.steps, examples=self.plan.examples)
        counted = batching.steps > 0 and not any(transform.hides for transform in self.work.transforms)
        taken = np.full(len(clients), batching.steps)
        for positions in self.plan.chunks:
            chosen = clients[positions]
            private, memory = self._parted(self._put(self.private.read(chosen)))
            with working_on(self.device):
                common, mine = _sent(shared, own, rows, positions)
                new, up, layers = self._trained(common, mine, private, orders, positions, chosen)
            if counted and "steps" in new:
                taken[positions] = new["steps"].cpu().numpy()
            new, up, memory, layers = (onto(tree, counter) for tree in (new, up, memory, layers))
            with working_on(counter):
                sent = Outgoing(up, nbytes(up), self.population.keys[chosen], key, self.transform_state, memory)
                for transform in self.work.transforms:
                    sent = transform.client(sent)
                result.bytes_up += sent.nbytes
                places = None if rows is None else torch.as_tensor(rows[positions])
                groups = 0 if rows is None else len(leaves(shared)[0])
                kept = {"state": self._joined(new, sent.memory), "layers": layers}
                good, kept = collect(result, self.work, chosen, kept, sent.up, places, groups)
                self._note(self.provisional, good, kept)
        result.joined()
        if counted:
            result.steps, result.examples = work_of(self.plan.layout.sizes, batching, taken)
        if self.work.masks:
            self._members().hold(result.each, result.clients)
            result.each, result.bytes_up = {}, 0
        elif self.work.holds:
            self.held = self._hold(result, clients, rows, len(leaves(shared)[0]) if rows is not None else 1)
        return result

    def _hold(self, result: Partial, clients: Ints, rows: Ints | None, many: int) -> Held | None:
        """Keeps the messages here. The result names the clients that have one."""
        up, result.each = result.each, {}
        if not result.clients:
            return None
        if rows is not None:
            rows = rows[np.argsort(clients)[np.searchsorted(np.sort(clients), result.clients)]]
        known = self.work.collusion.keys if self.work.collusion else ()
        bad = [int(key) in known for key in self.population.keys[result.clients]]
        return Held.of(self.work.method, up, result.clients, rows, many, bad)

    def answer(self, question: str, inputs: Tree) -> Tree | None:
        """Answers a question of the server for the clients whose messages are held."""
        return self.held.answer(question, inputs) if self.held else None

    def _members(self) -> Any:
        from bespoke.federation.masked import Members  # needs cryptography, an extra

        if self.members is None and self.work.secure is not None:
            self.members = Members(self.work.secure)
        return self.members

    def secure(self, step: str, messages: dict[int, Any]) -> tuple[dict[int, Any], str]:
        """The clients' answers to a step of secure sums, or the reason why one of them refuses."""
        try:
            return self._members().answer(step, messages), ""
        except UserError as refusal:
            return {}, str(refusal)

    def settle(self, key: int, used: Ints | None = None) -> None:
        """Keeps the provisional private state of a round: of all its clients, or of those in `used`.

        The others keep the state that they had before the round.
        """
        made = self.provisional
        if made is None or made.key != key:
            if key == self.settled:
                return
            raise RemoteLost(f"the private state that round {key} made is no longer here; go back to a checkpoint")
        for clients, state, layers in made.chunks:
            kept: Any = slice(None) if used is None else np.isin(clients, used)
            self.private.put(clients[kept], state[kept])
            if self.layers and layers is not None:
                self.layers.table.put(clients[kept], layers[kept])
        self.provisional, self.settled = None, key

    def _note(self, made: Provisional, clients: Ints, kept: Tree) -> None:
        """Adds a chunk's new private state to the provisional state, if clients have any."""
        if self.private or self.layers:
            state, many = self.private.packed(kept["state"], len(clients)), len(clients)
            made.chunks.append(
                (clients, state, self.layers.table.packed(kept["layers"], many) if self.layers else None)
            )

    def _parted(self, private: Tree) -> tuple[Tree, Tree]:
        """Splits a client's state into the method's part and the transforms' memory."""
        return (private["method"], private["memory"]) if self.work.remembers else (private, {})

    def _joined(self, private: Tree, memory: Tree) -> Tree:
        return {"method": private, "memory": memory} if self.work.remembers else private

    def _planned(self, layout: Layout) -> CohortPlan:
        return CohortPlan(layout, self._chunks().of(layout), *work_of(layout.sizes, layout.batching))

    def _chunks(self) -> Chunks:
        return Chunks(self.mode, self.work.method.task, self.population.columns["x"])

    def _client_round(
        self, down: Tree, private: Tree, batches: SlicedBatches | StackedBatches, layers: Params
    ) -> tuple[Tree, Tree, Params]:
        """The client's new state, what it sends, and its own layers after the round."""
        if layers:
            down = LocalLayers.into(down, layers)
        new, up = self.work.method.client_round(down, private, batches)
        undeclared = set(up) ^ set(self.work.method.uplink)
        if undeclared:
            raise TypeError(
                f"{type(self.work.method).__name__} sends {sorted(up)} but declares {sorted(self.work.method.uplink)}"
            )
        if layers:
            up, layers = LocalLayers.out_of(up, layers, self.work.method)
        return new, up, layers

    def _trained(
        self, shared: Tree, own: Tree, private: Tree, orders: Orders, positions: Ints, clients: Ints
    ) -> tuple[Tree, Tree, Tree]:
        """The new private state, the messages and the own layers of these clients, stacked."""
        if self.mode.vectorized:
            return *self._vectorized_round(shared, own, private, self._stacked(orders, positions)), {}
        rounds = [
            self._client_round({**shared, **take(own, i)}, take(private, i), self._batches(orders, p),
                               self._put(self.layers.of(clients[i])) if self.layers else {})
            for i, p in enumerate(positions)
        ]  # fmt: skip
        new, up, layers = (stack(list(side)) for side in zip(*rounds))
        return new, up, layers

    def _vectorized_round(self, shared: Tree, own: Tree, private: Tree, batches: StackedBatches) -> tuple[Tree, Tree]:
        if self.stacks:
            return self._client_round({**shared, **own}, private, batches, {})[:2]

        def one(own: Tree, private: Tree, mine: Any) -> Any:
            return self._client_round({**shared, **own}, private, batches.of_client(mine), {})[:2]

        trained: tuple[Tree, Tree] = torch.func.vmap(one)(own, private, batches.mapped())
        return trained

    # -- personal models -----------------------------------------------------------------------------------------------
    def examine(
        self,
        shared: Tree,
        own: Tree | None,
        clients: Ints,
        support: Support,
        parts: dict[str, Support | Validation | Query],
        key: int,
        rows: Ints | None = None,
        by_row: str = "",
    ) -> Scores:
        """Makes every client's candidate personal models and scores each of them on the rows of `parts`.

        by_row: the metric whose value for each query row is returned as well.
        """
        self._use_threads()
        batching, device = self.work.method.support_batching(), self.device
        orders = Orders.draw(self._held(support), clients, batching, key, device)
        scored = {name: Orders.draw(self._held(part), clients, WHOLE, None, device) for name, part in parts.items()}
        shared, own = self._put(shared), self._put(own) if own else None
        tables = ScoreTables(len(clients), scored)
        # clients that never trained are in chunks of their own, because only for these the method calls `newcomer`
        trained = self.private.holds(clients)
        chunks = self._chunks()
        alike = [(p, new) for new in (False, True) for p in chunks.of(orders.layout, trained != new)]
        largest = np.maximum.reduce([part.sizes for part in scored.values()]) if scored else np.zeros_like(clients)
        groups = [(p, new) for some, new in alike for p in chunks.alike(some, largest)]
        if self.work.method.task.own:
            groups = [(p[i : i + HELD], new) for p, new in groups for i in range(0, len(p), HELD)]
        for positions, new in groups:
            private, _ = self._parted(self._put(self.private.read(clients[positions])))
            with working_on(device):
                common, mine = _sent(shared, own, rows, positions)
                found = self._scored(common, mine, private, orders, scored, positions, clients, new, by_row)
            for places, sums in found:
                tables.put(places, sums)
        return tables.tables

    def _scored(
        self, shared: Tree, own: Tree, private: Tree, orders: Orders, scored: dict[str, Orders], positions: Ints,
        clients: Ints, new: bool, by_row: str,
    ) -> list[tuple[Ints, dict[str, dict[str, Tensor]]]]:  # fmt: skip
        method = self.work.method
        if self.mode.vectorized:
            batches = self._stacked(orders, positions)
            found = vectorized_scores(method, shared, own, private, batches, scored, positions, new, by_row)
            return [(positions, found)]
        inputs = (self._personal_inputs(int(clients[p]), {**shared, **take(own, i)}, orders, p, private, i)
               for i, p in enumerate(positions))  # fmt: skip
        one = [
            scores(method, *of_one, {name: part.sliced(p).rows() for name, part in scored.items()}, new, by_row)
            for of_one, p in zip(inputs, positions)
        ]
        # one by one, because clients differ in their numbers of rows
        return [(positions[i : i + 1], stack([each])) for i, each in enumerate(one)]

    def personal(
        self, shared: Tree, own: Tree | None, client: int, support: Support, candidate: int, key: int,
        rows: Ints | None = None,
    ) -> Params:  # fmt: skip
        """Makes one client's personal model again: the chosen candidate."""
        batching, device = self.work.method.support_batching(), self.device
        orders = Orders.draw(self._held(support), np.array([client]), batching, key, device)
        private, _ = self._parted(self._put(self.private.read([client])))
        new = not self.private.holds(np.array([client]))[0]
        with working_on(device):
            common, mine = _sent(self._put(shared), self._put(own) if own else None, rows, np.zeros(1, np.int64))
            inputs = self._personal_inputs(client, {**common, **take(mine, 0)}, orders, 0, private, 0)
            for place, model in enumerate(candidates(self.work.method, *inputs, new)):
                if place == candidate:
                    chosen: Params = home(model)
                    return chosen
        raise IndexError(candidate)

    def _personal_inputs(
        self, client: int, down: Tree, orders: Orders, position: int, private: Tree, place: int
    ) -> tuple[Tree, Tree, SlicedBatches]:
        """The inputs of a client's personal model: what it receives, its private state, and its rows."""
        support = self._batches(orders, position)
        if self.layers:
            layers = self._put(self.layers.of(client))
            if not self.layers.holds(client) and "params" in down:
                layers = self.work.method.task.settled(layers, down["params"], support)
            down = LocalLayers.into(down, layers)
        return down, take(private, place), support

    # -- private state -------------------------------------------------------------------------------------------------
    def save_private(self, folder: str | Path, name: str, only_dirty: bool = True, run: str = "") -> list[str]:
        """Writes the changes since the last segment; returns the names of all files that now hold private state."""
        path = Path(folder) / f"{name}.safetensors"
        names = self.private.save(path, only_dirty, run)
        if self.layers:
            names += self.layers.table.save(path.with_stem(f"{path.stem}{SUFFIX}"), only_dirty, run)
        return names

    def load_private(
        self, folder: str | Path, names: Sequence[str], share: tuple[int, int] | None = None, point: str = ""
    ) -> None:
        """Reads segments, in the order written.

        share: (place, places) of this host among the hosts that wrote them, if there are several. `point`: the name of
        the save, for hosts that keep their own files.
        """
        for name in names:
            path, only = Path(folder) / name, None
            if share is not None:
                clients = open_arrays(path)[0]["clients"].numpy()
                only = set(clients[home_of(self.population.keys[clients], share[1]) == share[0]].tolist())
            table = self.layers.table if self.layers and path.stem.endswith(SUFFIX) else self.private
            table.load(path, only)

    def kept_layers(self, point: str = "") -> list[str]:
        """The names of the files with clients' own layers from the stage before."""
        return [segment.name for segment in self.layers.table.segments] if self.layers else []


def home_of(keys: NDArray[np.uint64], places: int) -> Ints:
    """The place (of `places`) that owns each client's private state."""
    return (keys % np.uint64(max(places, 1))).astype(np.int64)


def _sent(shared: Tree, own: Tree | None, rows: Ints | None, positions: Ints) -> tuple[Tree, Tree]:
    """What these clients receive: (shared by all, stacked for each). With groups, each receives its group's row."""
    mine = take(own, torch.as_tensor(positions)) if own else {}
    if rows is None:
        return shared, mine
    return {}, {**take(shared, torch.as_tensor(rows[positions])), **mine}
