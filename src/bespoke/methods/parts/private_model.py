"""A private model on every client, pulled towards the shared model: shared by Ditto and MR-MTL.

Client k keeps v_k and lowers f_k(v) + (lam / 2) ||v - w||^2, w being the shared model it was sent. A client that never
trained holds no v yet: it makes one in the same way, from w, on the rows it adapts on. With `solver = "exact"` v_k is
the minimum in the last layer: a function of w and the client's rows, of which nothing has to be kept between rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bespoke.declarations import Choosing, stackable
from bespoke.method import Batches, Batching, knob
from bespoke.methods.fedavg import FedAvg
from bespoke.methods.parts.descend import descend
from bespoke.methods.parts.solved import SOLVER, WHOLE, Solver, solved
from bespoke.tensors import Params, Tree


@dataclass(frozen=True)
class PrivateModel(FedAvg):
    """A private model beside the shared one. Subclasses say how a round trains the two."""

    lam: float = knob(1.0, "strength of the pull of the private model to the shared one", ge=0)
    solver: Solver = knob("sgd", SOLVER)
    adapt_epochs: int = knob(10, "epochs in which a client that never trained makes its private model", ge=1)

    card = replace(
        FedAvg.card,
        unseen="a client that never trained makes its model on its own rows, from the shared one and pulled to it",
    )
    private = {"model": "the client's own model"}
    choosing = Choosing(keep_shared=False)

    @property
    def own_lr(self) -> float:
        return self.lr

    @stackable(lambda method: method.solver == "sgd" and method.plain)
    def pulled(self, start: Params, shared: Params, batches: Batches) -> Params:
        """A private model after some epochs, or the best there is, kept near the shared one."""
        if self.solver == "exact":  # lam is that of a mean over rows, a pull counts rows
            return solved(self.task, shared, batches.rows(), self.lam * batches.examples)
        return descend(
            self.task, start, batches, lr=self.schedule.of(self.own_lr, batches), optimizer=self.stepper,
            anchor=shared, pull=self.lam,
        )  # fmt: skip

    def init_private(self, params: Params) -> Tree:
        return {} if self.solver == "exact" else {"model": params}

    def support_batching(self) -> Batching:
        if self.solver == "exact":
            return WHOLE
        return Batching(self.batch_size, self.adapt_epochs, drop_last=self.drop_last)

    def newcomer(self, down: Tree, private: Tree, support: Batches) -> Tree:
        if self.solver == "exact":
            return private
        return {"model": self.pulled(down["params"], down["params"], support)}

    def candidates(self) -> tuple[str, ...]:
        return ("global", "personal")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        yield down["params"]
        yield self.pulled(down["params"], down["params"], support) if self.solver == "exact" else private["model"]
