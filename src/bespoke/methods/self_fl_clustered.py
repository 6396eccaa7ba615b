"""Self-FL with cluster-level aggregation: Chen et al., Self-Aware Personalized Federated Learning, Appendix G.4.

Of few active clients the mean forgets the others. So the server keeps the latest model of each cluster, theta_c, and in
every round takes the mean over all clusters: one that nobody of was there stands for itself by its stored model,

    theta <- sum_c W_c theta_c / sum_c W_c,    W_c = (clients in c) x (mean weight u of those that were last there)

with theta_c the mean of those clients' models in the weights u of Self-FL (see self_fl.py). sigma_0^2 is the variance
of models over all clusters, by the law of total variance: that within clusters, when last seen, plus that between them.
The mean is over all clients, active or not, so Eq. 8 and 10 sum over all others, too: `others` can only be "all" here.

Clusters are the population's groups, or as many equal parts of the clients in the order of their own uncertainty. Sums
suffice here, too: a client adds its message in the place of its cluster and nothing in the others, so that the uplink
is as many times Self-FL's as there are clusters. By uncertainty, the server learns each client's weight besides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from bespoke.declarations import Needs, Observed, Reveal, Sent
from bespoke.method import Batches, Cohort, Setting, knob
from bespoke.methods.self_fl import TINY, SelfFL
from bespoke.tensors import Params, Tree, add, add_scaled, scale, stack, subtract, tree_map


@dataclass(frozen=True)
class ClusteredSelfFL(SelfFL):
    """Self-FL whose server remembers the latest model of every cluster and takes the mean over all of them."""

    clusters: Literal["groups", "uncertainty"] = knob(
        "groups", "what clusters are: the data's groups, or parts of the clients by their own uncertainty"
    )
    k: int = knob(4, "how many clusters, by uncertainty", ge=2)
    # here the weights are of clusters
    weighting: Literal["precision"] = knob("precision", "weight of a client in its cluster's mean: by its precision")
    others: Literal["all"] = knob("all", "other clients that Eq. 8 and 10 sum over: all, as in the mean over clusters")

    card = replace(SelfFL.card, name="self-fl-clustered", title="Self-FL (cluster level)")
    downlink = {**SelfFL.downlink, "cluster": "which of the clusters the client is in: a one among zeros"}

    @property
    def needs(self) -> Needs:
        return Needs(still=True, groups=self.clusters == "groups")

    @property
    def uplink(self) -> dict[str, Sent]:
        each = {"own": Sent(Reveal.EACH)} if self.clusters == "uncertainty" else {}
        # the count is of each cluster: not the same for everyone
        rows = {name: replace(sent, rows=("",)) for name, sent in {**super().uplink, "count": Sent(Reveal.SUM)}.items()}
        return {**rows, **each}

    # -- the server ----------------------------------------------------------------------------------------------------
    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        member = torch.zeros(setting.clients, dtype=torch.int64)
        if self.clusters == "groups":
            if setting.groups is None:
                raise ValueError("clusters = 'groups' needs the clients' groups in the setting, and there are none")
            member = setting.groups.long()
        k = self.k if self.clusters == "uncertainty" else int(member.max()) + 1 if len(member) else 1
        number = next(iter(params.values()))
        return {
            **super().init_server(params, setting),
            "models": stack([params] * k) if k > 1 else tree_map(lambda leaf: leaf[None], params),
            "weights": number.new_zeros(k),  # mean weight of a cluster's clients when last there; 0: never yet
            "within": number.new_zeros(k),  # variance of their models
            "own": number.new_full((setting.clients,), 0.5),  # weight of each client, as last known, by uncertainty
            "member": member if self.clusters == "groups" else torch.arange(setting.clients) % k,
        }

    def unicast(self, server: Tree, client: int) -> Tree:
        same_cluster = torch.arange(len(server["weights"])) == server["member"][client]
        return {"cluster": same_cluster.to(server["weights"].dtype)}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        sums = cohort.sums
        seen = sums["count"].round()  # of each cluster's clients
        there, total = seen > 0, sums["weight"].clamp(min=TINY)
        mean_change = scale(sums["delta"], 1 / total)  # each cluster's mean change from theta
        models = tree_map(
            lambda new, old: torch.where(there.reshape(-1, *(1,) * (new.dim() - 1)), new, old),
            add(mean_change, server["params"]), server["models"],
        )  # fmt: skip
        spread = (sums["spread"] / total - _squares(mean_change)).clamp(min=0)
        new = {
            **server,
            "models": models,
            "weights": torch.where(there, sums["weight"] / seen.clamp(min=1), server["weights"]),
            "within": torch.where(there, spread, server["within"]),
        }
        if self.clusters == "uncertainty":
            new |= self.sort(new, cohort)
        return {**new, **self.mean(new)}

    def mean(self, server: Tree) -> Tree:
        """Eq. 11 and 14 over clusters: the global model, the variance between clients, the sum of precisions."""
        sizes = torch.bincount(server["member"], minlength=len(server["weights"]))
        weights = server["weights"] * sizes
        if not weights.sum() > 0:  # clipped and noisy counts may be zero
            return {}
        part = weights / weights.sum()
        away = subtract(server["models"], server["params"])
        shift = {name: torch.tensordot(part, leaf, 1) for name, leaf in away.items()}
        params = add_scaled(server["params"], shift, self.activity or 1.0)
        between = server["between"]
        if not self.between:
            variance = server["within"] + _squares(subtract(away, shift))
            between = ((part * variance).sum() * self.times(sizes.sum())).clamp(min=TINY)
        return {"params": params, "between": between, "total": weights.sum()}

    def sort(self, server: Tree, cohort: Cohort) -> Tree:
        """Clusters by uncertainty: as many clients in each, in the order of their weights."""
        own = server["own"].clone()
        own[list(cohort.clients)] = cohort.each["own"]
        rank = own.argsort(stable=True).argsort()
        return {"own": own, "member": rank * len(server["weights"]) // max(len(own), 1)}

    def observe(self, server: Tree, cohort: Cohort) -> Observed:
        seen = int((server["weights"] > 0).sum())
        return {**super().observe(server, cohort), "clusters_seen": seen}

    # -- the client ----------------------------------------------------------------------------------------------------
    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        new, up = super().client_round(down, private, batches)
        placed = tree_map(lambda leaf: _times(down["cluster"], leaf), up)
        return new, {**placed, **({"own": new["weight"]} if self.clusters == "uncertainty" else {})}


def _times(place: Tensor, leaf: Tensor) -> Tensor:
    """The leaf in the cluster's place, zeros in all others."""
    return place.reshape(-1, *(1,) * leaf.dim()) * leaf


def _squares(models: Params) -> Tensor:
    """The squared norm of each of several stacked models."""
    return torch.stack([(leaf * leaf).flatten(1).sum(1) for leaf in models.values()]).sum(0)
