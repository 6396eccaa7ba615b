"""Local training by Adam (Kingma and Ba, 2015): what FedPC's methods have in common.

In a round a client takes K steps on batches of its own; what it shares is pulled to the round's start by FedProx's
term. The moments are state that goes in and comes out: those of a shared part begin anew in every round, those of a
private part may stay on the client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from bespoke.method import Batching, Method, Reveal, knob
from bespoke.methods.server_optimizer import ServerOptimizer
from bespoke.tensors import Params, Tree, tree_map, zeros_like

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # as torch.optim.Adam has them
IN_CACHE = 2**16  # numbers of a large leaf that are gone over at a time


def adam_start(params: Any) -> Tree:
    """Adam's state before the first step, of a tree of parameters or of a single tensor."""
    return {"first": zeros_like(params), "second": zeros_like(params), "time": torch.zeros(())}


def adam_step(state: Tree, params: Any, slope: Any, lr: float, live: float | Tensor) -> tuple[Any, Tree]:
    """One step down the slope; a step that merely pads (live = 0) moves nothing, the moments neither."""
    time = state["time"] + live
    first = tree_map(lambda m, g: m + live * (1 - BETA1) * (g - m), state["first"], slope)
    second = tree_map(lambda v, g: v + live * (1 - BETA2) * (g * g - v), state["second"], slope)
    unbiased = (1 - BETA1**time).clamp(min=1 - BETA1), (1 - BETA2**time).clamp(min=1 - BETA2)

    def moved(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return p - live * lr * (m / unbiased[0]) / ((v / unbiased[1]).sqrt() + EPS)

    return tree_map(moved, params, first, second), {"first": first, "second": second, "time": time}


def adam_in_place(state: Tree, params: Params, slope: Params, lr: float, start: Params, mu: float) -> None:
    """The same step of plain tensors, pulled to `start`, in the memory of state, parameters and slope.

    A head has millions of numbers, and a new tensor for each term of the formula takes twenty times as long.
    """
    for name, p in params.items():
        if mu:
            parts = (leaf.view(-1).split(IN_CACHE) for leaf in (slope[name], p, start[name]))
            for g, here, there in zip(*parts):
                g.add_(here - there, alpha=mu)
        adam(
            [p], [slope[name]], [state["first"][name]], [state["second"][name]], [], [state["time"].clone()],
            fused=True, amsgrad=False, beta1=BETA1, beta2=BETA2, lr=lr, weight_decay=0.0, eps=EPS, maximize=False,
        )  # fmt: skip
    state["time"] += 1


def server_adam(lr: float = 0.01) -> ServerOptimizer:
    return ServerOptimizer("adam", lr, beta2=BETA2, eps=EPS)


SERVER = "server optimizer: name, lr and what belongs to it"


@dataclass(frozen=True)
class LocalAdam(Method):
    """K local steps of Adam, and a server optimizer for the clients' mean change."""

    lr: float = knob(0.001, "learning rate of the local Adam", gt=0)
    steps: int = knob(10, "local steps per round", ge=2)
    batch_size: int = knob(15, "texts of a step", ge=1)
    mu: float = knob(1.0, "strength of the pull of what is shared to the round's start (FedProx)", ge=0)
    tokens: int = knob(1, "embeddings of the prefix before a text", ge=1)
    server: ServerOptimizer = field(default_factory=server_adam, metadata={"doc": SERVER})

    changes = {"delta": "weight"}

    @property
    def uplink(self) -> dict[str, Reveal]:  # type: ignore[override]
        return {"delta": Reveal.SUM, "weight": Reveal.COUNT}

    def batching(self) -> Batching:
        return Batching(self.batch_size, steps=self.steps)

    def begun(self, params: Params) -> Params:
        """The parameters at the start, with as many embeddings in a prefix as are wanted."""
        prefix = params.get("prefix")
        if prefix is None or prefix.shape[-2] == self.tokens:
            return params
        return {**params, "prefix": prefix[..., :1, :].expand(*prefix.shape[:-2], self.tokens, -1).clone()}

    def slope(self, loss: Any, params: Params) -> Params:
        task: Any = self.task  # more than the contract asks of a task: slopes
        return task.slopes(lambda p: (loss(p),), params)[0]


def pulled(slope: Tree, params: Tree, start: Tree, mu: float) -> Tree:
    """The slope with FedProx's term: mu (params - start)."""
    return tree_map(lambda g, p, s: g + mu * (p - s), slope, params, start)
