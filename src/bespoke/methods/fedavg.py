"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

Each client of the cohort trains the global model w for E epochs and sends its change; the server adds the mean change,
weighted by examples n_k (or uniformly), through a server optimizer: w <- w + step(sum_k n_k (w_k - w) / sum_k n_k).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from bespoke.method import Batches, Batching, Cohort, Method, Reveal, Setting, knob
from bespoke.methods.descend import descend
from bespoke.methods.server_optimizer import ServerOptimizer
from bespoke.tensors import Params, Tree, scale, scale_, subtract


@dataclass(frozen=True)
class FedAvg(Method):
    """One shared model, trained by averaging the clients' changes."""

    lr: float = knob(0.1, "client learning rate", gt=0)
    epochs: int = knob(1, "local epochs per round", ge=1)
    batch_size: int = knob(32, "client batch size", ge=1)
    momentum: float = knob(0.0, "client momentum, reset every round", ge=0, lt=1)
    weight_decay: float = knob(0.0, "client weight decay", ge=0)
    drop_last: bool = knob(False, "leave out the last, partial batch")
    shuffle: bool = knob(True, "draw new batches in every round; off: rows in their stored order")
    weighting: Literal["examples", "uniform"] = knob("examples", "weight of a client in the mean: examples or uniform")
    server: ServerOptimizer = field(
        default_factory=ServerOptimizer, metadata={"doc": "server optimizer: name, lr and what belongs to it"}
    )

    name = "fedavg"
    paper = "McMahan et al., AISTATS 2017; server optimizers: Reddi et al., ICLR 2021"
    uplink = {"delta": Reveal.SUM, "weight": Reveal.SUM}
    tunes = {"lr": (0.01, 0.03, 0.1, 0.3)}

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        return {"params": params, "optimizer": self.server.init(params)}

    def batching(self) -> Batching:
        return Batching(self.batch_size, self.epochs, drop_last=self.drop_last, shuffle=self.shuffle)

    @property
    def stackable(self) -> bool:  # type: ignore[override]
        # a subclass with other client work, or other training, has to say so for itself
        mine = type(self)
        return not self.momentum and mine.client_round is FedAvg.client_round and mine.train is FedAvg.train

    def train(self, start: Params, batches: Batches) -> Params:
        """Local training; FedProx and others put their own in its place."""
        return descend(
            self.task, start, batches, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )  # fmt: skip

    def weight(self, batches: Batches) -> Tensor:
        """What the client counts in the mean."""
        return batches.examples if self.weighting == "examples" else torch.ones_like(batches.examples)

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        return private, self.change(self.train(down["params"], batches), down["params"], batches)

    def change(self, trained: Params, start: Params, batches: Batches) -> Tree:
        """What a client sends: its weighted change, and the weight."""
        weight = self.weight(batches)
        return {"delta": scale_(subtract(trained, start), weight), "weight": weight}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        mean = scale(cohort.sums["delta"], cohort.sums["weight"].reciprocal())
        params, optimizer = self.server.step(server["optimizer"], server["params"], mean)
        return {"params": params, "optimizer": optimizer}
