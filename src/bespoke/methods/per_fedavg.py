"""Per-FedAvg: Fallah et al., Personalized Federated Learning: A Model-Agnostic Meta-Learning Approach, NeurIPS 2020.

The shared model w is to be good after one step: it minimises the mean of F_k(w) = f_k(w - alpha grad f_k(w)). A local
step takes independent batches D, D', D'' and g = grad f(w - alpha grad f(w; D); D'):

    first-order (FO):    w <- w - beta g
    hessian-free (HF):   w <- w - beta (g - alpha (grad f(w + delta g; D'') - grad f(w - delta g; D'')) / (2 delta))

In code: alpha, beta = lr, delta = probe. A client's model is w after one or more steps of alpha on its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from bespoke.declarations import Card, Choosing, Needs, stackable, stacks
from bespoke.method import Batches, Batching, knob
from bespoke.methods.parts.descend import descend
from bespoke.methods.parts.schedule import at
from bespoke.methods.parts.shared_model import SharedModel
from bespoke.tensors import Params, Tree, add_scaled, subtract

WHOLE = 2**31  # a batch that holds all rows


@dataclass(frozen=True)
class PerFedAvg(SharedModel):
    """A shared model that is trained to be good after a few steps on a client's own rows."""

    lr: float = knob(0.1, "learning rate of the shared model (beta)", gt=0)
    alpha: float = knob(0.03, "learning rate of the step from the shared model to a client's own", gt=0)
    variant: Literal["first-order", "hessian-free"] = knob(
        "first-order", "the second derivative in the gradient: left out, or by a difference of gradients"
    )
    probe: float = knob(0.01, "hessian-free: how far along the gradient the difference is taken (delta)", gt=0)
    steps: int = knob(5, "most steps to a client's own model; how many is chosen on validation data", ge=1)

    card = Card(
        "per-fedavg",
        "Fallah et al., NeurIPS 2020",
        "Per-FedAvg",
        personal="the shared model after some steps on the client's own rows",
        unseen="a client that never trained takes the same steps from the shared model on its own rows",
        tunes={"lr": (0.01, 0.03, 0.1, 0.3), "alpha": (0.01, 0.03, 0.1)},
    )
    choosing = Choosing(keep_shared=False)
    needs = Needs(still=True)

    @property
    def draws(self) -> int:
        return 2 if self.variant == "first-order" else 3

    def batching(self) -> Batching:
        # D, D' and D'' are the same step's batches of epochs shuffled apart: as many for every client, however few rows
        # (a round in steps goes on to the next batches instead)
        steps = self.draws * (self.steps_per_round or 0)
        return replace(super().batching(), epochs=self.draws * self.epochs, steps=steps)

    def slope(self, params: Params, batch: Batches) -> Params:
        """The gradient on a batch; zero if the batch only pads."""
        return subtract(params, descend(self.task, params, batch, lr=1.0))

    @stackable()
    def meta_step(self, params: Params, drawn: list[Batches], lr: float | Tensor) -> Params:
        """One step of the shared model on batches D, D' and, where they are needed, D''."""
        first, second, *third = drawn
        slope = self.slope(descend(self.task, params, first, lr=self.alpha), second)
        if third:
            ahead, behind = (self.slope(add_scaled(params, slope, far), third[0]) for far in (self.probe, -self.probe))
            slope = add_scaled(slope, subtract(ahead, behind), -self.alpha / (2 * self.probe))
        return add_scaled(params, slope, -lr)

    @stackable(lambda method: stacks(method.meta_step) and method.schedule.steady)
    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        params, apart = down["params"], self.draws if self.steps_per_round else 1
        lr = self.schedule.of(self.lr, batches if self.steps_per_round else batches.part(0, self.epochs))
        for place, drawn in enumerate(self.drawn(batches)):
            params = self.meta_step(params, drawn, at(lr, place * apart))
        return private, self.change(params, down["params"], batches)

    def drawn(self, batches: Batches) -> Iterator[list[Batches]]:
        """The batches D, D' and, where they are needed, D'' of every step."""
        if self.steps_per_round:
            for begin in range(0, len(batches), self.draws):
                yield [batches.again(begin + place, 1) for place in range(self.draws)]
            return
        for stretch in batches.epochs(self.draws):
            apart = list(stretch.epochs())
            for step in range(len(apart[0])):
                yield [epoch.again(step, 1) for epoch in apart]

    def support_batching(self) -> Batching:
        return Batching(WHOLE, self.steps, shuffle=False)  # a step takes the gradient of all rows, as the paper's f_k

    def candidates(self) -> tuple[str, ...]:
        return ("global", *(f"step {number}" for number in range(1, self.steps + 1)))

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        params = down["params"]
        yield params
        for once in support.epochs():
            params = descend(self.task, params, once, lr=self.alpha)
            yield params
