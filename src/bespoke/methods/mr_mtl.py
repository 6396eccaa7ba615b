"""MR-MTL: mean-regularized multi-task learning; Liu et al., On Privacy and Personalization in Cross-Silo FL, 2022.

There are only private models v_k, and their mean w: client k lowers f_k(v) + (lam / 2) ||v - w||^2 and sends v_k; the
server's next w is the mean of what was sent. lam = 0 is local training, and a large lam makes all v_k one model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bespoke.declarations import stackable, stacks
from bespoke.method import Batches, Batching
from bespoke.methods.parts.private_model import PrivateModel
from bespoke.methods.parts.solved import WHOLE, nothing_descends
from bespoke.tensors import Tree


@dataclass(frozen=True)
class MRMTL(PrivateModel):
    """A private model on each client, pulled to the mean of all of them."""

    card = replace(
        PrivateModel.card,
        name="mr-mtl",
        title="MR-MTL",
        paper="Liu et al., NeurIPS 2022; Evgeniou and Pontil, KDD 2004",
        personal="a private model, trained on the client's own rows and pulled to the mean of all private models",
        tunes={"lr": (0.01, 0.03, 0.1, 0.3), "lam": (0.01, 0.1, 1.0)},
        tunes_exact={"lam": (0.001, 0.01, 0.1, 1.0, 10.0)},
    )
    downlink = {"params": "the mean of the clients' models"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver == "exact":
            nothing_descends(self.optimizer, self.schedule)

    def batching(self) -> Batching:
        return WHOLE if self.solver == "exact" else super().batching()

    @stackable(lambda method: stacks(method.pulled))
    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        own = self.pulled(private.get("model") or down["params"], down["params"], batches)
        # v_k - w instead of v_k: the same mean, and clipping then bounds the distance of a client from the others
        return dict.fromkeys(private, own), self.change(own, down["params"], batches)
