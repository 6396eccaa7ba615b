"""Fits of the last layer to convergence, for methods whose knob `solver` is "exact": see models/linear_problem.py."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from bespoke.method import Batching
from bespoke.methods.parts.client_optimizer import ClientOptimizer
from bespoke.methods.parts.schedule import Schedule
from bespoke.task import Task
from bespoke.tensors import Params

Solver = Literal["sgd", "exact"]
SOLVER = "sgd: gradient steps at a learning rate; exact: the last layer is fitted to convergence, the rest held"
WHOLE = Batching(size=2**31)  # all of a client's rows at once


def nothing_descends(optimizer: ClientOptimizer, schedule: Schedule) -> None:
    """Refuse knobs of steps where a model is fitted to convergence and no step is taken."""
    given = [] if optimizer == ClientOptimizer() else [f"optimizer = {optimizer.name!r}"]
    given += [] if schedule.constant else [f"schedule = {schedule.name!r}"]
    if given:
        raise ValueError(
            f"{' and '.join(given)} beside solver = 'exact', which takes no steps; leave it out, or say solver = 'sgd'"
        )


def solved(
    task: Task, anchor: Params, rows: Params, pull: float | Tensor, intercept: float | Tensor | None = None,
    start: Params | None = None,
) -> Params:  # fmt: skip
    """The model that minimises sum of losses + 1/2 pull ||v - anchor||^2 in its last layer, from `start` on.

    `pull` is worth so many rows; `intercept`: the pull of the intercept alone, where it is another.
    """
    head = task.linear()
    problem = head.problem(anchor, rows)
    centre = head.coefficients(anchor)
    pulls = torch.as_tensor(pull, dtype=centre.dtype).expand(centre.shape[-1])
    if intercept is not None:
        pulls = torch.cat([torch.as_tensor(intercept, dtype=centre.dtype).reshape(1), pulls[1:]])
    begin = None if start is None else head.coefficients(start)
    model: Params = head.replaced(anchor, problem.solve(centre, pulls, begin))
    return model
