"""Compiled descent for linear models (extra `fast`, numba): one call runs a whole local epoch of many clients.

Most of the time of a small model goes into the bookkeeping of its operations, not into arithmetic. These loops do an
epoch of minibatch SGD per client in machine code, reading rows where they lie: nothing is gathered, padded or stacked.
They compute what `BaseTask.gradient` in closed form and `descend` compute; the contract battery holds one against the
other. They join `torch.func.vmap` as one operation that knows how to run for all clients at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bespoke.helper_thread import Helper

# reorder sums as hardware likes, but keep NaN and infinity: a client that diverges must be seen to do so
FAST = {"reassoc", "contract", "arcp", "nsz"}
WORTH_A_THREAD = 1_000_000
LOSSES = {"squares": 0, "softmax": 1, "hinge": 2}

_turn = Lock()  # one descent at a time has the helpers
_count = 1  # threads of a descent: changes how fast it is, never what it gives


def use_threads(count: int) -> None:
    """Spread descents over so many threads, as torch.set_num_threads does for torch."""
    global _count
    _count = count


def available() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def _compiled() -> Callable[..., None]:
    import numba

    @numba.njit(fastmath=FAST, nogil=True, cache=True, error_model="numpy")
    def clients(  # type: ignore[no-untyped-def]
        first, last, x, y, unit, orders, begin, used, limit, batch, repeats, weight, bias, anchor_weight, anchor_bias,
        lr, decay, pull, loss,
    ):  # fmt: skip
        """Clients first..last: weight (clients, outputs, inputs) and bias (clients, outputs) change in place.

        Client c's rows are orders[epoch, begin[c] : begin[c] + used[c]], of which it takes limit[c] steps (-1: all);
        lr, decay and pull are per client; an anchor has one row or many. Four rows go together, so that a weight is
        loaded once for four products; the places beyond the last row repeat it with slope zero.
        """
        outputs, inputs = weight.shape[1], weight.shape[2]
        slope = np.empty((batch + 3, outputs), np.float32)
        for client in range(first, last):
            w, b = weight[client], bias[client]
            anchored = min(client, anchor_weight.shape[0] - 1)
            start, total, left = begin[client], used[client], limit[client]
            for epoch in range(repeats):
                order = orders[epoch if orders.shape[0] > 1 else 0]
                for low in range(start, start + total, batch):
                    if left == 0:
                        break
                    left -= 1
                    rows = min(batch, start + total - low)
                    end = low + rows - 1
                    for i in range(0, rows, 4):
                        r0 = x[order[low + i]]
                        r1 = x[order[min(low + i + 1, end)]]
                        r2 = x[order[min(low + i + 2, end)]]
                        r3 = x[order[min(low + i + 3, end)]]
                        for k in range(outputs):
                            wk = w[k]
                            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                            for j in range(inputs):
                                v = wk[j]
                                s0 += np.float32(r0[j]) * v
                                s1 += np.float32(r1[j]) * v
                                s2 += np.float32(r2[j]) * v
                                s3 += np.float32(r3[j]) * v
                            slope[i, k] = s0
                            slope[i + 1, k] = s1
                            slope[i + 2, k] = s2
                            slope[i + 3, k] = s3
                    for i in range(rows):
                        target = y[order[low + i]]
                        for k in range(outputs):
                            slope[i, k] = slope[i, k] * unit + b[k]
                        if loss == 0:
                            slope[i, 0] -= np.float32(target)
                        elif loss == 2:
                            sign = np.float32(2) * np.float32(target) - np.float32(1)
                            slope[i, 0] = -sign if sign * slope[i, 0] < np.float32(1) else np.float32(0)
                        else:
                            top = slope[i, 0]
                            for k in range(1, outputs):
                                top = max(top, slope[i, k])
                            norm = np.float32(0)
                            for k in range(outputs):
                                slope[i, k] = np.exp(slope[i, k] - top)
                                norm += slope[i, k]
                            for k in range(outputs):
                                slope[i, k] /= norm
                            slope[i, int(target)] -= np.float32(1)
                    for i in range(rows, rows + 3):
                        for k in range(outputs):
                            slope[i, k] = np.float32(0)
                    rate = lr[client]
                    keep = np.float32(1) - rate * (decay[client] + pull[client])
                    back = rate * pull[client]
                    part = rate / np.float32(rows)
                    if keep != np.float32(1) or back != np.float32(0):
                        for k in range(outputs):
                            for j in range(inputs):
                                w[k, j] = keep * w[k, j] + back * anchor_weight[anchored, k, j]
                            b[k] = keep * b[k] + back * anchor_bias[anchored, k]
                    for i in range(0, rows, 4):
                        r0 = x[order[low + i]]
                        r1 = x[order[min(low + i + 1, end)]]
                        r2 = x[order[min(low + i + 2, end)]]
                        r3 = x[order[min(low + i + 3, end)]]
                        for k in range(outputs):
                            wk = w[k]
                            f0, f1 = part * slope[i, k], part * slope[i + 1, k]
                            f2, f3 = part * slope[i + 2, k], part * slope[i + 3, k]
                            b[k] -= f0 + f1 + f2 + f3
                            f0, f1, f2, f3 = f0 * unit, f1 * unit, f2 * unit, f3 * unit
                            for j in range(inputs):
                                wk[j] -= (
                                    f0 * np.float32(r0[j])
                                    + f1 * np.float32(r1[j])
                                    + f2 * np.float32(r2[j])
                                    + f3 * np.float32(r3[j])
                                )

    compiled: Callable[..., None] = clients
    return compiled


@cache
def _helper(place: int, process: int) -> Helper:
    """The process's own: threads do not survive a fork."""
    return Helper()


