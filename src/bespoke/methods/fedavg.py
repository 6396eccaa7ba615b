"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

Each client of the cohort trains the global model w for E epochs and sends its change; the server adds the mean change,
weighted by examples n_k (or uniformly), through a server optimizer: w <- w + step(sum_k n_k (w_k - w) / sum_k n_k).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bespoke.declarations import Card, stackable, stacks
from bespoke.method import Batches, knob
from bespoke.methods.parts.client_optimizer import OPTIMIZER, ClientOptimizer
from bespoke.methods.parts.descend import descend
from bespoke.methods.parts.shared_model import SharedModel
from bespoke.tensors import Params, Tree


@dataclass(frozen=True)
class FedAvg(SharedModel):
    """One shared model, trained by averaging the clients' changes."""

    momentum: float = knob(0.0, "client momentum, reset every round: short for optimizer = momentum", ge=0, lt=1)
    weight_decay: float = knob(0.0, "client weight decay, as the optimizer has it", ge=0)
    optimizer: ClientOptimizer = field(default_factory=ClientOptimizer, metadata={"doc": OPTIMIZER})

    card = Card(
        "fedavg",
        "McMahan et al., AISTATS 2017; server optimizers: Reddi et al., ICLR 2021",
        tunes={"lr": (0.01, 0.03, 0.1, 0.3)},
    )

    def __post_init__(self) -> None:
        self.stepper.joined()  # refuses wrong combinations

    @property
    def stepper(self) -> ClientOptimizer:
        """The optimizer, with the knobs that the method has for plain momentum and weight decay."""
        return self.optimizer.joined(self.momentum, self.weight_decay)

    @property
    def plain(self) -> bool:
        """Whether a client's steps are SGD at one rate, which is compiled and takes stacked clients."""
        return not self.stepper.stateful and self.schedule.steady

    @stackable(lambda method: method.plain)
    def train(self, start: Params, batches: Batches) -> Params:
        """Local training; FedProx and others override it."""
        return descend(self.task, start, batches, lr=self.schedule.of(self.lr, batches), optimizer=self.stepper)

    @stackable(lambda method: stacks(method.train))
    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        return private, self.change(self.train(down["params"], batches), down["params"], batches)
