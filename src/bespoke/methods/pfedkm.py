"""PFedKM: the clustered baseline of Silva et al., FedEmbed, 2022.

After Tang et al., Personalized Federated Learning with Clustered Generalization, 2021. A shared body, and K heads. Each
client trains the body and the head of its cluster and sends its update; the server runs k-means over what the clients'
models have become, one long vector each, and the head of every cluster becomes the mean of its members' heads. The
server has to see every client's update and knows every client's cluster: both are declared as seen of each.

In the first round all heads are alike and the vectors differ by the clients' gradients alone; later a client's vector
is its cluster's head with its own update, so that who fits its cluster stays there. A client that comes for the first
time begins with the mean of the heads. k-means begins with the centres of the round before, which keeps clusters their
numbers; the first centres are drawn among the clients by k-means++. With `over = "head"` the vector is of the head
alone, and of the body's updates the server sees the sum only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke.declarations import Card, Choosing, Handoff, Needs, Nothing, Observed, Reveal, Sent
from bespoke.method import Batches, Batching, Cohort, Setting, knob
from bespoke.methods.fedavg import FedAvg
from bespoke.methods.parts.heads import body_and_head
from bespoke.methods.parts.kmeans import kmeans
from bespoke.tensors import Params, Tree, scale, subtract, take, tree_map


@dataclass(frozen=True)
class PFedKM(FedAvg):
    """A shared body, and heads of clusters that the server finds by k-means over the clients' updates."""

    k: int = knob(10, "how many clusters", ge=2)
    over: Literal["model", "head"] = knob("model", "what k-means goes over: the whole model (the paper), or its head")
    heads: Literal["models", "updates"] = knob(
        "models", "a cluster's head: the mean of its members' heads, or its own moved by the mean of their updates"
    )
    iterations: int = knob(10, "rounds of k-means in a round of training", ge=1)

    card = Card(
        "pfedkm",
        "Silva et al., 2022, after Tang et al., 2021",
        personal="the shared body with the head of the cluster that the server put the client in",
        unseen="a client that never trained takes the head with the lowest loss on its own rows",
        tunes={"lr": (0.01, 0.03, 0.1, 0.3)},
    )
    downlink = {"params": "the shared body and the heads of all clusters", "cluster": "which of them is the client's"}
    handoff = Handoff(Nothing())  # a body with several heads
    choosing = Choosing(keep_shared=False)
    needs = Needs(last=True, still=True)

    @property
    def uplink(self) -> dict[str, Sent]:
        seen = Reveal.EACH if self.over == "model" else Reveal.SUM
        head = Sent(Reveal.EACH, change="")
        return {"delta": Sent(seen, change="weight"), "head": head, "weight": Sent(Reveal.EACH)}

    def split(self, params: Params) -> tuple[Params, Params]:
        return body_and_head(self.task, params)

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        body, head = self.split(params)
        model = {**body, **{name: p.expand(self.k, *p.shape).clone() for name, p in head.items()}}
        length = sum(p.numel() for p in (params if self.over == "model" else head).values())
        return {
            **super().init_server(model, setting), "seed": torch.tensor(setting.seed), "rounds": torch.tensor(0),
            "centres": torch.zeros(self.k, length), "cluster": torch.full((max(setting.clients, 1),), -1),
            "count": torch.zeros(self.k),
        }  # fmt: skip

    def unicast(self, server: Tree, client: int) -> Tree:
        return {"cluster": server["cluster"][client]}

    def model(self, down: Tree, cluster: Tensor) -> Params:
        """The body with one head, or with the mean of all for a client in none (-1)."""
        body, heads = self.split(down["params"])
        return {**body, **tree_map(lambda p: _head(p, cluster.reshape(1))[0], heads)}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        start, weight = self.model(down, down["cluster"]), self.weight(batches)
        body, head = self.split(subtract(self.train(start, batches), start))
        return private, {"delta": scale(body, weight), "head": head, "weight": weight}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        clients, order = torch.tensor(cohort.clients).sort()  # the order of answers must not matter
        each = take(cohort.each, order)
        heads, weight, whole = self.split(server["params"])[1], each["weight"], self.over == "model"
        become = {
            name: _head(heads[name], server["cluster"][clients]) + change for name, change in each["head"].items()
        }
        moved = scale(each["delta"], 1 / weight) if whole else {}
        points = torch.cat([leaf.flatten(1) for leaf in (*moved.values(), *become.values())], 1)
        # what all have in common, and how far they go, changes as the body is trained: centres are of directions
        points = F.normalize(points - points.mean(0))
        seed = None if server["rounds"] else int(server["seed"])
        places, centres = kmeans(points, server["centres"], self.iterations, seed)
        members = (torch.arange(self.k)[:, None] == places) * weight  # (clusters, clients)
        body = tree_map(lambda leaf: leaf.sum(0), each["delta"]) if whole else cohort.sums["delta"]
        mean = scale(body, 1 / weight.sum())
        part = members / members.sum(1, keepdim=True).clamp(min=1e-9)  # a head without members stays
        mean |= {name: torch.tensordot(part, change, 1) for name, change in each["head"].items()}
        if self.heads == "models":  # members may have begun with the head of another cluster
            there = members.sum(1) > 0
            mean |= {
                name: (torch.tensordot(part, model, 1) - heads[name]) * there.reshape(-1, *(1,) * (model.dim() - 1))
                for name, model in become.items()
            }
        params, optimizer = self.server.step(server["optimizer"], server["params"], mean)
        return {
            **server, "params": params, "optimizer": optimizer, "centres": centres, "rounds": server["rounds"] + 1,
            "cluster": server["cluster"].index_copy(0, clients, places), "count": (members > 0).sum(1).float(),
        }  # fmt: skip

    def observe(self, server: Tree, cohort: Cohort) -> Observed:
        clients = server["count"].int().tolist()
        return {"clients": clients, "largest_share": max(clients) / max(sum(clients), 1)}

    def pick(self, down: Tree, support: Batches) -> Tensor:
        """The client's cluster; if the server does not know it, the one with the lowest loss on these rows."""
        rows, places = support.rows(), torch.arange(self.k)
        losses = [self.task.scored(self.model(down, j), rows)["loss"] for j in places]
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


def _head(heads: Tensor, cluster: Tensor) -> Tensor:
    """The heads of these clusters; for -1 the mean of all."""
    known = cluster.reshape(-1, *(1,) * (heads.dim() - 1)) >= 0
    return torch.where(known, heads[cluster.clamp(min=0)], heads.mean(0))
