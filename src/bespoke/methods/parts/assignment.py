"""How FedEmbed assigns clients to heads: one for all, by liked kind, by nearest prototype, by a map, or its own.

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
from bespoke.method import Batches, Cohort, knob
from bespoke.task import Task
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
        """A client's message: its pull, and its clusters by the nodes in use and by the next ones."""
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


class OneHead:
    """One head for all clients. Subclasses override what differs for them."""

    above = False  # whether a global head is trained beside the assigned ones
    likes = False  # whether clients are assigned by the kind that they like
    own_head = False  # whether each client keeps a head of its own
    model = "the encoder and all heads"
    downlink: dict[str, str] = {}
    uplink: dict[str, Sent] = {}

    @property
    def heads(self) -> int:
        """The number of heads on the server."""
        return 1

    def init_params(self, size: int, seed: int) -> Params:
        """Further parameters of the shared model, which has embeddings of this size."""
        return {}

    def init_server(self, size: int, seed: int) -> Tree:
        """Further state of the server."""
        return {}

    def attracted(self, params: Params, embedding: Tensor, liked: Tensor | None, batches: Batches) -> Tensor:
        """The client's embedding before it is trained with the model."""
        return embedding

    def place(self, down: Tree, embedding: Tensor, liked: Tensor | None) -> Tensor:
        """The number of the client's head."""
        return torch.zeros((), dtype=torch.int64)

    def message(self, down: Tree, embedding: Tensor) -> Tree:
        """Further fields of a client's message."""
        return {}

    def learn(self, server: Tree, cohort: Cohort) -> tuple[Tree, Tensor | None]:
        """The server's further state after a round, and the old head that each new one continues (None: the same)."""
        return {}, None

    def observe(self, cohort: Cohort) -> dict[str, float | list[int]]:
        """Sizes of clusters, if the sums show them."""
        return {}


class HeadOnClient(OneHead):
    """A head of each client's own, which stays on the client. Before its first round it is the global one."""

    above = True
    own_head = True

    @property
    def heads(self) -> int:
        return 0


@dataclass(frozen=True)
class ByKind(OneHead):
    """A head for each kind of rows: a client has that of the kind that it likes."""

    task: Task
    above = True
    likes = True
    name = "type"

    @property
    def heads(self) -> int:
        return self.task.known_kinds(f"fedembed with assignment = {self.name!r}")

    def place(self, down: Tree, embedding: Tensor, liked: Tensor | None) -> Tensor:
        assert liked is not None
        return liked


@dataclass(frozen=True)
class Prototypes(ByKind):
    """A head and a prototype for each kind of rows: a client has the head of the prototype nearest to its embedding."""

    margin: float = 1.0
    rate: float = 0.1
    steps: int = 5
    name = "prototype"
    model = "the encoder and all heads and prototypes"

    def init_params(self, size: int, seed: int) -> Params:
        return {"prototypes": torch.rand(self.heads, size, generator=torch.Generator().manual_seed(seed))}

    def attracted(self, params: Params, embedding: Tensor, liked: Tensor | None, batches: Batches) -> Tensor:
        """Steps of the triplet loss: to the prototype of the kind that the client likes, away from others (Eq. 1)."""
        many, prototypes = self.heads, params["prototypes"]
        if liked is None or many < 2:
            return embedding
        drawn = (batches.chances(self.steps, "negatives") * (many - 1)).long()
        for step in range(self.steps):
            other = pick(prototypes, (liked + 1 + drawn[step]) % many)
            embedding = triplet_step(embedding, pick(prototypes, liked), other, self.margin, self.rate)
        return embedding

    def place(self, down: Tree, embedding: Tensor, liked: Tensor | None) -> Tensor:
        return nearest(embedding, down["params"]["prototypes"])


@dataclass(frozen=True)
class OnMap(OneHead):
    """A head for each of `k` nodes of a self-organising map: a client has that of the node nearest to its embedding."""

    som: SelfOrganizingMap
    k: int
    above = True
    downlink = SelfOrganizingMap.downlink

    @property
    def uplink(self) -> dict[str, Sent]:  # type: ignore[override]
        return self.som.uplink

    @property
    def heads(self) -> int:
        return self.k

    def init_server(self, size: int, seed: int) -> Tree:
        return self.som.init(self.k, size, seed)

    def place(self, down: Tree, embedding: Tensor, liked: Tensor | None) -> Tensor:
        return nearest(embedding, down["nodes"])

    def message(self, down: Tree, embedding: Tensor) -> Tree:
        return self.som.message(down, embedding)

    def learn(self, server: Tree, cohort: Cohort) -> tuple[Tree, Tensor | None]:
        return self.som.learn(server, cohort)

    def observe(self, cohort: Cohort) -> dict[str, float | list[int]]:
        clients = cohort.sums["overlap"].sum(1).clamp(min=0).round().int().tolist()  # noise may make them negative
        return {"clients": clients, "largest_share": max(clients) / max(sum(clients), 1)}
