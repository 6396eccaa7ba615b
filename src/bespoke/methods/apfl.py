"""APFL: Deng, Kamani, Mahdavi, Adaptive Personalized Federated Learning, 2020.

Client k uses the mixture m_k = alpha_k v_k + (1 - alpha_k) w of a model of its own and the shared one. In each local
step, all on one batch and from the values before it, w_k being the client's copy of w:

    w_k <- w_k - lr grad f(w_k)        v_k <- v_k - lr alpha_k grad f(m_k)
    alpha_k <- alpha_k - lr <v_k - w_k, grad f(m_k)>, kept within [0, 1]   (`adapt`: in every step, once a round, never)

w_k is averaged as in FedAvg; v_k and alpha_k never leave the client.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from bespoke.declarations import Card, Choosing, Needs
from bespoke.method import Batches, Batching, knob
from bespoke.methods.parts.schedule import at
from bespoke.methods.parts.shared_model import SharedModel
from bespoke.tensors import Params, Tree, add_scaled, scale


def mixture(own: Params, shared: Params, alpha: Tensor) -> Params:
    """alpha own + (1 - alpha) shared."""
    return add_scaled(scale(own, alpha), shared, 1 - alpha)


@dataclass(frozen=True)
class APFL(SharedModel):
    """A shared model mixed with a model of the client's own, the weight of each learned by the client."""

    alpha: float = knob(0.5, "the part of the client's own model in the mixture, at the beginning", ge=0, le=1)
    adapt: Literal["step", "round", "never"] = knob(
        "step", "when a client learns its alpha: in every step, in the first of a round (the authors' code), never"
    )
    adapt_epochs: int = knob(10, "epochs in which a client that never trained makes its own model", ge=1)

    card = Card(
        "apfl",
        "Deng et al., 2020",
        personal="a mixture of the shared model and a model of the client's own",
        unseen="a client that never trained makes its own model and its part on its own rows, beside the shared one",
        tunes={"lr": (0.01, 0.03, 0.1, 0.3), "alpha": (0.25, 0.5, 0.75)},
    )
    private = {"model": "the client's own model", "alpha": "its part in the mixture"}
    needs = Needs(still=True)
    choosing = Choosing(keep_shared=False)

    def batching(self) -> Batching:
        return replace(super().batching(), uses=2)

    def init_private(self, params: Params) -> Tree:
        return {"model": params, "alpha": torch.tensor(self.alpha)}

    def own_step(self, private: Tree, shared: Params, batch: Params, rate: float | Tensor, learn: bool) -> Tree:
        """v and alpha after a step on this batch, beside a given shared model."""
        own, alpha = private["model"], private["alpha"]
        slope = self.task.gradient(mixture(own, shared, alpha), batch)
        moved = add_scaled(own, slope, -rate * alpha)
        if learn:
            along = torch.stack([((own[name] - shared[name]) * slope[name]).sum() for name in own]).sum()
            alpha = (alpha - rate * along).clamp(0.0, 1.0)
        return {"model": moved, "alpha": alpha}

    def train(self, private: Tree, shared: Params, batches: Batches, moves: bool) -> tuple[Tree, Params]:
        """The client's own model and alpha after these batches, and its copy of the shared model if that moves too."""
        lr = self.schedule.of(self.lr, batches)
        for step in range(len(batches)):
            batch, rate = batches[step], at(lr, step) * batches.live(step)
            learn = self.adapt == "step" or (self.adapt == "round" and step == 0)
            private = self.own_step(private, shared, batch, rate, learn)
            if moves:
                shared = add_scaled(shared, self.task.gradient(shared, batch), -rate)
        return private, shared

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        private, shared = self.train(private, down["params"], batches, moves=True)
        return private, self.change(shared, down["params"], batches)

    def support_batching(self) -> Batching:
        return Batching(self.batch_size, self.adapt_epochs, drop_last=self.drop_last)

    def newcomer(self, down: Tree, private: Tree, support: Batches) -> Tree:
        # the shared model does not move: it will be mixed in, and a newcomer's copy is not averaged
        start = {"model": down["params"], "alpha": private["alpha"]}
        return self.train(start, down["params"], support, moves=False)[0]

    def candidates(self) -> tuple[str, ...]:
        return ("global", "personal")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        yield down["params"]
        yield mixture(private["model"], down["params"], private["alpha"])
