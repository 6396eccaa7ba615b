"""HypCluster: Mansour et al., Three Approaches for Personalization with Applications to Federated Learning, 2020.

The same as IFCA: Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020. The server holds
k models w_1, ..., w_k. In a round client i picks the one with the lowest loss on its training rows,
j(i) = argmin_j f_i(w_j), trains it as in FedAvg, and the server averages the changes of each cluster by itself:
w_j <- w_j + step(sum_{i: j(i) = j} n_i (w_i - w_j) / sum_{i: j(i) = j} n_i). A model that nobody picked stays as it is.

With `reseed` (not in the papers) a cluster that nobody picked for so many rounds is started again: it becomes a copy of
the largest cluster's model, and for as many rounds every client whose loss under the best of the other models is above
the mean of the round before trains this model instead. The mean follows from a sum: the server sees no one's loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bespoke.declarations import Card, Choosing, Handoff, Needs, Observed, One, Reveal, Sent, Stacked
from bespoke.method import Batches, Batching, Cohort, Setting, knob
from bespoke.methods.ensemble import Ensemble
from bespoke.methods.fedavg import FedAvg
from bespoke.tensors import Params, Tree, scale, stack, subtract, take, tree_map


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
    reseed: int = knob(
        0,
        "rounds after which an empty cluster is started again, and for which the worst served train it; 0: never",
        ge=0,
    )

    card = Card(
        "hypcluster",
        "Mansour et al., 2020 (HypCluster); Ghosh et al., NeurIPS 2020 (IFCA)",
        personal="the model of the cluster with the lowest loss on the client's own rows",
        unseen="a client that never trained picks a cluster on its own rows, like all others",
        tunes={"lr": (0.01, 0.03, 0.1, 0.3), "k": (2, 3, 4)},
    )
    downlink = {
        "params": "the models of all k clusters",
        "largest": "which of them most clients of the last round chose",
        "vacant": "with reseed: which of them is started again in this round, or -1",
        "threshold": "with reseed: the mean loss of the last round's clients",
    }

    @classmethod
    def prepared(cls, knobs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The method from whose models a comparison starts it, with its knobs: a cold start tends to collapse."""
        return "fedavg" if knobs.get("share") == "body" else "ensemble", {"reseed": 5, **knobs}

    @property
    def uplink(self) -> dict[str, Sent]:
        loss = {"loss": Sent(Reveal.SUM)} if self.reseed else {}
        if self.upload == "index":
            seen = Sent(Reveal.EACH)
            return {"delta": Sent(Reveal.EACH, change="weight"), "weight": seen, "cluster": seen, **loss}
        own = (self.task.last_layer if self.share == "body" else ()) or ("",)
        delta, all_ = Sent(Reveal.SUM, change="weight", rows=own), Sent(Reveal.SUM, rows=("",))
        return {"delta": delta, "weight": all_, "count": all_, **loss}

    @property
    def needs(self) -> Needs:
        return Needs(last=self.share == "body")

    @property
    def handoff(self) -> Handoff:  # heads fit the body that they were trained with, no other
        return Handoff(Stacked(self.k), takes=(Stacked(self.k) if self.share == "none" else One(),))

    @property
    def choosing(self) -> Choosing:  # the largest cluster's model stands for what a client would have without choosing
        return replace(super().choosing, keep_shared=False)

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        last = self.task.last_layer if self.share == "body" else ("",)
        common = {n: leaf for n, leaf in params.items() if not n.startswith(last)}
        # with a common body all heads are drawn: the head that was trained with it would win every client
        models = self.starts(params, setting.seed) if not common else stack(self.draws(setting.seed))
        own = {name: leaf for name, leaf in models.items() if name not in common}
        optimizer = {"own": self.optimizers(own), "common": self.server.init(common) if common else {}}
        server = {"params": own, "common": common, "optimizer": optimizer, "count": torch.zeros(self.k)}
        return {**server, "empty": torch.zeros(self.k), "loss": torch.tensor(0.0)} if self.reseed else server

    def broadcast(self, server: Tree) -> Tree:
        # a state read back from disk has lost its empty trees
        down = {"params": server["params"], "common": server.get("common", {}), "largest": server["count"].argmax()}
        return {**down, "vacant": self.vacant(server), "threshold": server["loss"]} if self.reseed else down

    def vacant(self, server: Tree) -> Tensor:
        """The cluster that is being started again, or -1: its rounds count upwards from -reseed."""
        lowest = server["empty"].argmin()
        return torch.where(server["empty"][lowest] < 0, lowest, -1)

    def params(self, server: Tree) -> Params:
        """All k models, stacked, each with its copy of the common layers."""
        common = {name: stack([leaf] * self.k) for name, leaf in server.get("common", {}).items()}
        return {**server["params"], **common}

    def model(self, down: Tree, cluster: Tensor) -> Params:
        """One cluster's model. Indexed by a tensor, for under vmap every client has its own cluster."""
        return {**take(take(down["params"], cluster.reshape(1)), 0), **down["common"]}

    def batching(self) -> Batching:
        return FedAvg.batching(self)

    def pick(self, down: Tree, batches: Batches) -> tuple[Tensor, Tensor]:
        """The cluster whose model has the lowest loss on these rows, and that loss.

        The first of equals, never one that diverged. While a cluster is being started again, clients that the others
        serve worse than the mean join it.
        """
        rows, places = batches.rows(), torch.arange(self.k)
        scores = [self.task.scored(self.model(down, j), rows) for j in places]
        sums = torch.stack([score["loss"] for score in scores]).nan_to_num(nan=torch.inf)
        if self.reseed:
            sums = sums.masked_fill(places == down["vacant"], torch.inf)  # the loss is that under the others
        cluster, loss = sums.argmin(), sums.min() / scores[0]["count"].clamp(min=1.0)
        if self.reseed:
            cluster = torch.where((down["vacant"] >= 0) & (loss > down["threshold"]), down["vacant"], cluster)
        return cluster, loss

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        (cluster, loss), weight = self.pick(down, batches), self.weight(batches)
        start = self.model(down, cluster)
        delta = scale(subtract(self.train(start, batches), start), weight)
        reported = {"loss": loss} if self.reseed else {}
        if self.upload == "index":
            return private, {"delta": delta, "weight": weight, "cluster": cluster.int(), **reported}
        in_cluster = (torch.arange(self.k) == cluster).float()
        for name in down["params"]:
            delta[name] = in_cluster.reshape(-1, *(1,) * delta[name].dim()) * delta[name]
        return private, {"delta": delta, "weight": in_cluster * weight, "count": in_cluster, **reported}

    def tally(self, server: Tree, cohort: Cohort) -> tuple[Params, Tensor, Tensor]:
        """The sums of changes, of weights and of clients by cluster, in either form of messages."""
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
        after = {"params": own, "common": common, "optimizer": {"own": own_state, "common": state}, "count": count}
        return self.reseeded(after, server["empty"], cohort.sums["loss"]) if self.reseed else after

    def reseeded(self, server: Tree, empty: Tensor, loss: Tensor) -> Tree:
        """Counts the rounds in which clusters were empty; a cluster that restarts becomes a copy of the largest."""
        count = server["count"]
        # noise makes counts fractions, and of either sign
        empty = torch.where((empty < 0) | (count < 0.5), empty + 1, 0.0)
        vacant, largest = int(empty.argmax()), int(count.argmax())
        begins = bool((empty >= 0).all() and empty[vacant] >= self.reseed)
        if begins:
            empty[vacant] = -self.reseed
        server = {**server, "empty": empty, "loss": loss / count.sum().clamp(min=1.0)}
        if not begins:
            return server
        places = torch.arange(self.k)
        places[vacant] = largest
        own, states = take(server["params"], places), server["optimizer"]["own"]
        fresh = self.server.init(take(own, vacant))
        states = tree_map(lambda leaf, new: leaf.index_copy(0, torch.tensor([vacant]), new[None]), states, fresh)
        return {**server, "params": own, "optimizer": {**server["optimizer"], "own": states}}

    def observe(self, server: Tree, cohort: Cohort) -> Observed:
        clients = server["count"].clamp(min=0).round().int().tolist()  # noise may make them negative
        return {"clients": clients, "largest_share": max(clients) / max(sum(clients), 1)}

    def candidates(self) -> tuple[str, ...]:
        return ("largest cluster", *(f"cluster {place}" for place in range(self.k)))

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        for cluster in (down["largest"], *torch.arange(self.k)):
            yield self.model(down, cluster)
