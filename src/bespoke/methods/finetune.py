"""FedAvg + fine-tuning: each client trains the shared model further on its own data (Motley, Section 3.1).

It has no rounds of its own: as a stage after FedAvg (or any other method) it turns the global model w into candidates
w, w_1, ..., w_E, the models after each epoch, for every learning rate. Which of them is used is chosen on validation
data, for all clients together or by each client for itself; epoch 0, the shared model itself, is one of the candidates.
After a stage that hands on a model for each group, w is that of the client's group.

With `solver = "exact"` there are no rates and epochs: a candidate minimises sum_i loss_i(v) + pull / 2 ||v - w||^2 in
the last layer (of a linear model: all there is), for each of `pulls` and, for the intercept, of `intercepts`.

Two ways to keep more of what the shared model knows, which Motley asks for: `blend` adds the models between the shared
and the tuned one as candidates, w + b (w_e - w) (WiSE-FT: Wortsman et al., CVPR 2022); `part = "last-then-all"` trains
the last layer in the first half of the epochs and all layers in the second (LP-FT: Kumar et al., ICLR 2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from bespoke.declarations import Card, Choosing, Handoff, Needs, One, PerGroup
from bespoke.method import Batches, Batching, Method, Setting, knob
from bespoke.methods.parts.client_optimizer import OPTIMIZER, ClientOptimizer
from bespoke.methods.parts.descend import descended
from bespoke.methods.parts.grouped import stacked
from bespoke.methods.parts.schedule import SCHEDULE, Schedule
from bespoke.methods.parts.solved import SOLVER, WHOLE, Solver, nothing_descends, solved
from bespoke.tensors import Params, Tree, add_scaled, subtract, take

FREE, BOUND = 1e-6, 1e6  # pulls, in rows, that leave a coefficient free or hold it fixed


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
    part: Literal["all", "last", "last-then-all"] = knob(
        "all", "what is trained: all layers, the last one, or the last one in the first half of the epochs, then all"
    )
    blend: tuple[float, ...] = knob(
        (1.0,), "parts of the way from the shared to the tuned model to try; 1 is the tuned model", gt=0, le=1
    )
    choose: Literal["global", "client", "size", "last", "auto"] = knob(
        "global",
        "who chooses among candidates: all clients together, each client, those with about as many examples together, "
        "nobody (the last one), or whichever of the first two is better on validation rows (auto)",
    )
    keep_shared: bool = knob(True, "epoch 0, the shared model, is a candidate too (not so in Motley's cross-silo code)")
    optimizer: ClientOptimizer = field(default_factory=ClientOptimizer, metadata={"doc": OPTIMIZER})
    schedule: Schedule = field(default_factory=Schedule, metadata={"doc": f"{SCHEDULE}; its rounds are epochs here"})
    solver: Solver = knob("sgd", SOLVER)
    pulls: tuple[float, ...] = knob(
        (1e-6, 1e-4, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4), "exact: pulls to the shared model to try, in rows", gt=0
    )
    intercepts: tuple[float, ...] = knob((1e-3, 0.1, 1.0, 10.0, 1e3), "exact: the same for the intercept", gt=0)

    card = Card(
        "finetune",
        "Wu et al., Motley, 2022, Section 3.1",
        personal="the shared model after some epochs on the client's own rows",
        unseen="a client that never trained fine-tunes the shared model on its own rows",
        after="fedavg",
    )
    handoff = Handoff(takes=(One(), PerGroup()))

    def __post_init__(self) -> None:
        if self.solver == "exact":
            nothing_descends(self.optimizer, self.schedule)
        self.schedule.within(self.epochs, "epochs")  # refuses wrong combinations

    @property
    def needs(self) -> Needs:
        return Needs(last=self.part != "all")

    @property
    def choosing(self) -> Choosing:
        return Choosing(self.choose, self.keep_shared)

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        # the models of groups: each client starts from its own group's
        return {"params": params, **({"groups": setting.groups} if stacked(self.task, params) else {})}

    def groups(self, server: Tree) -> Tensor | None:
        return server.get("groups")

    def support_batching(self) -> Batching:
        if self.solver == "exact":
            return replace(WHOLE, uses=len(self.pulls) * len(self.intercepts))
        return Batching(
            self.batch_size, self.epochs, reshuffle=self.reshuffle, drop_last=self.drop_last, uses=len(self.lrs)
        )

    def candidates(self) -> tuple[str, ...]:
        if self.solver == "exact":
            tuned = [f"pull {p:g}, intercept {i:g}" for i in self.intercepts for p in self.pulls]
        else:
            tuned = [f"lr {lr:g}, epoch {e}" for lr in self.lrs for e in self.epochs_kept()]
        if self.blend != (1.0,):
            tuned = [f"{name}, blend {part:g}" for name in tuned for part in self.blend]
        return ("epoch 0", *tuned)

    def epochs_kept(self) -> list[int]:
        return [e for e in range(1, self.epochs + 1) if e % self.every == 0 or e == self.epochs]

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        shared = down["params"]
        yield shared
        tuned = self.fits(shared, support.rows()) if self.solver == "exact" else self.epochs_of(shared, support)
        for params in tuned:
            for part in self.blend:
                yield params if part == 1 else add_scaled(shared, subtract(params, shared), part)

    def epochs_of(self, shared: Params, support: Batches) -> Iterator[Params]:
        """The models after the epochs that are kept, for every learning rate."""
        kept = set(self.epochs_kept())
        early = {"all": 0, "last": self.epochs, "last-then-all": self.epochs // 2}[self.part]
        schedule = self.schedule.within(self.epochs)
        for lr in self.lrs:
            params, state = shared, None
            for epoch, batches in enumerate(support.epochs(), start=1):
                if epoch == early + 1:  # other layers move now
                    state = None
                params, state = descended(
                    self.task, params, state, batches, lr=schedule.of(lr, batches, epoch), optimizer=self.optimizer,
                    only=self.task.last_layer if epoch <= early else (),
                )  # fmt: skip
                if epoch in kept:
                    yield params

    def widened(self, candidate: str) -> dict[str, object]:
        """Knobs with more values, if the chosen one was at the edge of those tried; else empty."""
        chosen = dict(part.rsplit(" ", 1) for part in candidate.split(", "))
        names = {"pull": "pulls", "intercept": "intercepts"} if self.solver == "exact" else {"lr": "lrs"}
        wider: dict[str, object] = {}
        for word, name in names.items():
            values = sorted(getattr(self, name))
            if len(values) > 1 and chosen.get(word) == f"{values[0]:g}" and values[0] > FREE:
                wider[name] = (max(float(f"{values[0] ** 2 / values[1]:.6g}"), FREE), *values)
            elif len(values) > 1 and chosen.get(word) == f"{values[-1]:g}" and values[-1] < BOUND:
                wider[name] = (*values, float(f"{values[-1] ** 2 / values[-2]:.6g}"))
        if self.solver == "sgd" and chosen.get("epoch") == str(self.epochs):
            wider |= {"epochs": 2 * self.epochs, "every": 2 * self.every}
        return wider

    def fits(self, shared: Params, rows: Params) -> Iterator[Params]:
        """The last layer fitted to these rows under every pull."""
        if self.task.linear().task.kernel_of() == "squares":  # closed form, so all at once
            each = torch.tensor([[i, p] for i in self.intercepts for p in self.pulls], dtype=torch.float64)
            fitted = torch.func.vmap(lambda pair: solved(self.task, shared, rows, pair[1], pair[0]))(each)
            yield from (take(fitted, place) for place in range(len(each)))
            return
        for intercept in self.intercepts:
            found: dict[float, Params] = {}
            start = shared
            for pull in sorted(self.pulls, reverse=True):  # from strong to weak, each from the one before
                start = found[pull] = solved(self.task, shared, rows, pull, intercept, start)
            yield from (found[pull] for pull in self.pulls)
