"""Ditto: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.

Clients train a shared model w as in FedAvg and, beside it, a private model v_k on f_k(v) + (lam / 2) ||v - w_t||^2, w_t
the shared model at the round's start. Neither descent sees the other's steps, so it does not matter which goes first:
implementations differ in the batches. In the original's code the two take turns on each batch (`order = "original"`:
the same batches); in Motley's each has epochs of its own (`order = "motley"`: other batches). In
rounds of `steps_per_round` steps both go over the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bespoke.declarations import stackable, stacks
from bespoke.method import Batches, Batching, knob
from bespoke.methods.parts.private_model import PrivateModel
from bespoke.tensors import Tree


@dataclass(frozen=True)
class Ditto(PrivateModel):
    """A shared model by FedAvg, and a private model on each client that is pulled to it."""

    order: Literal["motley", "original"] = knob(
        "motley", "batches of the private model: epochs of its own (motley), or those of the shared model (original)"
    )
    private_lr: float | None = knob(None, "learning rate of the private model; as lr if not given", gt=0)
    private_epochs: int = knob(1, "epochs of the private model per round", ge=1)

    card = replace(
        PrivateModel.card,
        name="ditto",
        paper="Li et al., ICML 2021",
        personal="a private model, trained on the client's own rows and pulled to the shared one",
        tunes={"lr": (0.01, 0.03, 0.1, 0.3), "lam": (0.01, 0.1, 1.0)},
        tunes_exact={"lr": (0.1, 0.3), "lam": (0.001, 0.01, 0.1, 1.0, 10.0)},
    )

    @property
    def own_lr(self) -> float:
        return self.lr if self.private_lr is None else self.private_lr

    def batching(self) -> Batching:
        if self.solver == "exact":  # the private model is solved at the end
            return super().batching()
        if self.steps_per_round:  # both descents take all steps
            return replace(super().batching(), uses=2)
        return replace(super().batching(), epochs=self.epochs + self.private_epochs)

    @stackable(lambda method: stacks(method.train) and stacks(method.pulled))
    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        _, up = super().client_round(down, {}, batches.part(0, self.epochs))
        if self.solver == "exact":
            return private, up
        begin = 0 if self.order == "original" else self.epochs
        own_epochs = batches.part(begin, begin + self.private_epochs)
        return {"model": self.pulled(private["model"], down["params"], own_epochs)}, up
