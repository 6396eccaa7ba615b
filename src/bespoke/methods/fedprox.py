"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

FedAvg whose clients minimise f_k(w) + (mu / 2) ||w - w_t||^2: local training is pulled back to the round's start w_t.
"""

from __future__ import annotations

from dataclasses import dataclass

from bespoke.declarations import Card, stackable
from bespoke.method import Batches, knob
from bespoke.methods.fedavg import FedAvg
from bespoke.methods.parts.descend import descend
from bespoke.tensors import Params


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term that keeps clients near the shared model."""

    mu: float = knob(0.1, "strength of the pull to the round's start", ge=0)

    card = Card("fedprox", "Li et al., MLSys 2020", tunes={"lr": (0.01, 0.03, 0.1, 0.3), "mu": (0.01, 0.1, 1.0)})

    @stackable(lambda method: method.plain)
    def train(self, start: Params, batches: Batches) -> Params:
        return descend(
            self.task, start, batches, lr=self.schedule.of(self.lr, batches), optimizer=self.stepper, anchor=start,
            pull=self.mu,
        )  # fmt: skip
