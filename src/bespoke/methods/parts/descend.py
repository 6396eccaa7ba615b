"""Gradient descent on one client's minibatches: the inner loop of nearly every method."""

from __future__ import annotations

import torch
from torch import Tensor

from bespoke.method import Batches
from bespoke.methods.parts.client_optimizer import SGD, ClientOptimizer
from bespoke.methods.parts.schedule import Rate, at
from bespoke.task import Task
from bespoke.tensors import Params, Tree, is_buffer, scale


def descend(
    task: Task,
    params: Params,
    batches: Batches,
    *,
    lr: Rate,
    optimizer: ClientOptimizer = SGD,
    anchor: Params | None = None,
    pull: float | Tensor = 0.0,
    drift: Params | None = None,
    only: tuple[str, ...] = (),
) -> Params:
    """One pass over the batches, by an optimizer that begins anew: see `descended`."""
    return descended(
        task, params, None, batches, lr=lr, optimizer=optimizer, anchor=anchor, pull=pull, drift=drift, only=only
    )[0]  # fmt: skip


def descended(
    task: Task,
    params: Params,
    state: Tree | None,
    batches: Batches,
    *,
    lr: Rate,
    optimizer: ClientOptimizer = SGD,
    anchor: Params | None = None,
    pull: float | Tensor = 0.0,
    drift: Params | None = None,
    only: tuple[str, ...] = (),
) -> tuple[Params, Tree]:
    """(parameters, the optimizer's state) after one pass over the batches.

    The slope is grad + weight_decay p + pull (p - anchor) + drift, and by plain SGD p <- p - lr slope. `state`: what an
    earlier pass over the same parameters left; None: the optimizer begins anew.

    `only`: prefixes of the parameters that move; all of them if empty. A step that merely pads this client to the
    longest of its chunk (live = 0) moves nothing. Buffers among the parameters are no parameters: each step assigns
    them what its forward pass made of them; where `only` leaves them out they are used as they are, as in evaluation.
    """
    if not optimizer.adaptive:  # Adam's steps are as long as the rate says, however steep it is
        more = optimizer.coupled + (pull if anchor is not None else 0.0)
        lr = bounded(task, params, batches, lr, more)
    plain = not optimizer.stateful and not callable(lr) and (drift is None or anchor is None)
    if plain and all(name.startswith(only) for name in params if only):
        terms = (optimizer.coupled, anchor, pull)
        if drift is not None:  # pulled to -drift with strength one, less the decay that this pull brings along
            terms = (optimizer.coupled - 1.0, scale(drift, -1.0), 1.0)
        done = task.descend(params, batches, lr, *terms)
        if done is not None:
            return done, {}
    among = [name for name in params if not only or name.startswith(only)]
    moving = [name for name in among if not is_buffer(name)]
    still = len(moving) == len(among)
    if state is None:
        state = optimizer.start({name: params[name] for name in moving})
    for step in range(len(batches)):
        gradient, buffers = task.stepped(params, batches[step], still)
        live, rate = batches.live(step), at(lr, step)
        params, slope = dict(params), {}
        for name, value in buffers.items():
            params[name] = value if isinstance(live, float) else torch.where(live > 0, value, params[name])
        for name in moving:
            p, g = params[name], gradient[name]
            if optimizer.coupled and not optimizer.adaptive:  # else it adds the decay itself
                g = g + optimizer.coupled * p
            if anchor is not None:
                g = g + pull * (p - anchor[name])
            if drift is not None:
                g = g + drift[name]
            slope[name] = g
        if optimizer.adaptive:
            moved, state = optimizer.step(state, {name: params[name] for name in moving}, slope, rate, live)
            params |= moved
            continue
        slope, state = optimizer.direction(state, slope, live)
        rate = rate * live
        for name, g in slope.items():
            p = params[name]
            if not isinstance(rate, float):
                params[name] = p - rate * g
            elif step:  # after the first step the parameters are our own: no need for new memory
                p.sub_(g, alpha=rate)
            else:
                params[name] = torch.sub(p, g, alpha=rate)
    return params, state


def bounded(task: Task, params: Params, batches: Batches, lr: Rate, more: float | Tensor) -> Rate:
    """The rate, where the task bounds it by the client's own curvature: see Task.safe_rate."""
    if not callable(lr):
        return task.safe_rate(params, batches, lr, more)
    most = task.safe_rate(params, batches, float("inf"), more)
    return lr if not isinstance(most, Tensor) else lambda step: torch.minimum(torch.as_tensor(lr(step)), most)
