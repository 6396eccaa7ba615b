"""Clustered FL: Sattler, Mueller and Samek, Clustered Federated Learning, IEEE TNNLS 2020: groups found in updates.

At a stationary point of a common model clients of one kind pull in one direction, those of another against it. Begun
with all clients in one group c, in every round each group whose mean change is small while some client's is not,

    || sum_i n_i d_i / sum_i n_i || < eps1   and   max_i || d_i || > eps2

is divided in two by the cosine similarities a_ij of its clients' changes d_i: by complete linkage as in the authors'
code, or (`linkage = "single"`) so that the largest a_ij between the two is as small as can be, the paper's optimum. The
paper asks for sqrt((1 - max a_ij between the two) / 2) > gamma besides; the code does not. Each group is trained as in
FedAvg. The thresholds are lengths: in units of the longest change of the stage's first round, or absolute as published.

The server has to see every client's change (EACH). A stage of group-fl after it trains on with sums alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bespoke.declarations import Needs, Observed, Reveal, Sent
from bespoke.method import Cohort, Setting, knob
from bespoke.methods.parts.grouped import FoundGroups, Grouped
from bespoke.tensors import Params, Tree, scale, tree_map, without_buffers


@dataclass(frozen=True)
class ClusteredFL(FoundGroups, Grouped):
    """Groups are divided in two wherever their clients' updates point in opposite directions."""

    eps1: float = knob(0.1, "a group may be divided once its mean change is shorter than this", gt=0)
    eps2: float = knob(0.5, "and as long as some client's change is longer than this", ge=0)
    norms: Literal["relative", "absolute"] = knob(
        "relative", "eps1 and eps2 in units of the longest change of the first round, or as they are (the paper)"
    )
    gamma: float = knob(0.0, "least separation of the two parts, as in the paper; 0: none, as in its code", ge=0, lt=1)
    linkage: Literal["complete", "single"] = knob(
        "complete", "how a group is divided: complete (the authors' code) or single linkage (the paper's optimum)"
    )

    card = replace(
        FoundGroups.card,
        name="clustered-fl",
        title="Clustered FL",
        paper="Sattler et al., IEEE TNNLS 2020",
        after="fedavg",
        tunes={"lr": (0.01, 0.03, 0.1, 0.3)},
    )
    needs = Needs(everyone=True, clients=5000)

    @property
    def uplink(self) -> dict[str, Sent]:
        weight = Reveal.COUNT if self.weighting == "uniform" else Reveal.EACH
        return {"delta": Sent(Reveal.EACH, change="weight"), "weight": Sent(weight)}

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        numbers = {"unit": torch.zeros(()), "mean_norm": torch.zeros(()), "max_norm": torch.zeros(())}
        return {**self.begin(params, torch.zeros(setting.clients, dtype=torch.int64), 1), **numbers}

    def regrouped(self, server: Tree, clients: Tensor, each: Tree) -> Tree:
        weights = each.get("weight", torch.ones(len(clients)))
        sent = torch.cat([leaf.flatten(1) for leaf in without_buffers(each["delta"]).values()], dim=1)
        changes = (sent / weights[:, None]).double()
        norms = changes.norm(dim=1)
        groups = server["groups"].clone()
        if _rows(server) == 2:  # one group so far: every active client joins it
            groups[clients] = 1
        unit = server["unit"] if server["unit"] else norms.max().float()
        server = {**server, "groups": groups, "unit": unit, "max_norm": norms.max().float()}
        long = float(unit) if self.norms == "relative" else 1.0
        means = []
        for group in groups[clients].unique().tolist():
            here = torch.nonzero(groups[clients] == group)[:, 0]
            means.append((changes[here] * weights[here, None]).sum(0).norm() / weights[here].sum())
            if not group or len(here) < 3 or means[-1] >= self.eps1 * long or norms[here].max() <= self.eps2 * long:
                continue
            apart = divided(changes[here], self.linkage, self.gamma)
            if apart is not None:  # the smaller part goes, with copies of the model and of the optimizer's state
                groups[clients[here[apart]]] = _rows(server)
                copied = {name: server[name] for name in ("params", "optimizer")}
                server |= tree_map(lambda leaf, row=group: torch.cat([leaf, leaf[row : row + 1]]), copied)
        server["mean_norm"] = torch.stack(means).max().float()
        return self.trained(server, groups[clients], {"delta": each["delta"], "weight": weights})

    def trained(self, server: Tree, members: Tensor, each: Tree) -> Tree:
        """Every group's model by the mean of its members; the common one goes along until there are two groups."""
        rows = _rows(server)
        tables = tree_map(lambda leaf: leaf.new_zeros((rows, *leaf.shape[1:])), each)
        sums = tree_map(lambda table, leaf: table.index_add(0, members, leaf), tables, each)
        server = self.step(server, sums["delta"], sums["weight"])
        if rows == 2:
            server["params"] = tree_map(lambda leaf: leaf[[1, 1]], server["params"])
        return server

    def observe(self, server: Tree, cohort: Cohort) -> Observed:
        numbers = {name: float(server[name]) for name in ("mean_norm", "max_norm")}
        return {**super().observe(server, cohort), **numbers}


def _rows(server: Tree) -> int:
    """The number of models: those of groups and the common one."""
    return len(next(iter(server["params"].values())))


def divided(changes: Tensor, linkage: str, gamma: float) -> Tensor | None:
    """The smaller of two parts of these clients, by the cosine similarity of their changes; None if not separate."""
    from scipy.cluster.hierarchy import fcluster
    from scipy.cluster.hierarchy import linkage as tree_of

    similar = cosines(changes).numpy()
    pairs = np.triu_indices(len(similar), 1)
    part = fcluster(tree_of(1 - similar[pairs], linkage), 2, "maxclust") == 1
    if part.all() or not part.any():
        return None
    across = similar[part][:, ~part].max()
    if np.sqrt(max(1 - across, 0) / 2) <= gamma:
        return None
    return torch.from_numpy(part if 2 * part.sum() <= len(part) else ~part)


def cosines(changes: Tensor) -> Tensor:
    """The cosine similarity of each pair of rows."""
    units = scale(changes, 1 / changes.norm(dim=1).clamp(min=1e-12))
    return (units @ units.T).clamp(-1, 1)
