"""How FedEmbed assigns clients to heads: by liked kind, by nearest prototype, or by a self-organising map.

Kohonen's map (The Self-Organizing Map, 1990) has K nodes on a grid, each a point among the embeddings. In its federated
form the nodes go out, and a client of embedding e sends by how much it would pull each node j,
rate h(j, j*) (e - node_j), where j* is the node nearest to it and h falls with the distance on the grid, and how
similar node j* is to it. The server applies the pull of the most similar client. From a pull and the nodes that the
server sent e can be computed: pulls are declared as seen of each client. With `update = "sums"` the pulls of all are
averaged instead (Kohonen's batch map) and only sums are seen.

When the nodes have moved, cluster j need not hold the clients that it held. Clients count in which cluster they are by
the old nodes and by the new ones, and the sums say whose head each new cluster takes over: that of the old one with
which it has most clients in common. So nodes are in use one round after they were made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bespoke.declarations import Reveal, Sent
from bespoke.method import Cohort, knob
from bespoke.tensors import Params, Tree


def liked_kind(rows: Params, kinds: int) -> Tensor:
    """The kind of which a client likes most rows: a row is liked if its target is above zero."""
    liked = rows["mask"] * (rows["y"] > 0)
    return ((rows["kind"][:, None] == torch.arange(kinds)) * liked[:, None]).sum(0).argmax()


def nearest(embedding: Tensor, points: Tensor) -> Tensor:
    """The point with the least Euclidean distance; the first of equals."""
    return ((embedding - points) ** 2).sum(-1).argmin()


def one_of(place: Tensor, many: int) -> Tensor:
    """1 at the place, 0 elsewhere."""
    return (torch.arange(many) == place).float()


def pick(stacked: Tensor, place: Tensor) -> Tensor:
    """An entry of the first dimension. Indexed by a tensor, for under vmap every client has its own."""
    return stacked[place.reshape(1)][0]


def triplet_step(embedding: Tensor, positive: Tensor, negative: Tensor, margin: float, rate: float) -> Tensor:
    """A step down max(0, (e - positive)^2 - (e - negative)^2 + margin), Eq. 1 with the hinge of a triplet loss.

    As printed, without the hinge, the slope 2 (negative - positive) would never end.
    """
    gap = ((embedding - positive) ** 2).sum() - ((embedding - negative) ** 2).sum() + margin
    return embedding - rate * (gap > 0) * 2 * (negative - positive)


@dataclass(frozen=True)
class SelfOrganizingMap:
    """Nodes among the embeddings, each with a head; neighbours on a grid are pulled along."""

    update: Literal["best", "sums"] = knob(
        "best", "what moves the nodes: the pull of the most similar client (the paper), or the sums of all pulls"
    )
    lr: float = knob(0.5, "how far a pull goes at first, as a part of the way", gt=0, le=1)
    radius: float = knob(1.0, "how far along the grid neighbours are pulled along at first", gt=0)
    halving: float = knob(50.0, "rounds in which lr and radius fall to half", gt=0)

    downlink = {
        "nodes": "the map: an embedding for each sub-population",
        "coming": "the map that will be in use next",
        "age": "rounds it has learned",
    }

    @property
    def uplink(self) -> dict[str, Sent]:
        if self.update == "sums":
            return dict.fromkeys(("pull", "near", "overlap"), Sent(Reveal.SUM))
        return {"pull": Sent(Reveal.EACH), "similarity": Sent(Reveal.EACH), "overlap": Sent(Reveal.SUM)}

    def init(self, k: int, size: int, seed: int) -> Tree:
        nodes = torch.rand(k, size, generator=torch.Generator().manual_seed(seed))
        return {"nodes": nodes, "coming": nodes, "age": torch.zeros(())}

    def message(self, down: Tree, embedding: Tensor) -> Tree:
        """What a client says of the map: its pull, and its clusters by the nodes in use and by those to come."""
        next_nodes, k = down["coming"], len(down["coming"])
        there = nearest(embedding, next_nodes)
        faded = 0.5 ** (down["age"] / self.halving)
        squares = _squares(k)
        near = torch.exp(-pick(squares, there) / (2 * (self.radius * faded) ** 2))
        pull = near[:, None] * (embedding - next_nodes)
        overlap = one_of(there, k)[:, None] * one_of(nearest(embedding, down["nodes"]), k)
        if self.update == "sums":
            return {"pull": pull, "near": near, "overlap": overlap}
        similarity = -((embedding - pick(next_nodes, there)) ** 2).sum()
        return {"pull": self.lr * faded * pull, "similarity": similarity, "overlap": overlap}

    def learn(self, server: Tree, cohort: Cohort) -> tuple[Tree, Tensor]:
        """The map after a round, and for each new cluster the old one whose head it takes over."""
        next_nodes = server["coming"]
        if self.update == "sums":
            rate = self.lr * 0.5 ** (server["age"] / self.halving)
            # less than a client near a node moves it by less; and noise on both sums must not throw it out
            moved = next_nodes + rate * cohort.sums["pull"] / cohort.sums["near"].clamp(min=1.0)[:, None]
        else:
            moved = next_nodes + cohort.each["pull"][cohort.each["similarity"].argmax()]
        overlap = cohort.sums["overlap"]
        heirs = torch.where(overlap.sum(1) > 0, overlap.argmax(1), torch.arange(len(overlap)))  # empty: its own
        return {"nodes": next_nodes, "coming": moved, "age": server["age"] + 1}, heirs


def _squares(k: int) -> Tensor:
    """Squared distances of nodes on a grid, as square as k allows."""
    lines = next(n for n in range(math.isqrt(k), 0, -1) if k % n == 0)
    places = torch.stack([torch.arange(k) // (k // lines), torch.arange(k) % (k // lines)], 1).float()
    return ((places[:, None] - places) ** 2).sum(-1)
