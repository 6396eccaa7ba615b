"""One shared model, moved by the mean of the clients' changes: FedAvg's core, shared by many methods.

Client k turns the shared model w into w_k by whatever the method does and sends its change; the server adds the mean,
weighted by examples n_k (or uniformly), through a server optimizer: w <- w + step(sum_k n_k (w_k - w) / sum_k n_k).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from bespoke.declarations import Reveal, Sent
from bespoke.method import Batches, Batching, Cohort, Method, Setting, knob
from bespoke.methods.parts.schedule import SCHEDULE, Schedule
from bespoke.methods.parts.server_optimizer import ServerOptimizer
from bespoke.tensors import Params, Tree, scale, tree_map


@dataclass(frozen=True)
class SharedModel(Method):
    """A shared model and the mean of changes. Subclasses say what a client does in a round."""

    lr: float = knob(0.1, "client learning rate", gt=0)
    epochs: int = knob(1, "local epochs per round", ge=1)
    batch_size: int = knob(32, "client batch size", ge=1)
    steps_per_round: int | None = knob(
        None, "local steps per round in place of epochs, however few rows", ge=1, le=1_000_000
    )
    drop_last: bool = knob(False, "leave out the last, partial batch")
    shuffle: bool = knob(True, "draw new batches in every round; off: rows in their stored order")
    weighting: Literal["examples", "uniform"] = knob("examples", "weight of a client in the mean: examples or uniform")
    schedule: Schedule = field(default_factory=Schedule, metadata={"doc": SCHEDULE})
    server: ServerOptimizer = field(
        default_factory=ServerOptimizer, metadata={"doc": "server optimizer: name, lr and what belongs to it"}
    )

    @property
    def uplink(self) -> dict[str, Sent]:
        weight = Reveal.COUNT if self.weighting == "uniform" else Reveal.SUM
        return {"delta": Sent(Reveal.SUM, change="weight"), "weight": Sent(weight)}

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        return {"params": params, "optimizer": self.server.init(params)}

    def batching(self) -> Batching:
        return Batching(
            self.batch_size, self.epochs, drop_last=self.drop_last, shuffle=self.shuffle,
            steps=self.steps_per_round or 0,
        )  # fmt: skip

    def weight(self, batches: Batches) -> Tensor:
        """What the client counts in the mean."""
        return batches.examples if self.weighting == "examples" else torch.ones_like(batches.examples)

    def change(self, trained: Params, start: Params, batches: Batches) -> Tree:
        """What a client sends: its weighted change, and the weight."""
        weight = self.weight(batches)
        # leaf by leaf and in place, so that a large model's change is held once
        if weight.dim():
            return {"delta": tree_map(lambda new, old: scale(new - old, weight), trained, start), "weight": weight}
        return {"delta": tree_map(lambda new, old: (new - old) * weight, trained, start), "weight": weight}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        mean = scale(cohort.sums["delta"], cohort.sums["weight"].reciprocal())
        params, optimizer = self.server.step(server["optimizer"], server["params"], mean)
        return {"params": params, "optimizer": optimizer}
