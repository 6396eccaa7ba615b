"""A host runs client work: it owns some clients' data and private state and hands back sums, never single updates.

The same host runs in this process, in a worker process, or (later) in a Ray actor or a Flower ClientApp: `train` and
`examine` take and give plain values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.data.population import Population
from bespoke.data.splits import Query, Rows, Support, Train, Validation
from bespoke.engines.batches import Layout, Orders, Sliced, Stacked, buckets, columns_of, work_of
from bespoke.engines.held import Collusion, Held
from bespoke.engines.private import PrivateTable
from bespoke.method import Batching, Method, Reveal, Setting
from bespoke.models import kernels
from bespoke.models.task import Gradient, joined
from bespoke.privacy.transform import Sent, State, Transform
from bespoke.robust.exchange import Rule
from bespoke.tensors import Params, Tree, finite_rows, leaves, nbytes, stack, take, tree_map, zeros_like

Ints = NDArray[np.int64]
AnyRows = TypeVar("AnyRows", bound=Rows)
Scores = dict[str, dict[str, NDArray[np.float64]]]  # part -> metric sum -> (clients, candidates)
ROWS = "rows"  # among the sums of query rows: each row's own part, (rows, candidates), where that is asked for

WHOLE = Batching(size=2**31)  # all of a client's rows as one batch: for scoring, and for fits to convergence
ROOM = 2**24  # numbers that the padded rows of a chunk may have
LAUNCH_COST = 12.0  # what starting a step of a chunk costs, in steps of one small client: see docs/speed.md


@dataclass(frozen=True)
class Mode:
    """How a host executes clients: one at a time, or `chunk` of them vectorized."""

    vectorized: bool
    chunk: int = 32
    threads: int = 1
    gradient: Gradient = "autograd"


@dataclass(frozen=True)
class ClientWork:
    """What clients do in a stage: the method, what acts on its messages, and the rows they may use."""

    method: Method
    train: Train
    transforms: tuple[Transform, ...] = ()
    setting: Setting | None = None  # of the stage; where nobody knows it, that of the population alone
    robust: Rule | None = None  # how changes become one, if not by their sum
    collusion: Collusion | None = None

    def __post_init__(self) -> None:
        for transform in self.transforms if self.method.trains else ():
            transform.check(self.method)

    def before(self, population: Population) -> Setting:
        """What the server knows before the first round."""
        groups = population.group_numbers()
        known = torch.zeros(len(population)) if groups is None else torch.from_numpy(groups)
        return self.setting or Setting(0, len(population), len(self.train.clients), known)

    @property
    def holds(self) -> bool:
        """Whether messages stay with the hosts until the server has said what it wants of them."""
        return bool(self.method.changes) and (self.robust is not None or self.collusion is not None)

    @property
    def remembers(self) -> bool:
        """Whether clients keep something besides what the method keeps."""
        return self.method.trains and any(transform.remembers for transform in self.transforms)


@dataclass(frozen=True)
class Plan:
    """A cohort's layout and how it is executed; a cohort that comes again, as silos do, is planned once."""

    layout: Layout
    chunks: list[Ints]
    steps: int
    examples: int


@dataclass
class Partial:
    """What one host says of its share of a cohort."""

    sums: Tree | None = None
    each: Tree = field(default_factory=dict)
    pieces: list[Tree] = field(default_factory=list)  # of `each`, while it is gathered
    clients: list[int] = field(default_factory=list)
    excluded: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of each client's change: the simulation looks, no server does
    steps: int = 0
    examples: int = 0
    bytes_up: int = 0

    def merge(self, other: Partial) -> None:
        if other.sums is not None:
            # sums are fresh memory (a sum over clients is a copy), so the first ones can take up the others
            self.sums = other.sums if self.sums is None else tree_map(Tensor.add_, self.sums, other.sums)
        self.pieces += [other.each] if other.each else other.pieces
        self.clients += other.clients
        self.excluded += other.excluded
        self.norms += other.norms
        self.steps += other.steps
        self.examples += other.examples
        self.bytes_up += other.bytes_up

    def joined(self) -> Partial:
        """The same with its pieces put together, once: clients may be many, and what they send large."""
        if self.pieces:
            self.each = tree_map(lambda *parts: torch.cat(parts), *self.pieces) if self.pieces[1:] else self.pieces[0]
            self.pieces = []
        return self


