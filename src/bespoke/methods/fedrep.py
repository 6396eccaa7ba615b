"""FedRep: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021.

All clients share a body; each has a head of its own, which never leaves it. In a round client k first fits its head,
the body held, for `head_epochs` epochs, then moves the body for `epochs` epochs, the head held, and sends the body's
change; the server averages bodies. Heads are stale by the rounds that a client missed, so in the end every client fits
its head to the final body once more (`adapt_epochs`), as the authors' code does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bespoke.declarations import Card, Choosing, Needs
from bespoke.method import Batches, Batching, Cohort, Setting, knob
from bespoke.methods.fedavg import FedAvg
from bespoke.methods.parts.descend import descend
from bespoke.methods.parts.heads import body_and_head
from bespoke.task import Task
from bespoke.tensors import Params, Tree


@dataclass(frozen=True)
class FedRep(FedAvg):
    """A shared body, and a head of its own for every client."""

    steps_per_round: None = field(default=None, init=False)  # no knob: heads and body have epochs of their own
    head_epochs: int = knob(10, "epochs in which a client fits its head in a round", ge=1)
    head_lr: float | None = knob(None, "learning rate of heads; as lr if not given", gt=0)
    adapt_epochs: int = knob(10, "epochs in which every client fits its head to the final body", ge=1)

    card = Card(
        "fedrep",
        "Collins et al., ICML 2021",
        personal="the shared body with a head of its own",
        unseen="a client that never trained fits a head to the shared body on its own rows",
        tunes={"lr": (0.01, 0.03, 0.1, 0.3)},
    )
    downlink = {"params": "the shared body"}
    private = {"head": "the client's own last layer"}
    choosing = Choosing(keep_shared=False)
    needs = Needs(last=True)

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        body, head = body_and_head(self.task, params)
        return {**super().init_server(body, setting), "head": head}  # the head of clients without one

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        return {**super().server_round(server, cohort), "head": server["head"]}

    def params(self, server: Tree) -> Params:
        return {**server["params"], **server["head"]}

    def batching(self) -> Batching:
        # rows in a new order every round, not every epoch: what the body makes of them is computed once for the head
        epochs = self.head_epochs + (0 if self.task.network.is_linear else self.epochs)  # a linear model has no body
        return Batching(
            self.batch_size, epochs, drop_last=self.drop_last, shuffle=self.shuffle,
            reshuffle=False,
        )  # fmt: skip

    def init_private(self, params: Params) -> Tree:
        return {"head": body_and_head(self.task, params)[1]}

    def fit(self, body: Params, head: Params, batches: Batches) -> Params:
        """The head after these batches, with the body fixed."""
        above = self.task.above_features()
        rate = self.lr if self.head_lr is None else self.head_lr
        return descend(
            above, head, _Represented(self.task, {**body, **head}, batches), lr=self.schedule.of(rate, batches),
            optimizer=self.stepper,
        )  # fmt: skip

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        body = down["params"]
        head = self.fit(body, private["head"], batches.part(0, self.head_epochs))
        moved = body
        if body:
            rest = batches.part(self.head_epochs, self.head_epochs + self.epochs)
            trained = descend(
                self.task, {**body, **head}, rest, lr=self.schedule.of(self.lr, rest), optimizer=self.stepper,
                only=tuple(body),
            )  # fmt: skip
            moved = {name: trained[name] for name in body}
        return {"head": head}, self.change(moved, body, batches)

    def support_batching(self) -> Batching:
        return Batching(self.batch_size, self.adapt_epochs, drop_last=self.drop_last, reshuffle=False)

    def candidates(self) -> tuple[str, ...]:
        return ("first head", "own head")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        yield {**down["params"], **private["head"]}  # before it is fitted to this body
        yield {**down["params"], **self.fit(down["params"], private["head"], support)}


class _Represented:
    """Batches whose rows are the body's features; a repeated order is computed once."""

    def __init__(self, task: Task, params: Params, batches: Batches) -> None:
        self.task, self.params, self.batches = task, params, batches
        self.known: dict[int, Params] = {}
        self.lap = len(batches.part(0, 1))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, step: int) -> Params:
        place = step % self.lap
        if place not in self.known:
            batch = self.batches[place]
            self.known[place] = {**batch, "x": self.task.features(self.params, batch)}
        return self.known[place]

    def live(self, step: int) -> float | Tensor:
        return self.batches.live(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)
