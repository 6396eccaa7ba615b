"""From rows to minibatches: exact slices for one client, or padded stacks for many.

Which rows go into which batch is a function of (key, client, epoch) alone, the same in both forms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.data.population import Population
from bespoke.data.splits import Rows
from bespoke.devices import CPU
from bespoke.method import Batching
from bespoke.randomness import mix, shuffles, text_key
from bespoke.task import DRAW
from bespoke.tensors import Params

Ints = NDArray[np.int64]
WHOLE = Batching(size=2**31)  # all of a client's rows as one batch: for scoring, and for fits to convergence
COLUMNS = ("x", "y", "kind", "context", "characters", "spelling")  # columns that clients compute with
NOTHING = torch.zeros((1, 1), dtype=torch.int64)
NO_KEY = torch.zeros((), dtype=torch.int64)
LAP = 2**24  # steps of an epoch, at most
NO_STEPS = "a number of steps for each client needs a batching in steps: Batching(steps=...)"


@dataclass(frozen=True)
class SlicedBatches:
    """One client's rows, already in order: data leaves are (epochs, rows, ...); a batch is a slice of true size."""

    data: Params
    size: int
    repeats: int
    examples: Tensor
    steps: int  # per epoch
    most: int | None = None  # steps in all, where the batching says how many
    key: Tensor = NO_KEY
    round: int = 0  # of the stage; 0 where personal models are made
    draws: bool = False  # whether a batch has random numbers of its own, as `draw`: for dropout
    laps: int = 0  # what came before, as epochs

    def __len__(self) -> int:
        return self.steps * self.repeats if self.most is None else self.most

    def _turn(self, step: int) -> int:
        return _turn(self.laps, step, self.steps if self.most is None else 0)

    def __getitem__(self, step: int) -> Params:
        epoch, place = divmod(step, self.steps)
        batch = {}
        for name, column in self.data.items():
            order = column[epoch if len(column) > 1 else 0]
            batch[name] = order[place * self.size : (place + 1) * self.size]
        return {**batch, DRAW: _draw(self.key, self._turn(step))} if self.draws else batch

    def live(self, step: int) -> float:
        return 1.0

    def epochs(self, many: int = 1) -> Iterator[SlicedBatches]:
        return (self.part(first, first + many) for first in range(0, self.repeats, many))

    def part(self, begin: int, end: int) -> SlicedBatches:
        some = {name: column[begin:end] if len(column) > 1 else column for name, column in self.data.items()}
        return replace(self, data=some, repeats=end - begin, laps=self.laps + begin)

    def first(self, steps: Tensor, most: int) -> SlicedBatches:
        if self.most is None:
            raise TypeError(NO_STEPS)
        return replace(self, most=min(int(steps), most, self.most))

    def again(self, step: int, times: int) -> SlicedBatches:
        batch = {name: column[None] for name, column in self[step].items() if name != DRAW}
        return replace(self, data=batch, repeats=1, steps=1, most=times, laps=self._turn(step) + 1)

    def rows(self) -> Params:
        return {name: column[0] for name, column in self.data.items()}

    def chances(self, count: int, purpose: str) -> Tensor:
        return _chances(self.key, count, purpose)


