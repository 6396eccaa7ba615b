"""Groups by k-means on the mean features of clients' rows: the simplest way to find groups before training them.

Each client sends one vector, the mean over its rows of the model's features (before the last layer; of a linear model
the inputs themselves). The server standardizes them over clients and divides these by k-means; it learns each client's
vector (EACH). One round suffices; nothing is trained. A stage of group-fl comes after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bespoke.declarations import Reveal, Sent
from bespoke.method import Batches, Batching, Setting, knob
from bespoke.methods.parts.grouped import FoundGroups
from bespoke.tensors import Params, Tree


@dataclass(frozen=True)
class FeatureGroups(FoundGroups):
    """Clients whose rows look alike make a group; the models stay as they are."""

    k: int = knob(2, "how many groups", ge=2)

    card = replace(
        FoundGroups.card,
        name="feature-groups",
        title="feature groups",
        paper="k-means (MacQueen, 1967) on the clients' mean features",
        after="fedavg",
    )
    uplink = {"features": Sent(Reveal.EACH)}

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        members = torch.zeros(setting.clients, dtype=torch.int64)
        return {"params": self.models(params, self.k), "groups": members, "seed": torch.tensor(setting.seed)}

    def batching(self) -> Batching:
        return Batching(2**31, uses=0)  # rows are read, and nothing is trained

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        rows = batches.rows()
        found = self.task.features(down["params"], rows)
        found = found.reshape(len(found), -1, found.shape[-1]).mean(1)  # of a sequence: over its positions
        mask = rows["mask"][:, None]
        return private, {"features": (found * mask).sum(0) / mask.sum().clamp(min=1.0)}

    def regrouped(self, server: Tree, clients: Tensor, each: Tree) -> Tree:
        from sklearn.cluster import KMeans

        seen = each["features"].double()
        scaled = (seen - seen.mean(0)) / seen.std(0, correction=0).clamp(min=1e-9)
        k = min(self.k, len(seen))
        found = KMeans(k, n_init=10, random_state=int(server["seed"])).fit_predict(scaled.numpy())
        numbers = {label: number for number, label in enumerate(dict.fromkeys(found.tolist()), start=1)}
        groups = server["groups"].clone()
        groups[clients] = torch.tensor([numbers[label] for label in found.tolist()])
        return {**server, "groups": groups}
