"""Parameters shared by context: a leaf has one row per context, moved by the clients that used it (FedPC, 2022)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke.declarations import Observed
from bespoke.methods.parts.server_optimizer import ServerOptimizer
from bespoke.task import Task
from bespoke.tensors import Params, Tree, tree_map

Average = Literal["used", "all"]
AVERAGE = "a context's mean change: over the clients that used it, or all"


def spread(task: Task, params: Params) -> Params:
    """The same parameters for every context."""
    many = task.contexts
    return {n: p.expand(many, *p.shape[1:]).clone() if many > 1 else p for n, p in params.items()}


def occurring(task: Task, batch: Params) -> Tensor:
    """1 for each context that some row has; all rows have the one where contexts are not told apart."""
    many = task.contexts
    rows = batch["context"].long() if many > 1 else torch.zeros_like(batch["mask"]).long()
    return (F.one_hot(rows, many) * batch["mask"][:, None]).amax(0)


def step_contexts(
    server: ServerOptimizer, state: Tree, contexts: Params, change: Params, uses: Tensor, weight: Tensor,
    average: Average,
) -> tuple[Params, Tree]:  # fmt: skip
    """The server's step by the summed change; a context that nobody used stays as it is, with its moments."""
    share = uses.clamp(min=1.0) if average == "used" else weight.reshape(1)
    mean = tree_map(lambda leaf: leaf / _rows(share, leaf), change)
    moved, after = server.step(state, contexts, mean)
    used = uses > 0.5  # noise makes them fractions

    def kept(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(_rows(used, new), new, old) if new.dim() else new

    return tree_map(kept, moved, contexts), tree_map(kept, after, state)


def used_by(uses: Tensor) -> Observed:
    """How many clients used each context, for the round's log; noise may make the sums negative."""
    return {"uses": uses.clamp(min=0).round().int().tolist()}


def _rows(numbers: Tensor, leaf: Tensor) -> Tensor:
    """A number for each context, in the shape of a leaf."""
    return numbers.reshape(-1, *[1] * (leaf.dim() - 1))
