"""An ensemble of k FedAvg models: what clustering has to beat, and its warm start (Wu et al., Motley, 2022, 4.2).

k models w_1, ..., w_k are trained side by side as in FedAvg, from k different starts and each on batch orders of its
own. A client uses the one with the lowest loss on its rows. The models share the cohort of a round; k separate runs of
FedAvg would draw k cohorts. Handed on to `hypcluster` as the next stage, they are its warm start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from bespoke.declarations import Card, Choosing, Handoff, Stacked
from bespoke.method import Batches, Batching, Cohort, Setting, knob
from bespoke.methods.fedavg import FedAvg
from bespoke.tensors import Params, Tree, scale, stack, subtract, take


@dataclass(frozen=True)
class Ensemble(FedAvg):
    """Several FedAvg models side by side; each client uses the one that fits it best."""

    k: int = knob(2, "how many models", ge=2)
    select: Literal["train", "validation"] = knob(
        "train", "on which of its rows a client picks its model in the end: those it adapts on, or validation rows"
    )

    card = Card(
        "ensemble",
        "Wu et al., Motley, 2022, Section 4.2",
        personal="that of the k models with the lowest loss on the client's own rows",
        unseen="a client that never trained picks one of the models on its own rows, like all others",
        tunes=FedAvg.card.tunes,
    )
    downlink = {"params": "the k models"}

    @property
    def handoff(self) -> Handoff:
        return Handoff(Stacked(self.k), takes=(Stacked(self.k),))

    @property
    def choosing(self) -> Choosing:
        return Choosing("support" if self.select == "train" else "client")

    def draws(self, seed: int) -> list[Params]:
        return [self.task.fresh(seed + place) for place in range(self.k)]

    def starts(self, params: Params, seed: int) -> Params:
        """k different models, stacked: the given ones, or `params` and draws.

        A model of zeros is replaced by a draw: beside draws it would fit nearly every client best, and win them all.
        """
        models = self.draws(seed)
        if all(params[name].shape == (self.k, *leaf.shape) for name, leaf in models[0].items()):
            return params
        if any(bool(leaf.any()) for leaf in params.values()):
            models[0] = params
        return stack(models)

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        models = self.starts(params, setting.seed)
        return {"params": models, "optimizer": self.optimizers(models)}

    def optimizers(self, models: Params) -> Tree:
        """The state of a server optimizer for each model, stacked."""
        return stack([self.server.init(take(models, place)) for place in range(self.k)])

    def batching(self) -> Batching:
        # a stretch of epochs for each model; so many steps, where they are counted, are taken by each
        uses = self.k if self.steps_per_round else 1
        return replace(super().batching(), epochs=self.k * self.epochs, uses=uses)

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        models, weight = down["params"], self.weight(batches)
        stretches = enumerate(batches.epochs(self.epochs))
        trained = stack([self.train(take(models, place), own) for place, own in stretches])
        return private, {"delta": scale(subtract(trained, models), weight), "weight": weight}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        weights = cohort.sums["weight"].expand(self.k)
        params, optimizer = self.step(server["params"], server["optimizer"], cohort.sums["delta"], weights)
        return {"params": params, "optimizer": optimizer}

    def step(self, models: Params, optimizers: Tree, delta: Params, weights: Tensor) -> tuple[Params, Tree]:
        """Moves each model by its own mean change through its own optimizer; an untrained model stays."""
        moved = []
        for place in range(self.k):
            model, state = take(models, place), take(optimizers, place)
            if weights[place] > 0:  # a noisy sum of weights may be next to nothing; a true one is at least one client's
                mean = scale(take(delta, place), 1.0 / weights[place].clamp(min=1.0))
                model, state = self.server.step(state, model, mean)
            moved.append((model, state))
        params, states = (stack(list(side)) for side in zip(*moved))
        return params, states

    def candidates(self) -> tuple[str, ...]:
        return tuple(f"model {place}" for place in range(self.k))

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        for place in range(self.k):
            yield take(down["params"], place)
