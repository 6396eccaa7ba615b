"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

Each client of the cohort trains the global model w for E epochs and sends its change; the server adds the mean change,
weighted by examples n_k (or uniformly), through a server optimizer: w <- w + step(sum_k n_k (w_k - w) / sum_k n_k).
"""

from __future__ import annotations

from dataclasses import dataclass

from bespoke.method import Batches, knob
from bespoke.methods.descend import descend
from bespoke.methods.shared_model import SharedModel
from bespoke.tensors import Params, Tree


@dataclass(frozen=True)
class FedAvg(SharedModel):
    """One shared model, trained by averaging the clients' changes."""

    momentum: float = knob(0.0, "client momentum, reset every round", ge=0, lt=1)
    weight_decay: float = knob(0.0, "client weight decay", ge=0)

    name = "fedavg"
    paper = "McMahan et al., AISTATS 2017; server optimizers: Reddi et al., ICLR 2021"
    tunes = {"lr": (0.01, 0.03, 0.1, 0.3)}

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

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        return private, self.change(self.train(down["params"], batches), down["params"], batches)
