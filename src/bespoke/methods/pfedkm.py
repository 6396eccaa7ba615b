"""PFedKM: the clustered baseline of Silva et al., FedEmbed, 2022.

After Tang et al., Personalized Federated Learning with Clustered Generalization, 2021. A shared body, and K heads. Each
client trains the body and the head of its cluster and sends its update; the server runs k-means over what the clients'
models have become, one long vector each, and averages the heads of every cluster. The server has to see every client's
update and knows every client's cluster: both are declared as seen of each.

In the first round all heads are alike and the vectors differ by the clients' gradients alone; later a client's vector
is its cluster's head with its own update, so that who fits its cluster stays there. k-means begins with the centres of
the round before, which keeps clusters their numbers; the first centres are drawn among the clients by k-means++.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bespoke.method import Batches, Batching, Cohort, Reveal, Setting, knob
from bespoke.methods.descend import descend
from bespoke.methods.fedavg import FedAvg
from bespoke.tensors import Params, Tree, subtract, take, tree_map


@dataclass(frozen=True)
class PFedKM(FedAvg):
    """A shared body, and heads of clusters that the server finds by k-means over the clients' updates."""

    k: int = knob(10, "how many clusters", ge=2)
    iterations: int = knob(10, "rounds of k-means in a round of training", ge=1)

    name = "pfedkm"
    paper = "Silva et al., 2022, after Tang et al., 2021"
    uplink = {"delta": Reveal.EACH, "weight": Reveal.EACH}
    downlink = {"params": "the shared body and the heads of all clusters", "cluster": "which of them is the client's"}
    personal = "the shared body with the head of the cluster that the server put the client in"
    unseen = "a client that never trained takes the head with the lowest loss on its own rows"
    tunes = {"lr": (0.01, 0.03, 0.1, 0.3)}
    keep_shared = False
    hands_on = -1  # a body with several heads

    def split(self, params: Params) -> tuple[Params, Params]:
        """(body, head)"""
        last: tuple[str, ...] = getattr(self.task, "last_layer", ())
        head = {name: p for name, p in params.items() if name.startswith(last)}
        return {name: p for name, p in params.items() if name not in head}, head

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        body, head = self.split(params)
        model = {**body, **{name: p.expand(self.k, *p.shape).clone() for name, p in head.items()}}
        length = sum(p.numel() for p in params.values())
        return {
            **super().init_server(model, setting), "seed": torch.tensor(setting.seed), "rounds": torch.tensor(0),
            "centres": torch.zeros(self.k, length), "cluster": torch.full((max(setting.clients, 1),), -1),
            "count": torch.zeros(self.k),
        }  # fmt: skip

    def unicast(self, server: Tree, client: int) -> Tree:
        return {"cluster": server["cluster"][client]}

    def model(self, down: Tree, cluster: Tensor) -> Params:
        """The body with one head. Indexed by a tensor, for under vmap every client has its own cluster."""
        body, heads = self.split(down["params"])
        return {**body, **{name: p[cluster.reshape(1)][0] for name, p in heads.items()}}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        start = self.model(down, down["cluster"].clamp(min=0))  # who is not known yet begins with the first
        trained = descend(
            self.task, start, batches, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )  # fmt: skip
        return private, {"delta": subtract(trained, start), "weight": self.weight(batches)}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        who, order = torch.tensor(cohort.clients).sort()  # so that it does not matter who answered first
        delta, weight = take(cohort.each["delta"], order), cohort.each["weight"][order]
        body, heads = self.split(server["params"])
        before = server["cluster"][who].clamp(min=0)
        become = {name: (heads[name][before] if name in heads else 0) + delta[name] for name in delta}
        points = torch.cat([become[name].flatten(1) for name in server["params"]], 1)
        seed = None if server["rounds"] else int(server["seed"])
        places, centres = kmeans(points, server["centres"], self.iterations, seed)
        members = (torch.arange(self.k)[:, None] == places) * weight  # (clusters, clients)
        # a head's members come from several old clusters: its change is to where they are on average
        parts = members.sum(1)
        mean = {name: torch.tensordot(weight, leaf, 1) / weight.sum() for name, leaf in delta.items() if name in body}
        for name, leaf in heads.items():
            there = torch.tensordot(members, become[name], 1) / parts.clamp(min=1e-9).reshape(
                -1, *(1,) * (leaf.dim() - 1)
            )
            mean[name] = torch.where((parts > 0).reshape(-1, *(1,) * (leaf.dim() - 1)), there - leaf, 0.0)
        params, optimizer = self.server.step(server["optimizer"], server["params"], mean)
        return {
            **server, "params": params, "optimizer": optimizer, "centres": centres, "rounds": server["rounds"] + 1,
            "cluster": server["cluster"].index_copy(0, who, places), "count": (members > 0).sum(1).float(),
        }  # fmt: skip

    def observe(self, server: Tree, cohort: Cohort) -> dict[str, Any]:
        clients = server["count"].int().tolist()
        return {"clients": clients, "largest_share": max(clients) / max(sum(clients), 1)}

    def pick(self, down: Tree, support: Batches) -> Tensor:
        """The client's cluster; where the server does not know it, the one with the lowest loss on these rows."""
        rows, places = support.rows(), torch.arange(self.k)
        losses = [self.task.score(self.task.predict(self.model(down, j), rows), rows)["loss"] for j in places]
        found = torch.stack(losses).nan_to_num(nan=torch.inf).argmin()
        return torch.where(down["cluster"] >= 0, down["cluster"], found)

    def support_batching(self) -> Batching:
        return Batching(2**31)

    def candidates(self) -> tuple[str, ...]:
        return ("mean head", "cluster's head")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        body, heads = self.split(down["params"])
        yield {**body, **tree_map(lambda p: p.mean(0), heads)}
        yield self.model(down, self.pick(down, support))


def kmeans(points: Tensor, centres: Tensor, iterations: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """(cluster of every point, centres) by Lloyd's algorithm, from these centres or (`seed`) from k-means++.

    A centre without points stays where it is.
    """
    if seed is not None:
        centres = _spread_out(points, len(centres), seed)
    for _ in range(iterations):
        members = (torch.arange(len(centres))[:, None] == _squares(points, centres).argmin(1)).float()
        sizes = members.sum(1, keepdim=True)
        centres = torch.where(sizes > 0, members @ points / sizes.clamp(min=1), centres)
    return _squares(points, centres).argmin(1), centres


def _squares(points: Tensor, centres: Tensor) -> Tensor:
    """Squared distances, (points, centres)."""
    lengths = (points * points).sum(1, keepdim=True) + (centres * centres).sum(1)
    return (lengths - 2 * points @ centres.mT).clamp(min=0)


def _spread_out(points: Tensor, k: int, seed: int) -> Tensor:
    """k-means++ (Arthur and Vassilvitskii 2007): the next is drawn by its squared distance to those there are."""
    draw = torch.Generator().manual_seed(seed)
    chosen = [int(torch.randint(len(points), (1,), generator=draw))]
    while len(chosen) < k:
        far = _squares(points, points[chosen]).amin(1)
        chosen.append(int(torch.multinomial(far.clamp(min=1e-12), 1, generator=draw)))
    return points[chosen]
