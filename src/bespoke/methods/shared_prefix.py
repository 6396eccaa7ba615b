"""Shared prefix: one prefix of embeddings for all users and contexts, learned by FedAvg with a local Adam.

The baseline that FedPC (Silva et al., 2022) lacks: prompt tuning (Lester et al., EMNLP 2021) of a frozen language
model, federated. Client d takes K steps of Adam from the shared prefix e and sends e_d - e; the server adds the mean
through its optimizer. What FedPC gains over it is what users and contexts are worth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bespoke.method import Batches, Cohort, Setting
from bespoke.methods.local_adam import LocalAdam, adam_start, adam_step, pulled
from bespoke.tensors import Params, Tree, scale, subtract


@dataclass(frozen=True)
class SharedPrefix(LocalAdam):
    """One prefix for everyone before the texts of a frozen language model."""

    name = "shared-prefix"
    paper = "Lester et al., EMNLP 2021, federated; the baseline that Silva et al., FedPC, 2022, lack"
    downlink = {"params": "the shared prefix"}
    personal = "the shared prefix"
    unseen = "a client that never trained gets the shared prefix"
    tunes = {"lr": (0.0003, 0.001, 0.003)}

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        params = self.begun(params)
        return {"params": params, "optimizer": self.server.init(params)}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        start = params = down["params"]
        state = adam_start(params)
        for step in range(len(batches)):
            slope = pulled(self.task.gradient(params, batches[step]), params, start, self.mu)
            params, state = adam_step(state, params, slope, self.lr, batches.live(step))
        return private, {"delta": subtract(params, start), "weight": torch.ones_like(batches.examples)}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        mean = scale(cohort.sums["delta"], cohort.sums["weight"].reciprocal())
        params, optimizer = self.server.step(server["optimizer"], server["params"], mean)
        return {"params": params, "optimizer": optimizer}
