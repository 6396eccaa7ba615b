"""Gradient descent on one client's minibatches: the inner loop of nearly every method."""

from __future__ import annotations

import torch
from torch import Tensor

from bespoke.method import Batches, Task
from bespoke.tensors import Params, scale


def descend(
    task: Task,
    params: Params,
    batches: Batches,
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    anchor: Params | None = None,
    pull: float | Tensor = 0.0,
    drift: Params | None = None,
    only: tuple[str, ...] = (),
) -> Params:
    """One pass of SGD over the batches: p <- p - lr (grad + weight_decay p + pull (p - anchor) + drift).

    `only`: prefixes of the parameters that move; all of them if empty. A step that merely pads this client to the
    longest of its chunk (live = 0) moves nothing.
    """
    safe = getattr(task, "safe_rate", None)
    if safe is not None:
        lr = safe(params, batches, lr, weight_decay + (pull if anchor is not None else 0.0))
    whole = getattr(task, "descend", None)
    plain = not momentum and (drift is None or anchor is None)
    if whole is not None and plain and all(name.startswith(only) for name in params if only):
        terms = (weight_decay, anchor, pull)
        if drift is not None:  # pulled to -drift with strength one, less the decay that this pull brings along
            terms = (weight_decay - 1.0, scale(drift, -1.0), 1.0)
        done = whole(params, batches, lr, *terms)
        if done is not None:
            return done
    moving = [name for name in params if not only or name.startswith(only)]
    velocity = {name: torch.zeros_like(params[name]) for name in moving} if momentum else {}
    for step in range(len(batches)):
        gradient = task.gradient(params, batches[step])
        live = batches.live(step)
        params = dict(params)
        for name in moving:
            p, g = params[name], gradient[name]
            if weight_decay:
                g = g + weight_decay * p
            if anchor is not None:
                g = g + pull * (p - anchor[name])
            if drift is not None:
                g = g + drift[name]
            if momentum:
                # a padding step must not let the velocity carry on: live = 0 keeps both as they were
                g = velocity[name] = velocity[name] + live * (momentum * velocity[name] + g - velocity[name])
            rate = lr * live
            if not isinstance(rate, float):
                params[name] = p - rate * g
            elif step:  # after the first step the parameters are our own: no need for new memory
                p.sub_(g, alpha=rate)
            else:
                params[name] = torch.sub(p, g, alpha=rate)
    return params
