"""Client optimizers: one step of local training, as torch.optim does it. Tests compare each with torch.

    sgd         p <- p - lr g,  g the slope with weight_decay p added
    momentum    v <- momentum v + g;  p <- p - lr v
    nesterov    the same v;  p <- p - lr (g + momentum v)
    adam        Kingma and Ba, ICLR 2015, with bias correction; weight decay is added to the slope
    adamw       Loshchilov and Hutter, ICLR 2019: adam; p <- (1 - lr weight_decay) p before the step

State goes in and comes out. It begins anew in every round, for it is about parameters that the server has moved since;
a method that keeps parameters on the client may keep their state there, too. A step that merely pads a client to the
longest of its chunk (live = 0) moves nothing, the state neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adam import adam

from bespoke.method import knob
from bespoke.tensors import Params, Tree, tree_map, zeros_like

Name = Literal["sgd", "momentum", "nesterov", "adam", "adamw"]

MOMENTUM, BETA2, EPS = 0.9, 0.999, 1e-8  # as torch.optim.Adam has them
IN_CACHE = 2**16  # numbers of a large leaf that are gone over at a time


@dataclass(frozen=True)
class ClientOptimizer:
    """params <- params + step(slope); `lr` is the method's own knob."""

    name: Name = knob("sgd", "sgd, momentum, nesterov, adam or adamw, as torch.optim has them; fresh in every round")
    momentum: float | None = knob(
        None, "momentum of momentum and nesterov, beta 1 of adam and adamw; 0.9 if not given", ge=0, lt=1
    )
    beta2: float = knob(BETA2, "adam, adamw: second-moment decay", ge=0, lt=1)
    eps: float = knob(EPS, "adam, adamw: epsilon; a slope far below it moves nothing", gt=0)
    weight_decay: float = knob(0.0, "adamw: decoupled from the slope; of the others: added to it", ge=0)

    def __post_init__(self) -> None:
        if self.name == "sgd" and self.momentum is not None:
            raise ValueError(f"momentum = {self.momentum:g} without its optimizer; say name = 'momentum' or 'nesterov'")
        if not self.adaptive and (self.beta2, self.eps) != (BETA2, EPS):
            raise ValueError(f"beta2 and eps are knobs of adam and adamw, and name = {self.name!r}; leave them out")

    def joined(self, momentum: float = 0.0, weight_decay: float = 0.0) -> ClientOptimizer:
        """The same with the knobs of a method that has some of its own: the short form of plain momentum and decay."""
        if momentum and self.name != "sgd":
            raise ValueError(
                f"momentum = {momentum:g} beside optimizer = {self.name!r}: give it to the optimizer, as in "
                f"optimizer = {{ name = {self.name!r}, momentum = {momentum:g} }}"
            )
        if weight_decay and self.weight_decay:
            raise ValueError(
                f"weight_decay = {weight_decay:g} beside that of the optimizer, {self.weight_decay:g}: give one of them"
            )
        if not momentum and not weight_decay:
            return self
        named = replace(self, name="momentum", momentum=momentum) if momentum else self
        return replace(named, weight_decay=weight_decay or self.weight_decay)

    @property
    def adaptive(self) -> bool:
        """Whether a step is divided by the size of the slopes so far."""
        return self.name in ("adam", "adamw")

    @property
    def stateful(self) -> bool:
        return self.name != "sgd"

    @property
    def coupled(self) -> float:
        """The weight decay that is added to the slope."""
        return 0.0 if self.name == "adamw" else self.weight_decay

    def start(self, params: Any) -> Tree:
        """The state before the first step, of a tree of parameters or of a single tensor."""
        if self.adaptive:
            return adam_start(params)
        return {"velocity": zeros_like(params)} if self.stateful else {}

    def direction(self, state: Tree, slope: Any, live: float | Tensor) -> tuple[Any, Tree]:
        """Where sgd, momentum and nesterov step to, against it."""
        if not self.stateful:
            return slope, state
        kept = MOMENTUM if self.momentum is None else self.momentum
        # a padding step must not let the velocity carry on: live = 0 keeps it as it was
        velocity = tree_map(lambda v, g: v + live * (kept * v + g - v), state["velocity"], slope)
        ahead = tree_map(lambda g, v: g + kept * v, slope, velocity) if self.name == "nesterov" else velocity
        return ahead, {"velocity": velocity}

    def step(
        self, state: Tree, params: Any, slope: Any, lr: float | Tensor, live: float | Tensor = 1.0
    ) -> tuple[Any, Tree]:
        """One step down the slope."""
        if self.coupled:
            slope = tree_map(lambda g, p: g + self.coupled * p, slope, params)
        if not self.adaptive:
            ahead, state = self.direction(state, slope, live)
            return tree_map(lambda p, along: p - lr * live * along, params, ahead), state
        if self.name == "adamw" and self.weight_decay:
            params = tree_map(lambda p: p - live * lr * self.weight_decay * p, params)
        beta1 = MOMENTUM if self.momentum is None else self.momentum
        return adam_step(state, params, slope, lr, live, self.eps, beta1, self.beta2)


SGD = ClientOptimizer()
OPTIMIZER = "how a client steps: name, and what belongs to it"  # the knob's help


def adam_start(params: Any) -> Tree:
    """Adam's state before the first step, of a tree of parameters or of a single tensor."""
    return {"first": zeros_like(params), "second": zeros_like(params), "time": torch.zeros(())}


def adam_step(
    state: Tree, params: Any, slope: Any, lr: float | Tensor, live: float | Tensor, eps: float = EPS,
    beta1: float = MOMENTUM, beta2: float = BETA2,
) -> tuple[Any, Tree]:  # fmt: skip
    """One step of Adam down the slope."""
    time = state["time"] + live
    first = tree_map(lambda m, g: m + live * (1 - beta1) * (g - m), state["first"], slope)
    second = tree_map(lambda v, g: v + live * (1 - beta2) * (g * g - v), state["second"], slope)
    unbiased = (1 - beta1**time).clamp(min=1 - beta1), (1 - beta2**time).clamp(min=1 - beta2)

    def moved(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        after: Tensor = p - live * lr * (m / unbiased[0]) / ((v / unbiased[1]).sqrt() + eps)
        return after

    return tree_map(moved, params, first, second), {"first": first, "second": second, "time": time}


def adam_in_place(
    state: Tree, params: Params, slope: Params, lr: float, start: Params, mu: float, eps: float = EPS
) -> None:
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
            fused=True, amsgrad=False, beta1=MOMENTUM, beta2=BETA2, lr=lr, weight_decay=0.0, eps=eps, maximize=False,
        )  # fmt: skip
    state["time"] += 1
