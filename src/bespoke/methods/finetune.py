"""FedAvg + fine-tuning: each client trains the shared model further on its own data (Motley, Section 3.1).

It has no rounds of its own: as a stage after FedAvg (or any other method) it turns the global model w into candidates
w, w_1, ..., w_E, the models after each epoch, for every learning rate. Which of them is used is chosen on validation
data, for all clients together or by each client for itself; epoch 0, the shared model itself, is one of the candidates.
After a stage that hands on a model for each group, w is that of the client's group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from bespoke.method import Batches, Batching, Method, Setting, knob
from bespoke.methods.descend import descend
from bespoke.methods.grouped import stacked
from bespoke.tensors import Params, Tree


@dataclass(frozen=True)
class FineTune(Method):
    """The shared model, trained further on the client's own data."""

    lrs: tuple[float, ...] = knob(
        (0.01, 0.03, 0.1), "learning rates to try; the best is chosen on validation data", gt=0
    )
    epochs: int = knob(10, "most epochs; the best is chosen on validation data", ge=1)
    every: int = knob(1, "epochs between two candidates", ge=1)
    batch_size: int = knob(32, "batch size", ge=1)
    drop_last: bool = knob(False, "leave out the last, partial batch")
    reshuffle: bool = knob(False, "draw the batches anew for every epoch (not so in Motley's cross-device code)")
    part: Literal["all", "last"] = knob("all", "what is trained: all layers, or the last one")
    choose: Literal["global", "client", "last"] = knob(
        "global", "who chooses epoch and learning rate: all clients together, each client, or nobody (the last epoch)"
    )
    keep_shared: bool = knob(True, "epoch 0, the shared model, is a candidate too (not so in Motley's cross-silo code)")

    name = "finetune"
    paper = "Wu et al., Motley, 2022, Section 3.1"
    personal = "the shared model after some epochs on the client's own rows"
    unseen = "a client that never trained fine-tunes the shared model on its own rows"
    trains = False
    after = "fedavg"
    starts_from: ClassVar[tuple[int, ...]] = (1, 0)

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        # the models of groups: each client starts from its own group's
        return {"params": params, **({"groups": setting.groups} if stacked(self.task, params) else {})}

    def groups(self, server: Tree) -> Tensor | None:
        return server.get("groups")

    def support_batching(self) -> Batching:
        return Batching(
            self.batch_size, self.epochs, reshuffle=self.reshuffle, drop_last=self.drop_last, uses=len(self.lrs)
        )

    def candidates(self) -> tuple[str, ...]:
        epochs = self.epochs_kept()
        return ("epoch 0", *(f"lr {lr:g}, epoch {e}" for lr in self.lrs for e in epochs))

    def epochs_kept(self) -> list[int]:
        return [e for e in range(1, self.epochs + 1) if e % self.every == 0 or e == self.epochs]

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        yield down["params"]
        only = getattr(self.task, "last_layer", ()) if self.part == "last" else ()
        kept = set(self.epochs_kept())
        for lr in self.lrs:
            params = down["params"]
            for epoch, batches in enumerate(support.epochs(), start=1):
                params = descend(self.task, params, batches, lr=lr, only=only)
                if epoch in kept:
                    yield params
