"""Splits a cohort's messages into parts for a robust rule, and joins them again.

A rule acts on the change itself: a field declared as a change (`Sent.change`), divided by its weight, so that no client
gains influence by a large weight. All clients' changes count alike. The method's server gets the rule's change times
the sum of the weights. Every other field (weights too) is bounded: scaled to a norm of at most the cohort's median,
then added. A field that is the same for all clients (COUNT) is assumed to be one.

A message may have a row for each cluster, with zeros except in the client's own row (`Sent.rows`). With groups, the
sums have a row for each group. In both cases the rule is applied to each row with its clients. Leaves with rows and
leaves without are two blocks, and the rule is applied to each block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bespoke.declarations import Reveal, changes, reveals
from bespoke.method import Method
from bespoke.tensors import Params, Tree, named_map

COMMON, ROWS = "common", "rows"  # the two blocks of a message


@dataclass(frozen=True)
class Form:
    """The parts of a method's messages."""

    changes: dict[str, str]
    rowed: tuple[str, ...]
    counts: tuple[str, ...]  # fields that are one for all clients
    each: tuple[str, ...]  # fields that the method's server sees of each client

    @classmethod
    def of(cls, method: Method) -> Form:
        sent = method.uplink
        kinds = {kind: tuple(name for name, k in reveals(sent).items() if k is kind) for kind in Reveal}
        rowed = (f"{name}/{leaf}" if leaf else name for name, field in sent.items() for leaf in field.rows)
        return cls(changes(sent), tuple(rowed), kinds[Reveal.COUNT], kinds[Reveal.EACH])

    def has_rows(self, path: str) -> bool:
        """Whether a leaf has a row for each cluster; a name with "/" stands for all leaves that begin so."""
        return any(path == name or path.startswith(name if "/" in name else f"{name}/") for name in self.rowed)


def paths(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The leaves of a tree, named by where they are."""
    if isinstance(tree, Tensor):
        yield path, tree
        return
    for name, value in tree.items():
        yield from paths(value, f"{path}/{name}" if path else name)


def rebuilt(tree: Tree, leaves: Params) -> Tree:
    """A tree of this shape (empty parts too) with other leaves."""
    return named_map(lambda name, _: leaves[name], tree)


@dataclass(frozen=True)
class Block:
    """A part of the messages in which every client has one row. The first dimension of leaves is the client."""

    index: Tensor  # each client's row
    many: int  # number of rows
    changes: Params = field(default_factory=dict)
    others: Params = field(default_factory=dict)

    def sums(self, values: Params, factors: Tensor | None = None) -> Params:
        """Sums over the clients of each row, of values times a factor for each client."""
        found = {}
        for path, leaf in values.items():
            scaled = leaf if factors is None else leaf * along(factors, leaf)
            found[path] = leaf.new_zeros((self.many, *leaf.shape[1:])).index_add_(0, self.index, scaled)
        return found

    def clients(self) -> Tensor:
        """The number of clients of each row."""
        return torch.bincount(self.index, minlength=self.many)

    def vectors(self) -> Tensor:
        """The clients' changes, one long vector each."""
        return torch.cat([leaf.flatten(1) for leaf in self.changes.values()] or [torch.zeros(len(self.index), 0)], 1)

    def distances(self, centres: Params) -> Tensor:
        """The distance of each client's change from its row's centre."""
        squares = [((leaf - centres[path][self.index]) ** 2).flatten(1).sum(1) for path, leaf in self.changes.items()]
        return torch.stack(squares).sum(0).sqrt() if squares else torch.zeros(len(self.index), dtype=torch.float64)


@dataclass(frozen=True)
class Messages:
    """Some clients' messages, and their parts."""

    clients: tuple[int, ...]
    up: Tree
    blocks: dict[str, Block]
    own: Tensor  # each client's row in leaves with a row for each cluster
    weights: dict[str, Tensor]  # by field of changes: each client's weight

    @classmethod
    def of(cls, clients: tuple[int, ...], up: Tree, form: Form, groups: Tensor | None, many: int) -> Messages:
        """Splits messages; groups: with groups, each client's row of the sums (of `many`)."""
        leaves = dict(paths(up))
        rowed = {path: leaf for path, leaf in leaves.items() if form.has_rows(path)}
        own = torch.zeros(len(clients), dtype=torch.int64)
        if rowed:  # a client's row is the one with the largest values; its values in other rows are ignored
            sizes = [leaf.double().abs().reshape(*leaf.shape[:2], -1).sum(2) for leaf in rowed.values()]
            own = torch.stack(sizes).sum(0).argmax(1)
        place = torch.arange(len(clients))
        single = {path: leaf[place, own] if path in rowed else leaf for path, leaf in leaves.items()}
        index = torch.zeros_like(own) if groups is None else groups
        blocks = {COMMON: Block(index, many)}
        if rowed:
            blocks[ROWS] = Block(own, next(iter(rowed.values())).shape[1])
        weights = {}
        for name, weight in form.changes.items():
            counted = not weight or weight in form.counts
            weights[name] = torch.ones(len(clients), dtype=torch.float64) if counted else single[weight].double()
        for path, leaf in single.items():
            name, block = path.split("/")[0], blocks[ROWS if path in rowed else COMMON]
            if name in form.changes:
                block.changes[path] = divided(leaf.double(), weights[name])
            elif name not in form.counts and (leaf.is_floating_point() or name not in form.each):
                block.others[path] = leaf.double()
        return cls(clients, up, blocks, own, weights)

    def norms(self, changes: bool) -> Params:
        """Each client's norm of every leaf that is not a change, and on request of its change in each block."""
        found = {}
        for name, block in self.blocks.items():
            if changes and block.changes:
                found[name] = block.vectors().norm(dim=1)
            found |= {path: leaf.reshape(len(leaf), -1).norm(dim=1) for path, leaf in block.others.items()}
        return found

    def with_changes(self, form: Form, new: dict[str, Params], of: Tensor) -> Tree:
        """The messages with other changes of the clients `of` (flags), by block and leaf."""
        leaves = dict(paths(self.up))
        for block in new.values():
            for path, change in block.items():
                was = leaves[path].clone()
                sent = change * along(self.weights[path.split("/")[0]], change)
                if form.has_rows(path):
                    was[of, self.own[of]] = sent[of].to(was.dtype)
                else:
                    was[of] = sent[of].to(was.dtype)
                leaves[path] = was
        return rebuilt(self.up, leaves)


def divided(leaf: Tensor, weight: Tensor) -> Tensor:
    """A change divided by its weight; zero if the weight is not positive."""
    inverse = torch.where(weight > 0, 1 / weight, torch.zeros_like(weight))
    return leaf * along(inverse, leaf)


def factors(norms: Tensor, bound: float) -> Tensor:
    """Factors that scale values of these norms to a norm of at most `bound`."""
    return (bound / norms.clamp(min=1e-300)).clamp(max=1.0)


def along(numbers: Tensor, leaf: Tensor) -> Tensor:
    """A number for each entry of the first dimension, in the shape of a leaf."""
    return numbers.reshape(-1, *[1] * (leaf.dim() - 1))