class Host:
    """Runs clients of one population in this process."""

    def __init__(self, population: Population, mode: Mode) -> None:
        self.population, self.mode = population, mode
        self.private = PrivateTable({})

    def open(self, work: ClientWork, params: Params) -> None:
        """Begin a stage; `params` are what a client's private state starts from."""
        task: Any = work.method.task
        task.linear()  # looked up once, now: it makes a network, which vmap does not allow inside it
        self.work = replace(work, method=replace(work.method, task=task.differentiated(self.mode.gradient)))
        self.train_rows = self._held(work.train)
        self.params, self.told = params, State()
        self.private = PrivateTable(self._initial(params))
        # compiled descent takes all clients at once; then nothing needs vmap if the rest of the method does too
        compiled = self.mode.gradient == "fused" and getattr(task, "has_closed_form", False)
        self.stacks = compiled and work.method.stackable and not getattr(task, "safe", False)
        self.plan: Plan | None = None
        self.held: Held | None = None

    def _initial(self, params: Params) -> Tree:
        """What a client holds before its first round: the method's state, and what transforms remember beside it."""
        private = self.work.method.init_private(params)
        if not self.work.remembers:
            return private
        memory: Tree = {}
        for transform in self.work.transforms:
            memory |= transform.memory(self.template())
        return {"method": private, "memory": memory}

    def template(self) -> Tree:
        """What a client's message looks like: all zeros, found by letting a client train as in a first round."""
        method, client = self.work.method, self.train_rows.clients[:1]
        server = method.init_server(self.params, self.work.before(self.population))
        shared = method.broadcast(server) if method.groups(server) is None else take(method.broadcast(server), 0)
        down = {**shared, **method.unicast(server, int(client[0]))}
        orders = Orders.draw(self.train_rows, client, method.batching(), 0)
        return zeros_like(method.client_round(down, method.init_private(self.params), orders.sliced(0))[1])

    def move(self, population: Population, train: Train) -> None:
        """From now on the same clients have these rows; what they hold besides is theirs and stays."""
        self.population = population
        self.train_rows, self.plan = self._held(train), None

    def tell(self, state: State) -> None:
        """What the server tells all clients of its transforms."""
        self.told = state

    def _use_threads(self) -> None:
        # compiled descent has threads of its own, which sleep while they wait; what is left for torch is too little
        # to be worth the spinning of its pool, which on a busy machine costs more than it gains
        fused = self.mode.gradient == "fused"
        torch.set_num_threads(1 if fused else self.mode.threads)
        kernels.use_threads(self.mode.threads)

    def _held(self, rows: AnyRows) -> AnyRows:
        """The same part of the rows this host holds: what a split says is who and which, the data are the host's."""
        return rows if rows.population is self.population else replace(rows, population=self.population)

    # -- training ----------------------------------------------------------------------------------------------------
    def train(
        self, shared: Tree, own: Tree | None, clients: Ints, key: int, coming: Ints | None = None,
        rows: Ints | None = None,
    ) -> Partial:  # fmt: skip
        """One round on these clients; `own` is stacked unicast, one row a client; `coming` are the next round's.

        rows: which row of `shared`, and of the sums, is each client's; where clients come in groups.
        """
        self._use_threads()
        method = self.work.method
        batching = method.batching()
        if self.plan is None or not self.plan.layout.serves(self.train_rows, clients, batching):
            self.plan = self._planned(Layout(self.train_rows, clients, batching))
        orders = self.plan.layout.draw(key)
        if coming is not None:
            self.population.expect(coming, columns_of(self.population))
        result = Partial(steps=self.plan.steps, examples=self.plan.examples)
        told = batching.steps > 0 and not any(transform.hides for transform in self.work.transforms)
        taken = np.full(len(clients), batching.steps)
        for positions in self.plan.chunks:
            chosen = clients[positions]
            private, memory = self._parted(self.private.read(chosen))
            common, mine = _sent(shared, own, rows, positions)
            if self.mode.vectorized:
                new, up = self._vectorized_round(common, mine, private, orders.stacked(positions))
            else:
                rounds = (
                    self._client_round({**common, **take(mine, i)}, take(private, i), orders.sliced(p))
                    for i, p in enumerate(positions)
                )
                new, up = (stack(list(side)) for side in zip(*rounds))
            if told and "steps" in new:
                taken[positions] = new["steps"].numpy()
            sent = Sent(up, nbytes(up), self.population.keys[chosen], key, self.told, memory)
            for transform in self.work.transforms:
                sent = transform.client(sent)
            result.bytes_up += sent.nbytes
            places = None if rows is None else torch.from_numpy(rows[positions])
            groups = 0 if rows is None else len(leaves(shared)[0])
            self._collect(result, chosen, self._joined(new, sent.memory), sent.up, places, groups)
        result.joined()
        if told:
            result.steps, result.examples = work_of(self.plan.layout.sizes, batching, taken)
        if self.work.holds:
            self.held = self._hold(result, clients, rows, len(leaves(shared)[0]) if rows is not None else 1)
        return result

    def _hold(self, result: Partial, clients: Ints, rows: Ints | None, many: int) -> Held | None:
        """Keep what was to be sent; the server is told who has something to send."""
        up, result.each = result.each, {}
        if not result.clients:
            return None
        if rows is not None:
            rows = rows[np.argsort(clients)[np.searchsorted(np.sort(clients), result.clients)]]
        known = self.work.collusion.keys if self.work.collusion else ()
        bad = [int(key) in known for key in self.population.keys[result.clients]]
        return Held.of(self.work.method, up, result.clients, rows, many, bad)

    def answer(self, what: str, told: Tree) -> Tree | None:
        """What the clients whose messages are held say when the server asks."""
        return self.held.answer(what, told) if self.held else None

    def _parted(self, private: Tree) -> tuple[Tree, Tree]:
        """A client's state: what the method sees of it, and what its transforms remember."""
        return (private["method"], private["memory"]) if self.work.remembers else (private, {})

    def _joined(self, private: Tree, memory: Tree) -> Tree:
        return {"method": private, "memory": memory} if self.work.remembers else private

    def _planned(self, layout: Layout) -> Plan:
        return Plan(layout, self._chunks(layout), *work_of(layout.sizes, layout.batching))

    def _chunks(self, layout: Layout, among: NDArray[np.bool_] | None = None) -> list[Ints]:
        """The positions of clients (`among` these) that are executed together."""
        filled = layout.sizes > 0  # a client without rows has nothing to say
        positions = np.flatnonzero(filled if among is None else filled & among)
        if not len(positions):
            return []
        if not self.mode.vectorized:
            # one at a time, so that the memory held is one client's update, whatever the cohort
            return [positions[i : i + 1] for i in range(len(positions))]
        if layout.batching.size >= WHOLE.size:  # all rows at once: these are padded to the longest
            return self._alike(positions, layout.sizes)
        task = self.work.method.task
        if self.mode.gradient == "fused" or getattr(task, "batches_clients", False):
            # compiled descent, and a task with batches of its own, never touch padding: no need to sort by steps
            return np.array_split(positions, -(-len(positions) // self.mode.chunk))
        return [positions[bucket] for bucket in buckets(layout.steps[positions], self.mode.chunk, LAUNCH_COST)]

    def _alike(self, positions: Ints, rows: Ints) -> list[Ints]:
        """Clients with about as many rows, which are padded to the longest, in chunks that memory has room for."""
        if not self.mode.vectorized or len(positions) == 1:
            return [positions]
        sizes = (2 ** np.ceil(np.log2(np.maximum(rows[positions], 1)))).astype(np.int64)
        x = self.population.columns["x"]
        width = max(x[:1].numel() + 1, getattr(self.work.method.task, "row_numbers", lambda x: 0)(x))
        cut: list[Ints] = []
        for part in buckets(sizes, self.mode.chunk, LAUNCH_COST):
            pieces = -(-int(sizes[part].max()) * len(part) * width // ROOM)
            cut += [positions[piece] for piece in np.array_split(part, min(max(pieces, 1), len(part)))]
        return cut

    def _client_round(self, down: Tree, private: Tree, batches: Sliced | Stacked) -> tuple[Tree, Tree]:
        new, up = self.work.method.client_round(down, private, batches)
        undeclared = set(up) ^ set(self.work.method.uplink)
        if undeclared:
            raise TypeError(
                f"{type(self.work.method).__name__} sends {sorted(up)} but declares {sorted(self.work.method.uplink)}"
            )
        return new, up

    def _vectorized_round(self, shared: Tree, own: Tree, private: Tree, batches: Stacked) -> tuple[Tree, Tree]:
        if self.stacks:
            return self._client_round({**shared, **own}, private, batches)

        def one(own: Tree, private: Tree, mine: Any) -> Any:
            return self._client_round({**shared, **own}, private, batches.of_client(mine))

        return torch.func.vmap(one)(own, private, batches.mapped())

    def _collect(
        self, result: Partial, clients: Ints, private: Tree, up: Tree, places: Tensor | None = None, groups: int = 0
    ) -> None:
        """Add what a chunk sent to the sums (each client's to its group's place); leave out who is not finite."""
        uplink = self.work.method.uplink
        # a single client's update is added where it lies; what begins the sums has to be memory of its own
        alone = len(clients) == 1 and result.sums is not None
        sums = {name: tree_map(lambda leaf: leaf[0] if alone else leaf.sum(0), value) for name, value in up.items()}
        # one look at the sums tells whether any client is not finite, or at the norms; only then look at each
        good, sizes = clients, _sizes(self.work.method, up)
        rest = [value for name, value in sums.items() if not sizes or name != next(iter(self.work.method.changes))]
        if not all(map(math.isfinite, (*sizes, *(float(leaf.sum()) for leaf in leaves([rest, private]))))):
            finite = finite_rows([up, private])
            good = clients[finite.numpy()]
            result.excluded += clients[~finite.numpy()].tolist()
            up = take(up, finite)
            private = take(private, finite)
            places = None if places is None else places[finite]
            sums = {name: tree_map(lambda leaf: leaf.sum(0), value) for name, value in up.items()}
            sizes = _sizes(self.work.method, up) if len(good) else []
        self.private.write(good, private)
        if self.work.holds:
            result.merge(Partial(each=up, clients=good.tolist(), norms=sizes))
            return
        each = {name: up[name] for name, reveal in uplink.items() if reveal is Reveal.EACH}
        summed = [name for name in up if name not in each]  # a transform may have added one
        kept: Tree | None = {name: sums[name] for name in summed}
        if places is not None:  # in place: with many groups a table of sums for each client would be slow
            if result.sums is None:
                result.sums = {name: _table(up[name], groups) for name in summed}
            for name in summed:
                tree_map(lambda table, leaf: table.index_add_(0, places, leaf), result.sums[name], up[name])
            kept = None
        result.merge(Partial(sums=kept, each=each, clients=good.tolist(), norms=sizes))

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
        """Make every client's candidate personal models and score each of them on the rows of `parts`.

        by_row: the metric of which each query row's part is handed back as well.
        """
        self._use_threads()
        orders = Orders.draw(self._held(support), clients, self.work.method.support_batching(), key)
        scored = {name: Orders.draw(self._held(part), clients, WHOLE, None) for name, part in parts.items()}
        pieces: list[tuple[Ints, dict[str, dict[str, Tensor]]]] = []
        # apart, for a chunk does the same for all of its clients: those who never trained may have something to make up
        trained = self.private.holds(clients)
        chunks = [(p, new) for new in (False, True) for p in self._chunks(orders.layout, trained != new)]
        largest = np.maximum.reduce([part.sizes for part in scored.values()]) if scored else np.zeros_like(clients)
        groups = [(p, new) for some, new in chunks for p in self._alike(some, largest)]
        for positions, new in groups:
            private, _ = self._parted(self.private.read(clients[positions]))
            common, mine = _sent(shared, own, rows, positions)
            if self.mode.vectorized:
                scores = self._vectorized_scores(common, mine, private, orders, scored, positions, new, by_row)
                pieces.append((positions, scores))
                continue
            one = [
                self._scores({**common, **take(mine, i)}, take(private, i), orders.sliced(p),
                             {name: part.sliced(p).rows() for name, part in scored.items()}, new, by_row)
                for i, p in enumerate(positions)
            ]  # fmt: skip
            # one by one, because clients differ in their numbers of rows
            pieces += [(positions[i : i + 1], stack([each])) for i, each in enumerate(one)]
        return _assemble(pieces, len(clients), scored)

    def _models(self, down: Tree, private: Tree, support: Any, new: bool) -> Iterator[Any]:
        """A client's candidates; `new`: it never trained."""
        method = self.work.method
        return method.personalize(down, method.newcomer(down, private, support) if new else private, support)

    def _scores(
        self, down: Tree, private: Tree, support: Any, parts: dict[str, Params], new: bool, by_row: str = ""
    ) -> dict[str, dict[str, Tensor]]:
        task: Any = self.work.method.task
        found: dict[str, list[Params]] = {name: [] for name in parts}
        for judged in self._judged(self._models(down, private, support, new), parts):
            for name, rows in parts.items():
                found[name].append(task.score(judged[name], rows))
                if by_row and name == "query":
                    found[name][-1][ROWS] = task.row_values(judged[name], rows, by_row)
        return {name: stack(values) for name, values in found.items()}

    def _judged(self, models: Iterator[Any], parts: dict[str, Params]) -> Iterator[dict[str, Any]]:
        """What scores need of each candidate's outputs; where a row has many, they are held for some rows at a time."""
        method, kind = self.work.method, type(self.work.method)
        task: Any = method.task
        if kind.predict is Method.predict and kind.outputs is Method.outputs:
            for model in models:
                yield {name: task.judged(model, rows) for name, rows in parts.items()}
            return
        blocks = {name: task.blocks(rows) for name, rows in parts.items()}
        if all(len(some) == 1 for some in blocks.values()):
            yield from method.outputs(models, parts)
            return
        held = list(models)  # a method with outputs of its own has candidates that share what is large
        found: list[dict[str, list[Any]]] = [{name: [] for name in parts} for _ in held]
        for name, some in blocks.items():
            for block in some:
                for judged, outputs in zip(found, method.outputs(iter(held), {name: block})):
                    judged[name].append(task.judge(outputs[name], block))
        yield from ({name: joined(pieces) for name, pieces in judged.items()} for judged in found)

    def _vectorized_scores(
        self, shared: Tree, own: Tree, private: Tree, orders: Orders, scored: dict[str, Orders], positions: Ints,
        new: bool, by_row: str,
    ) -> dict[str, dict[str, Tensor]]:  # fmt: skip
        batches = orders.stacked(positions)
        examined = {name: part.stacked(positions) for name, part in scored.items()}

        def one(own: Tree, private: Tree, mine: Any, theirs: dict[str, Any]) -> Any:
            rows = {name: stacked.of_client(theirs[name]).rows() for name, stacked in examined.items()}
            return self._scores({**shared, **own}, private, batches.of_client(mine), rows, new, by_row)

        others = {name: stacked.mapped() for name, stacked in examined.items()}
        return torch.func.vmap(one)(own, private, batches.mapped(), others)

    def personal(
        self, shared: Tree, own: Tree | None, client: int, support: Support, candidate: int, key: int,
        rows: Ints | None = None,
    ) -> Params:  # fmt: skip
        """One client's personal model: the chosen candidate, made anew."""
        orders = Orders.draw(self._held(support), np.array([client]), self.work.method.support_batching(), key)
        common, mine = _sent(shared, own, rows, np.zeros(1, np.int64))
        private = take(self._parted(self.private.read([client]))[0], 0)
        new = not self.private.holds(np.array([client]))[0]
        for place, model in enumerate(self._models({**common, **take(mine, 0)}, private, orders.sliced(0), new)):
            if place == candidate:
                return model
        raise IndexError(candidate)

    # -- private state -------------------------------------------------------------------------------------------------
    def save_private(self, path: Path, only_dirty: bool = True, run: str = "") -> list[str]:
        return self.private.save(path, only_dirty, run)

    def load_private(self, path: Path, only: set[int] | None = None) -> None:
        self.private.load(path, only)


def _sizes(method: Method, up: Tree) -> list[float]:
    """The norm of each client's change; empty if the method sends none."""
    name = next(iter(method.changes), None)
    if name is None or not leaves(up[name]):
        return []
    weight = up[method.changes[name]] if method.changes[name] else torch.ones(())
    weight = weight.flatten(1).sum(1) if weight.dim() > 1 else weight  # of clusters: its own
    parts = [torch.linalg.vector_norm(leaf.reshape(len(leaf), -1), dim=1) for leaf in leaves(up[name])]
    return (torch.stack(parts).double().norm(dim=0) / weight.double().abs().clamp(min=1e-300)).tolist()


def _sent(shared: Tree, own: Tree | None, rows: Ints | None, positions: Ints) -> tuple[Tree, Tree]:
    """What these clients are sent: (the same for all, stacked for each); with groups each is sent its group's row."""
    mine = take(own, torch.from_numpy(positions)) if own else {}
    if rows is None:
        return shared, mine
    return {}, {**take(shared, torch.from_numpy(rows[positions])), **mine}


def _table(stacked: Tree | Tensor, rows: int) -> Tree | Tensor:
    """Zeros for sums of what these clients sent, a row for each group."""
    return tree_map(lambda leaf: leaf.new_zeros((rows, *leaf.shape[1:])), stacked)


def _assemble(
    pieces: list[tuple[Ints, dict[str, dict[str, Tensor]]]], clients: int, scored: dict[str, Orders]
) -> Scores:
    """Put the chunks' scores in the order of the clients; clients without support rows stay NaN."""
    out: Scores = {}
    for positions, parts in pieces:
        for part, sums in parts.items():
            sizes, begins = scored[part].sizes, scored[part].layout.begins
            for metric, values in sums.items():
                many = int(sizes.sum()) if metric == ROWS else clients
                table = out.setdefault(part, {}).setdefault(metric, np.full((many, values.shape[1]), np.nan))
                found = values.double().numpy()
                if metric != ROWS:
                    table[positions] = found
                    continue
                for place, rows in zip(positions, found):  # (candidates, rows), padded
                    table[begins[place] : begins[place] + sizes[place]] = rows[:, : sizes[place]].T
    return out
