"""FedPC (Frozen): Silva et al., FedPC, 2022, Section 4: FedPC without local tuning at the end.

Trained as FedPC; then a client uses its own embedding and the contexts' as they are, and a new user that of anybody.
Nothing is computed on the device but the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bespoke.method import Batches, Batching
from bespoke.methods.fedpc import FedPC, product
from bespoke.tensors import Params, Tree


@dataclass(frozen=True)
class FedPCFrozen(FedPC):
    """FedPC whose embeddings are used as training left them."""

    tune_steps: int = field(default=1, init=False)  # no knob: nothing is tuned

    card = replace(
        FedPC.card,
        name="fedpc-frozen",
        personal="the product of its own embedding and the contexts'",
        unseen="a client that never trained begins with the embedding of a new user, the shared psi_0 or the noisy "
        "average of all users' (newcomers)",
    )

    def support_batching(self) -> Batching:
        return Batching(self.batch_size)

    def candidates(self) -> tuple[str, ...]:
        return ("anybody", "own")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        held = down["params"]
        yield product(held["anybody"], held["contexts"])
        yield product(private["user"], held["contexts"])
