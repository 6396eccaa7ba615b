"""Shared prefix: one prefix of embeddings for all users and contexts, learned by FedAvg with a local Adam.

The baseline that FedPC (Silva et al., 2022) lacks: prompt tuning (Lester et al., EMNLP 2021) of a frozen language
model, federated. Client d takes K steps of Adam from the shared prefix e and sends e_d - e; the server adds the mean
through its optimizer. What FedPC gains over it is what users and contexts are worth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bespoke.declarations import Card
from bespoke.method import Batches, Cohort, Setting
from bespoke.methods.parts.client_optimizer import adam_start, adam_step
from bespoke.methods.parts.local_adam import LocalAdam, pulled
from bespoke.methods.parts.schedule import at
from bespoke.tensors import Params, Tree, scale, subtract


@dataclass(frozen=True)
class SharedPrefix(LocalAdam):
    """One prefix for all clients before the texts of a frozen language model."""

    card = Card(
        "shared-prefix",
        "Lester et al., EMNLP 2021, federated; the baseline that Silva et al., FedPC, 2022, lack",
        personal="the shared prefix",
        unseen="a client that never trained gets the shared prefix",
        tunes={"lr": (0.0003, 0.001, 0.003)},
    )
    downlink = {"params": "the shared prefix"}

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        params = self.begun(params)
        return {"params": params, "optimizer": self.server.init(params)}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        start = params = down["params"]
        state, lr = adam_start(params), self.schedule.of(self.lr, batches)
        for step in range(len(batches)):
            slope = pulled(self.task.gradient(params, batches[step]), params, start, self.mu)
            params, state = adam_step(state, params, slope, at(lr, step), batches.live(step), self.eps)
        return private, {"delta": subtract(params, start), "weight": torch.ones_like(batches.examples)}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        mean = scale(cohort.sums["delta"], cohort.sums["weight"].reciprocal())
        params, optimizer = self.server.step(server["optimizer"], server["params"], mean)
        return {"params": params, "optimizer": optimizer}
