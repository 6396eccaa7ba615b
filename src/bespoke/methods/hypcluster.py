"""HypCluster: Mansour et al., Three Approaches for Personalization with Applications to Federated Learning, 2020.

The same as IFCA: Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020. The server holds
k models w_1, ..., w_k. In a round client i picks the one with the lowest loss on its training rows,
j(i) = argmin_j f_i(w_j), trains it as in FedAvg, and the server averages the changes of each cluster by itself:
w_j <- w_j + step(sum_{i: j(i) = j} n_i (w_i - w_j) / sum_{i: j(i) = j} n_i). A model that nobody picked stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bespoke.method import Batches, Batching, Cohort, Reveal, Setting, knob
from bespoke.methods.ensemble import Ensemble
from bespoke.methods.fedavg import FedAvg
from bespoke.tensors import Params, Tree, scale, stack, subtract, take


@dataclass(frozen=True)
class HypCluster(Ensemble):
    """Clients sort themselves into clusters, each with a model of its own."""

    k: int = knob(2, "how many clusters", ge=2)
    upload: Literal["sums", "index"] = knob(
        "sums",
        "what a client sends: sums over all clusters, zero but for its own, or one change and its cluster's index",
    )
    share: Literal["none", "body"] = knob(
        "none", "layers that all clusters have in common: none, or all but the last (IFCA's weight sharing)"
    )

    name = "hypcluster"
    paper = "Mansour et al., 2020 (HypCluster); Ghosh et al., NeurIPS 2020 (IFCA)"
    downlink = {
        "params": "the models of all k clusters",
        "largest": "which of them most clients of the last round chose",
    }
    personal = "the model of the cluster with the lowest loss on the client's own rows"
    unseen = "a client that never trained picks a cluster on its own rows, like all others"
    tunes = {"lr": (0.01, 0.03, 0.1, 0.3), "k": (2, 3, 4)}
    keep_shared = False  # the largest cluster's model only stands for what a client would have that did not choose

    @property
    def uplink(self) -> dict[str, Reveal]:  # type: ignore[override]
        if self.upload == "index":
            return {"delta": Reveal.EACH, "weight": Reveal.EACH, "cluster": Reveal.EACH}
        return {"delta": Reveal.SUM, "weight": Reveal.SUM, "count": Reveal.SUM}

    @property
    def starts_from(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.k,) if self.share == "none" else (1,)  # heads fit the body that they were trained with, no other

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        last = getattr(self.task, "last_layer", ())
        common = {n: leaf for n, leaf in params.items() if self.share == "body" and not n.startswith(last)}
        # beside a common body all heads are drawn: the one that came with it would win every client
        models = self.starts(params, setting.seed) if not common else stack(self.draws(setting.seed))
        own = {name: leaf for name, leaf in models.items() if name not in common}
        optimizer = {"own": self.optimizers(own), "common": self.server.init(common) if common else {}}
        return {"params": own, "common": common, "optimizer": optimizer, "count": torch.zeros(self.k)}

    def broadcast(self, server: Tree) -> Tree:
        # a state read back from disk has lost its empty trees
        return {"params": server["params"], "common": server.get("common", {}), "largest": server["count"].argmax()}

    def params(self, server: Tree) -> Params:
        """All k models, stacked, each with its copy of the common layers."""
        common = {name: stack([leaf] * self.k) for name, leaf in server.get("common", {}).items()}
        return {**server["params"], **common}

    def model(self, down: Tree, cluster: Tensor) -> Params:
        """One cluster's model. Indexed by a tensor, for under vmap every client has its own cluster."""
        return {**take(take(down["params"], cluster.reshape(1)), 0), **down["common"]}

    def batching(self) -> Batching:
        return FedAvg.batching(self)

    def pick(self, down: Tree, batches: Batches) -> Tensor:
        """The cluster whose model has the lowest loss on these rows; the first of equals, never one that diverged."""
        rows, places = batches.rows(), torch.arange(self.k)
        losses = [self.task.score(self.task.predict(self.model(down, j), rows), rows)["loss"] for j in places]
        return torch.stack(losses).nan_to_num(nan=torch.inf).argmin()

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        cluster, weight = self.pick(down, batches), self.weight(batches)
        start = self.model(down, cluster)
        delta = scale(subtract(self.train(start, batches), start), weight)
        if self.upload == "index":
            return private, {"delta": delta, "weight": weight, "cluster": cluster.int()}
        mine = (torch.arange(self.k) == cluster).float()
        for name in down["params"]:
            delta[name] = mine.reshape(-1, *(1,) * delta[name].dim()) * delta[name]
        return private, {"delta": delta, "weight": mine * weight, "count": mine}

    def tally(self, server: Tree, cohort: Cohort) -> tuple[Params, Tensor, Tensor]:
        """The sums of changes, of weights and of clients by cluster, whichever way they were sent."""
        if self.upload == "sums":
            return cohort.sums["delta"], cohort.sums["weight"], cohort.sums["count"]
        each = cohort.each
        members = (torch.arange(self.k)[:, None] == each["cluster"]).float()  # (clusters, clients)
        delta = {
            name: torch.tensordot(members, leaf, 1) if name in server["params"] else leaf.sum(0)
            for name, leaf in each["delta"].items()
        }
        return delta, members @ each["weight"], members.sum(1)

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        delta, weights, count = self.tally(server, cohort)
        own, common, optimizer = server["params"], server["common"], server["optimizer"]
        own, own_state = self.step(own, optimizer["own"], {name: delta[name] for name in own}, weights)
        state = optimizer["common"]
        if common:
            mean = scale({name: delta[name] for name in common}, 1.0 / weights.sum())
            common, state = self.server.step(state, common, mean)
        return {"params": own, "common": common, "optimizer": {"own": own_state, "common": state}, "count": count}

    def observe(self, server: Tree, cohort: Cohort) -> dict[str, Any]:
        clients = server["count"].clamp(min=0).round().int().tolist()  # noise may make them negative
        return {"clients": clients, "largest_share": max(clients) / max(sum(clients), 1)}

    def candidates(self) -> tuple[str, ...]:
        return ("largest cluster", *(f"cluster {place}" for place in range(self.k)))

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        for cluster in (down["largest"], *torch.arange(self.k)):
            yield self.model(down, cluster)
