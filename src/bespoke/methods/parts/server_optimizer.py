"""Server optimizers: the aggregated update as a pseudo-gradient (Reddi et al., Adaptive Federated Optimization).

They are pure functions of (state, params, update), so that the state lies in the checkpoint like everything else; tests
hold them against torch.optim. Implementations differ in ways that papers do not print, selectable as `convention`:

- `torch`: torch.optim, as FLSim uses it: Adam with bias correction, sqrt(v_hat) + eps; momentum m <- b m + d.
- `tff`: TFF and Keras: Adam with the correction folded into the rate, lr sqrt(1 - b2^t)/(1 - b1^t) m/(sqrt(v) + eps).
- `reddi`: the paper: no bias correction, second moment starts at eps^2.
- `motley-silo`: Motley's cross-silo code: momentum m <- b m + (1 - b) d; Adam without bias correction.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bespoke.errors import UserError
from bespoke.method import knob
from bespoke.registry import Registry
from bespoke.tensors import Params, Tree, is_buffer, tree_map, without_buffers, zeros_like

Name = Literal["sgd", "momentum", "adam", "yogi", "adagrad"]
Convention = Literal["torch", "tff", "reddi", "motley-silo"]


def _checked(found: Any, where: str) -> type[Any]:
    """A server optimizer of somebody else: a frozen dataclass of its knobs, with `init` and `step` as below."""
    fits = isinstance(found, type) and is_dataclass(found) and callable(getattr(found, "init", None))
    if not fits or not callable(getattr(found, "step", None)):
        raise UserError(
            f"{where} is not a server optimizer: it must be a frozen dataclass of its knobs with init(params) -> state "
            f"and step(state, params, update) -> (params, state), and is {found!r}"
        )
    kind: type[Any] = found
    return kind


OPTIMIZERS: Registry[type[Any]] = Registry("optimizer", "bespoke.optimizers", {}, _checked)


@dataclass(frozen=True)
class ServerOptimizer:
    """params <- params + step(update), where update is the cohort's mean change. Buffers become their mean."""

    others: ClassVar[Registry[type[Any]]] = OPTIMIZERS  # what `name` may be besides

    name: Name = knob("sgd", "sgd (FedAvg), momentum (FedAvgM), adam (FedAdam), yogi (FedYogi), adagrad (FedAdagrad)")
    lr: float = knob(1.0, "server learning rate", gt=0)
    momentum: float = knob(0.9, "first-moment decay (beta 1) of momentum, adam and yogi", ge=0, lt=1)
    beta2: float = knob(0.99, "second-moment decay of adam and yogi (0.999 in FLSim)", ge=0, lt=1)
    eps: float = knob(1e-3, "adaptivity constant (1e-8 in FLSim, 1e-3 in the paper)", gt=0)
    weight_decay: float = knob(0.0, "adds weight_decay x params to the pseudo-gradient (1e-5 in FLSim)", ge=0)
    convention: Convention = knob("torch", "bias correction and epsilon of: torch (FLSim), tff, reddi, motley-silo")

    def init(self, params: Params) -> Tree:
        if self.name == "sgd":
            return {}
        params = without_buffers(params)
        state: Tree = {"moment": zeros_like(params)} if self.name != "adagrad" else {}
        if self.name in ("adam", "yogi", "adagrad"):
            start = self.eps**2 if self.convention == "reddi" else 0.0
            state["second"] = tree_map(lambda p: torch.full_like(p, start), params)
        return {**state, "time": torch.zeros((), dtype=torch.int64)}

    def step(self, state: Tree, params: Params, update: Params) -> tuple[Params, Tree]:
        buffers = {name: p + update[name] for name, p in params.items() if is_buffer(name)}
        if not buffers:
            return self._step(state, params, update)
        moved, state = self._step(state, without_buffers(params), without_buffers(update))
        return {name: buffers[name] if name in buffers else moved[name] for name in params}, state

    def _step(self, state: Tree, params: Params, update: Params) -> tuple[Params, Tree]:
        if self.weight_decay:
            update = {name: u - self.weight_decay * params[name] for name, u in update.items()}
        if self.name == "sgd":
            return {name: torch.add(p, update[name], alpha=self.lr) for name, p in params.items()}, {}
        time = state["time"] + 1
        new: Tree = {"time": time}
        if "moment" in state:
            fresh = 1.0 if self.name == "momentum" and self.convention != "motley-silo" else 1 - self.momentum
            new["moment"] = {n: self.momentum * m + fresh * update[n] for n, m in state["moment"].items()}
        if "second" in state:
            new["second"] = {n: self._second(v, update[n]) for n, v in state["second"].items()}
        moved = {}
        for n, p in params.items():
            moment = new["moment"][n] if "moment" in new else update[n]
            moved[n] = p + self.lr * (self._adapted(moment, new["second"][n], int(time)) if "second" in new else moment)
        return moved, new

    def _second(self, v: Tensor, update: Tensor) -> Tensor:
        square = update * update
        if self.name == "adagrad":
            return v + square
        if self.name == "yogi":
            return v - (1 - self.beta2) * square * torch.sign(v - square)
        return self.beta2 * v + (1 - self.beta2) * square

    def _adapted(self, moment: Tensor, second: Tensor, time: int) -> Tensor:
        if self.name == "adagrad" or self.convention in ("reddi", "motley-silo"):
            return moment / (second.sqrt() + self.eps)
        first_bias, second_bias = 1 - self.momentum**time, 1 - self.beta2**time
        if self.convention == "tff":
            step: Tensor = moment * (second_bias**0.5 / first_bias) / (second.sqrt() + self.eps)
            return step
        return (moment / first_bias) / ((second / second_bias).sqrt() + self.eps)
