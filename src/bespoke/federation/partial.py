"""One host's answer for its share of a cohort: sums, declared EACH fields and counts, never a single update."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.declarations import Reveal, changes, reveals
from bespoke.devices import home
from bespoke.federation.work import ClientWork
from bespoke.method import Method
from bespoke.tensors import Tree, finite_rows, is_buffer, leaves, take, tree_map, without_buffers

Ints = NDArray[np.int64]


@dataclass
class Partial:
    """One host's answer for its share of a cohort."""

    sums: Tree | None = None
    each: Tree = field(default_factory=dict)
    pieces: list[Tree] = field(default_factory=list)  # of `each`, while it is gathered
    clients: list[int] = field(default_factory=list)
    excluded: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of each client's change; only a simulation sees these
    steps: int = 0
    examples: int = 0
    bytes_up: int = 0

    def merge(self, other: Partial) -> None:
        if other.sums is not None:
            # sums are fresh memory (a sum over clients is a copy), so the others can be added to the first in place
            self.sums = other.sums if self.sums is None else tree_map(Tensor.add_, self.sums, other.sums)
        self.pieces += [other.each] if other.each else other.pieces
        self.clients += other.clients
        self.excluded += other.excluded
        self.norms += other.norms
        self.steps += other.steps
        self.examples += other.examples
        self.bytes_up += other.bytes_up

    def joined(self) -> Partial:
        """Moves sums to the CPU and concatenates the pieces, once at the end because both may be large."""
        self.sums = None if self.sums is None else home(self.sums)
        if self.pieces:
            self.each = tree_map(lambda *parts: torch.cat(parts), *self.pieces) if self.pieces[1:] else self.pieces[0]
            self.pieces = []
        return self


def collect(
    result: Partial, work: ClientWork, clients: Ints, private: Tree, up: Tree, places: Tensor | None = None,
    groups: int = 0,
) -> tuple[Ints, Tree]:  # fmt: skip
    """Adds a chunk's messages to the sums (with groups, to the group's row), without clients that are not finite.

    Returns the clients that were added, and their private state.
    """
    uplink = work.method.uplink
    changed = next(iter(changes(uplink)), None)
    # a single client's update is added without a copy; only the first sums have to be memory of their own
    alone = len(clients) == 1 and result.sums is not None
    sums = {name: tree_map(lambda leaf: leaf[0] if alone else leaf.sum(0), value) for name, value in up.items()}
    # the sums, or the norms, show whether any client is not finite; only then check each client
    good, sizes = clients, _sizes(work.method, up)
    rest = [value for name, value in sums.items() if not sizes or name != changed]
    if sizes and changed:
        rest.append({name: leaf for name, leaf in sums[changed].items() if is_buffer(name)})
    if not all(map(math.isfinite, (*sizes, *(float(leaf.sum()) for leaf in leaves([rest, private]))))):
        finite = finite_rows([up, private])
        known = finite.cpu().numpy()
        good = clients[known]
        result.excluded += clients[~known].tolist()
        up = take(up, finite)
        private = take(private, finite)
        places = None if places is None else places[finite]
        sums = {name: tree_map(lambda leaf: leaf.sum(0), value) for name, value in up.items()}
        sizes = _sizes(work.method, up) if len(good) else []
    if work.holds or work.masks:
        result.merge(Partial(each=home(up), clients=good.tolist(), norms=[] if work.masks else sizes))
        return good, private
    each = home({name: up[name] for name, reveal in reveals(uplink).items() if reveal is Reveal.EACH})
    summed = [name for name in up if name not in each]  # a transform may have added a field
    kept: Tree | None = {name: sums[name] for name in summed}
    if places is not None:  # in place: with many groups, a table of sums per client would be slow
        if result.sums is None:
            result.sums = {name: _table(up[name], groups) for name in summed}
        for name in summed:
            tree_map(lambda table, leaf: table.index_add_(0, places, leaf), result.sums[name], up[name])
        kept = None
    result.merge(Partial(sums=kept, each=each, clients=good.tolist(), norms=sizes))
    return good, private


def _sizes(method: Method, up: Tree) -> list[float]:
    """The norm of each client's change; empty if the method sends none."""
    name, times = next(iter(changes(method.uplink).items()), ("", ""))
    if not name or not leaves(without_buffers(up[name])):
        return []
    weight = up[times] if times else torch.ones(())
    weight = weight.flatten(1).sum(1) if weight.dim() > 1 else weight  # with clusters: of the client's own
    parts = [torch.linalg.vector_norm(leaf.reshape(len(leaf), -1), dim=1) for leaf in leaves(without_buffers(up[name]))]
    norms, weight = torch.stack(parts).cpu().double(), weight.cpu().double()
    sizes: list[float] = (norms.norm(dim=0) / weight.abs().clamp(min=1e-300)).tolist()
    return sizes


def _table(stacked: Tree | Tensor, rows: int) -> Tree | Tensor:
    """Zeros for sums of these messages, a row for each group."""
    return tree_map(lambda leaf: leaf.new_zeros((rows, *leaf.shape[1:])), stacked)
