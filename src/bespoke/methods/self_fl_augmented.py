"""Augmented Self-FL: Chen et al., Self-Aware Personalized Federated Learning, NeurIPS 2022, Algorithm 2.

A client's uncertainty is judged by models that it trains to local convergence: after the steps of Self-FL it trains for
`local_steps` more. Eq. 18 and 22 use these converged models, so two models travel. Symbols are those of self_fl.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from bespoke.declarations import Reveal, Sent
from bespoke.method import Batches, Batching, knob
from bespoke.methods.parts.client_optimizer import ClientOptimizer
from bespoke.methods.parts.descend import descend
from bespoke.methods.self_fl import SelfFL
from bespoke.tensors import Params, Tree, scale, squared_norm, subtract


@dataclass(frozen=True)
class AugmentedSelfFL(SelfFL):
    """Self-FL that judges uncertainty by models trained to local convergence; two models travel (Algorithm 2)."""

    local_steps: int = knob(200, "further steps after which a client's training counts as converged", ge=1)
    shares: Literal["personal", "local"] = knob(
        "personal", "which of a client's two models goes into the global one: theta_m, or the converged one"
    )

    card = replace(SelfFL.card, name="self-fl-augmented", title="Augmented Self-FL")
    private = {**SelfFL.private, "local": "its model after local convergence"}

    @property
    def uplink(self) -> dict[str, Sent]:
        return {**super().uplink, "local": Sent(Reveal.SUM, change="count")}

    def spread(self, sums: Tree, mean: Params, clients: float) -> Tensor:
        """Eq. 22: of the converged models, unweighted, because their own sum travels too."""
        spread: Tensor = sums["spread"] / clients - squared_norm(scale(sums["local"], 1 / clients))
        return spread

    def batching(self) -> Batching:
        return replace(super().batching(), steps=self.max_steps + self.local_steps)

    def init_private(self, params: Params) -> Tree:
        return {**super().init_private(params), "local": params}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        new, up = super().client_round(down, private, batches)
        further = torch.full_like(private["count"], float(self.local_steps))
        local = descend(
            self.task, new["model"], batches.first(further, self.local_steps), lr=self.rate(batches),
            optimizer=ClientOptimizer(weight_decay=self.weight_decay),
        )  # fmt: skip
        moved = subtract(local, down["params"])
        if self.shares == "local":
            up = self.message(moved, new["weight"], batches)
        new = {**new, **self.remember(private, local), "local": local, "steps": new["steps"] + further}
        return new, {**up, "spread": squared_norm(moved), "local": moved}

    def start(self, down: Tree, private: Tree) -> Params:
        return super().start(down, {**private, "model": private["local"]} if self.shares == "local" else private)