def _per_client(value: float | Tensor, clients: int) -> Any:
    if isinstance(value, Tensor):
        return value.float().expand(clients).contiguous().numpy()
    return np.full(clients, value, np.float32)


def descend_linear(
    loss: str, batches: Any, weight: Tensor, bias: Tensor, *rest: Tensor | float
) -> tuple[Tensor, Tensor]:
    """All steps of one client (inside vmap) or of stacked clients; rest: anchor weight and bias, lr, decay, pull."""
    rows = batches.columns["x"], batches.columns["y"], batches.orders
    each = batches.begin, batches.used, batches.limit, weight, bias, *rest
    run = _descend if batches.begin.dim() else LinearDescent.apply
    return run(*rows, *each, batches.size, batches.most, batches.repeats, loss)


class LinearDescent(torch.autograd.Function):
    """The descent as one operation that vmap knows how to run for all clients at once. Not differentiable."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, orders: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        *each, size, most, repeats, loss = arguments
        alone = (value[None] if isinstance(value, Tensor) else value for value in each)
        weight, bias = _descend(x, y, orders, *alone, size, most, repeats, loss)
        return weight[0], bias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        x, y, orders, *each, size, most, repeats, loss = arguments
        if any(dim is not None for dim in in_dims[:3]):
            raise RuntimeError("rows must be shared by all clients")
        moved = [value if dim is None else value.movedim(dim, 0) for value, dim in zip(each, in_dims[3:])]
        return _descend(x, y, orders, *moved, size, most, repeats, loss), (0, 0)


def _descend(x: Tensor, y: Tensor, orders: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Of `begin` on, each argument has a row per client, or is the same for all and has none.

    A small model's round takes less than a millisecond: each operation here is worth leaving out.
    """
    begin, used, limit, weight, bias, anchor_weight, anchor_bias, lr, decay, pull, size, most, repeats, loss = arguments
    clients = len(begin)
    steps = np.full(clients, most or -1) if limit is None else np.minimum(_per_client(limit, clients), most).astype(int)
    if most:  # over and over one order, until a client has had its steps
        repeats = max(int(steps.max()), 0)
    w = torch.empty(clients, *weight.shape[-2:]).copy_(weight)
    b = torch.empty(clients, bias.shape[-1]).copy_(bias)
    counts = used.numpy()
    settings = (
        x.numpy(), y.numpy(), np.float32(1 / 255) if x.dtype == torch.uint8 else np.float32(1), orders.numpy(),
        begin.numpy(), counts, steps, size, repeats, w.numpy(), b.numpy(),
        anchor_weight.reshape(-1, *w.shape[1:]).numpy(), anchor_bias.reshape(-1, b.shape[1]).numpy(),
        *(_per_client(value, clients) for value in (lr, decay, pull)), LOSSES[loss],
    )  # fmt: skip
    kernel = _compiled()
    # waking a thread takes as long as some millions of products
    rows = int(np.minimum(counts * repeats, steps * size).sum()) if most else int(counts.sum()) * repeats
    products = rows * w[0].numel()
    threads = min(_count, clients) if products > WORTH_A_THREAD else 1
    if threads == 1:
        kernel(0, clients, *settings)
        return w, b
    work = np.cumsum(counts)  # contiguous shares of about equal work; the first is done by this thread
    cuts = np.searchsorted(work - counts / 2, work[-1] * np.arange(1, threads) / threads)
    ends = [0, *np.minimum(cuts, clients).tolist(), clients]
    with _turn:
        helpers = [_helper(place, os.getpid()) for place in range(threads - 1)]
        for helper, (low, high) in zip(helpers, pairwise(ends[1:])):
            helper.start(kernel, low, high, *settings)
        kernel(ends[0], ends[1], *settings)
        for helper in helpers:
            helper.finish()
    return w, b