@dataclass(frozen=True)
class StackedBatches:
    """Many clients' batches for vmap: each client's rows are a stretch of a common order, padded to the longest.

    Outside vmap the leaves marked [clients] have a dimension of clients; inside they are one client's.
    """

    columns: Params  # of the whole population, the same for all clients
    orders: Tensor  # (orders, rows of all clients): an order for each epoch, or one for all
    begin: Tensor  # [clients]: where a client's rows begin in an order
    used: Tensor  # [clients]: how many count in an epoch; what lies beyond is padding
    examples: Tensor  # [clients]
    key: Tensor  # [clients]
    size: int  # of a batch
    steps: int  # per epoch
    repeats: int  # epochs
    even: bool  # all clients fill all batches: no masks are needed
    most: int = 0  # steps in all, where the batching says how many; 0: it is in epochs
    limit: Tensor | None = None  # [clients]: how many of them are the client's
    round: int = 0  # of the stage; 0 where personal models are made
    draws: bool = False  # whether a batch has random numbers of its own, as `draw`: for dropout
    laps: int = 0  # what came before, as epochs

    def __len__(self) -> int:
        return self.most or self.steps * self.repeats

    def __getitem__(self, step: int) -> Params:
        batch = self._gathered(*self._place(step), self.size)
        return {**batch, DRAW: _draw(self.key, self._turn(step))} if self.draws else batch

    def _turn(self, step: int) -> int:
        return _turn(self.laps, step, 0 if self.most else self.steps)

    def _place(self, step: int) -> tuple[int, int | Tensor]:
        """The epoch of a step, and the number of rows of that epoch before it."""
        if self.most and not self.even:  # each client repeats its own batches, so none waits for the longest
            own = -(-self.used // self.size)
            return 0, step % own.clamp(min=1) * self.size
        epoch, place = divmod(step, self.steps)
        return epoch, place * self.size

    def _gathered(self, epoch: int, before: int | Tensor, count: int) -> Params:
        place = before + torch.arange(count)
        mask = torch.ones(count)
        if not self.even:
            mask = (place < self.used).float()
            place = torch.minimum(place, (self.used - 1).clamp(min=0))  # padding repeats a row, and is masked out
        rows = self.orders[epoch if len(self.orders) > 1 else 0][self.begin + place]
        return {**{name: column[rows] for name, column in self.columns.items()}, "mask": mask}

    def live(self, step: int) -> float | Tensor:
        if self.most:
            return 1.0 if self.limit is None else (self.limit > step).float()
        return 1.0 if self.even else (self.used > step % self.steps * self.size).float()

    def epochs(self, many: int = 1) -> Iterator[StackedBatches]:
        return (self.part(first, first + many) for first in range(0, self.repeats, many))

    def part(self, begin: int, end: int) -> StackedBatches:
        some = self.orders[begin:end] if len(self.orders) > 1 else self.orders
        return replace(self, orders=some, repeats=end - begin, laps=self.laps + begin)

    def first(self, steps: Tensor, most: int) -> StackedBatches:
        if not self.most:
            raise TypeError(NO_STEPS)
        return replace(self, most=min(most, self.most), limit=steps)

    def again(self, step: int, times: int) -> StackedBatches:
        epoch, before = self._place(step)
        here = (self.used - before).clamp(0, self.size)  # zero for a client that has finished its own steps
        epoch = epoch if len(self.orders) > 1 else 0
        return replace(
            self, orders=self.orders[epoch : epoch + 1], begin=self.begin + before * (here > 0), used=here,
            steps=1, repeats=1, most=times, limit=None if self.even else times * (here > 0).float(),
            laps=self._turn(step) + 1,
        )  # fmt: skip

    def rows(self) -> Params:
        return self._gathered(0, 0, self.steps * self.size)

    def chances(self, count: int, purpose: str) -> Tensor:
        return _chances(self.key, count, purpose)

    def mapped(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Everything that differs between clients: the arguments of a vmapped function."""
        return self.begin, self.used, self.examples, self.key

    def of_client(self, mine: tuple[Tensor, Tensor, Tensor, Tensor]) -> StackedBatches:
        """Inside vmap: one client's batches from its share of `mapped`."""
        begin, used, examples, key = mine
        return replace(self, begin=begin, used=used, examples=examples, key=key)


def _turn(laps: int, step: int, steps: int) -> int:
    """Numbers the steps of a round, the same in both forms: `steps` of an epoch, or 0 if steps are not in epochs."""
    epoch, place = divmod(step, steps) if steps else (0, step)
    return (laps + epoch) * LAP + place


def _draw(key: Tensor, turn: int) -> Tensor:
    """A whole number of 32 bits for a step, drawn from (seed, stage, round, client, step)."""
    return _scrambled((key ^ (key >> 32) ^ text_key(f"step {turn}") % 2**31) & 0xFFFFFFFF)


def _chances(key: Tensor, count: int, purpose: str) -> Tensor:
    """Uniform numbers in [0, 1): a multiplicative hash in 32 bits, whose products fit torch's signed 64.

    Tensors throughout, for under vmap every client has a key of its own.
    """
    word = _scrambled((key ^ (key >> 32) ^ text_key(purpose) % 2**31) & 0xFFFFFFFF)
    return (_scrambled(word ^ torch.arange(count)) >> 8).float() * 2.0**-24


def _scrambled(word: Tensor) -> Tensor:
    for _ in range(2):
        word = ((word ^ (word >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return word ^ (word >> 16)


def columns_of(population: Population) -> tuple[str, ...]:
    """The columns of this population that clients compute with."""
    return (*(name for name in COLUMNS if name in population.columns), *population.about.get("inputs", [])[1:])


def steps_of(sizes: Ints, batching: Batching) -> Ints:
    """Steps per epoch of clients with these numbers of rows."""
    if batching.drop_last:
        return np.maximum(sizes // batching.size, (sizes > 0).astype(np.int64))
    return -(-sizes // batching.size)


def work_of(sizes: Ints, batching: Batching, taken: Ints | None = None) -> tuple[int, int]:
    """Steps and examples of clients with these numbers of rows.

    For a batching in steps these are upper bounds, unless each client's number of steps (`taken`) is known.
    """
    if not batching.steps:
        passes = batching.epochs * batching.uses
        return int(steps_of(sizes, batching).sum()) * passes, int(sizes.sum()) * passes
    steps = (np.full_like(sizes, batching.steps) if taken is None else taken) * (sizes > 0)
    laps, rest = np.divmod(steps, np.maximum(steps_of(sizes, batching), 1))
    examples = laps * sizes + np.minimum(rest * batching.size, sizes)
    return batching.uses * int(steps.sum()), batching.uses * int(examples.sum())


class Layout:
    """Where some clients' rows lie and how they form batches. It is the same in every round of the same cohort."""

    def __init__(self, part: Rows, clients: Ints, batching: Batching, device: torch.device = CPU) -> None:
        self.part, self.clients, self.batching, self.device = part, clients, batching, device
        self.rows, self.sizes = part.of(clients)
        self.steps = steps_of(self.sizes, batching)
        self.begins = np.cumsum(self.sizes) - self.sizes
        self._frames: dict[bytes, StackedBatches] = {}

    def serves(self, part: Rows, clients: Ints, batching: Batching) -> bool:
        """Whether this is the layout of these clients' rows."""
        same = part is self.part and batching == self.batching
        return same and (clients is self.clients or np.array_equal(clients, self.clients))

    @cached_property
    def starts(self) -> Ints:
        return np.repeat(self.begins, self.sizes)

    def _fetched(self) -> tuple[Params, Ints]:
        """The columns, and the positions of these clients' rows in them."""
        columns, shift = self.part.fetch(self.clients, columns_of(self.part.population))
        return columns, self.rows + np.repeat(shift, self.sizes) if shift.any() else self.rows

    @cached_property
    def _moved(self) -> tuple[Params, Ints]:
        """Copies these clients' rows to the device, where they stay while the same clients take part."""
        columns, rows = self._fetched()
        some = torch.from_numpy(rows) if len(rows) else slice(0, 1)  # there is always a row to repeat as padding
        return {name: column[some].to(self.device) for name, column in columns.items()}, np.arange(len(rows))

    def draw(self, key: int | None, number: int = 0) -> Orders:
        """Shuffle each client's rows for each epoch of a round; `key` None keeps the stored order."""
        population, batching = self.part.population, self.batching
        columns, rows = self._fetched() if self.device == CPU else self._moved
        keys = population.keys[self.clients]
        own = mix("own", key or 0, keys).view(np.int64)
        if key is None or not batching.shuffle:
            return Orders(self, columns, [rows], own, number)
        rounds = batching.epochs if batching.reshuffle and not batching.steps else 1
        orders = [rows[self.starts + shuffles(mix(key, epoch), keys, self.sizes)] for epoch in range(rounds)]
        return Orders(self, columns, orders, own, number)

    def frame(self, positions: Ints) -> StackedBatches:
        """The values of `StackedBatches` other than rows, for these clients."""
        name = positions.tobytes()
        if name not in self._frames:
            self._frames[name] = self._framed(positions)
        return self._frames[name]

    def _framed(self, positions: Ints) -> StackedBatches:
        sizes, steps, batching = self.sizes[positions], self.steps[positions], self.batching
        size, depth = min(batching.size, max(int(sizes.max()), 1)), max(int(steps.max()), 1)
        used = sizes
        if batching.drop_last:  # a client smaller than a batch keeps its only, partial one
            used = np.where(sizes < batching.size, sizes, steps * batching.size)
        begin = np.minimum(self.begins[positions], max(len(self.rows), 1) - 1)
        even = bool((used == depth * size).all())
        counts = torch.from_numpy(sizes).to(torch.get_default_dtype())
        begins, counted, examples = (
            leaf.to(self.device) for leaf in (torch.from_numpy(begin), torch.from_numpy(used), counts)
        )
        return StackedBatches(
            {}, NOTHING, begins, counted, examples, NO_KEY, size, depth, batching.epochs, even, batching.steps
        )


@dataclass(frozen=True)
class Orders:
    """The rows of some clients in the order of use: one concatenated list per epoch."""

    layout: Layout
    columns: Params
    rows: list[Ints]  # one entry, or one per epoch
    own: Ints  # the clients' own randomness
    number: int = 0  # of the round

    @classmethod
    def draw(cls, part: Rows, clients: Ints, batching: Batching, key: int | None, device: torch.device = CPU) -> Orders:
        return Layout(part, clients, batching, device).draw(key)

    @property
    def sizes(self) -> Ints:
        return self.layout.sizes

    @property
    def steps(self) -> Ints:
        return self.layout.steps

    def sliced(self, position: int) -> SlicedBatches:
        """One client's batches, for the loop."""
        layout, batching = self.layout, self.layout.batching
        size, begin, steps = (int(of[position]) for of in (layout.sizes, layout.begins, layout.steps))
        used = min(size, steps * batching.size) if batching.drop_last else size
        here = layout.device
        index = torch.from_numpy(np.stack([rows[begin : begin + used] for rows in self.rows])).to(here)
        data = {n: column[index.flatten()].unflatten(0, index.shape) for n, column in self.columns.items()}
        data["mask"] = torch.ones(index.shape, device=here)
        most = batching.steps or None
        own, examples = torch.tensor(int(self.own[position]), device=here), torch.tensor(float(size), device=here)
        return SlicedBatches(data, batching.size, batching.epochs, examples, steps, most, own, self.number)

    def stacked(self, positions: Ints) -> StackedBatches:
        """The batches of several clients, padded to the longest, for vmap."""
        frame, own = self.layout.frame(positions), torch.from_numpy(self.own[positions])
        return StackedBatches(
            self.columns, self._whole, frame.begin, frame.used, frame.examples, own.to(self.layout.device),
            frame.size, frame.steps, frame.repeats, frame.even, frame.most, round=self.number,
        )  # fmt: skip

    @cached_property
    def _whole(self) -> Tensor:
        """The orders of all clients, one per epoch; all padding if no client has rows."""
        orders = NOTHING
        if len(self.rows[0]):
            orders = torch.from_numpy(np.stack(self.rows) if len(self.rows) > 1 else self.rows[0][None])
        return orders.to(self.layout.device)


def buckets(steps: Ints, chunk: int, launch_cost: float) -> list[Ints]:
    """Groups clients (by position) with similar numbers of steps into chunks of at most `chunk`.

    A chunk costs (steps of its longest) x (launch_cost + its clients) in units of one client's step: many small chunks
    launch often, few large ones pad much. Cut points over the sorted clients by dynamic programming.
    """
    order = np.argsort(-steps, kind="stable")
    values, first = np.unique(-steps[order], return_index=True)
    values = -values  # distinct numbers of steps, descending
    ends = np.append(first[1:], len(order))
    best = np.full(len(values) + 1, np.inf)
    best[0], cut = 0.0, np.zeros(len(values) + 1, dtype=np.int64)
    for end in range(1, len(values) + 1):
        for begin in range(end):
            clients = ends[end - 1] - first[begin]
            launches = -(-clients // chunk)
            cost = best[begin] + values[begin] * (launches * launch_cost + clients)
            if cost < best[end]:
                best[end], cut[end] = cost, begin
    groups: list[Ints] = []
    end = len(values)
    while end:
        begin = int(cut[end])
        members = order[first[begin] : ends[end - 1]]
        pieces = -(-len(members) // chunk)
        groups = [*np.array_split(members, pieces), *groups]
        end = begin
    return groups
