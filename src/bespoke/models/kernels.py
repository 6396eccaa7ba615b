"""Compiled descent for linear models (extra `fast`: numba). A whole local epoch of many clients in one call.

Most of the time of a small model goes into the bookkeeping of its operations, not into arithmetic. These loops do an
epoch of minibatch SGD per client in machine code, reading rows where they lie: nothing is gathered, padded or stacked.
They compute what `BaseTask.gradient` in closed form and `descend` compute; the contract battery holds one against the
other. They join `torch.func.vmap` as one operation that knows how to run for all clients at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOSSES = {"squares": 0, "softmax": 1, "hinge": 2}
# all of fastmath but `nnan` and `ninf`: a client that is not finite has to come out as such, to be left out
_LOOSE = {"reassoc", "contract", "arcp", "nsz", "afn"}


def available() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def _compiled() -> Callable[..., None]:
    import numba

    @numba.njit(fastmath=_LOOSE, error_model="numpy", nogil=True, cache=True)
    def clients(  # type: ignore[no-untyped-def]
        begin, end, x, y, unit, index, used, repeats, weight, bias, anchor_weight, anchor_bias, lr, decay, pull, loss
    ):
        """Clients begin..end: index is (clients, orders, steps, batch); weight and bias change in place.

        `used` is how many rows of each order count; lr, decay and pull are per client; an anchor has one row or many.
        """
        orders, steps, batch = index.shape[1], index.shape[2], index.shape[3]
        outputs, inputs = weight.shape[1], weight.shape[2]
        slope = np.empty((batch, outputs), np.float32)
        for client in range(begin, end):
            w, b = weight[client], bias[client]
            anchored = min(client, anchor_weight.shape[0] - 1)
            for epoch in range(repeats):
                order = index[client, epoch if orders > 1 else 0]
                for step in range(steps):
                    rows = min(batch, used[client] - step * batch)
                    if rows <= 0:
                        break
                    for i in range(rows):
                        row = x[order[step, i]]
                        for k in range(outputs):
                            wk = w[k]
                            total = np.float32(0)
                            for j in range(inputs):
                                total += np.float32(row[j]) * wk[j]
                            slope[i, k] = total * unit + b[k]
                        target = y[order[step, i]]
                        if loss == 0:
                            slope[i, 0] -= np.float32(target)
                        elif loss == 2:
                            sign = np.float32(2) * np.float32(target) - np.float32(1)
                            slope[i, 0] = -sign if sign * slope[i, 0] < np.float32(1) else np.float32(0)
                        else:
                            top = slope[i, 0]
                            for k in range(1, outputs):
                                top = max(top, slope[i, k])
                            total = np.float32(0)
                            for k in range(outputs):
                                slope[i, k] = np.exp(slope[i, k] - top)
                                total += slope[i, k]
                            for k in range(outputs):
                                slope[i, k] /= total
                            slope[i, int(target)] -= np.float32(1)
                    rate = lr[client]
                    keep = np.float32(1) - rate * (decay[client] + pull[client])
                    back = rate * pull[client]
                    part = rate / np.float32(rows)
                    for k in range(outputs):
                        wk = w[k]
                        if keep != np.float32(1):
                            ak = anchor_weight[anchored, k]
                            for j in range(inputs):
                                wk[j] = keep * wk[j] + back * ak[j]
                            b[k] = keep * b[k] + back * anchor_bias[anchored, k]
                        for i in range(rows):
                            row = x[order[step, i]]
                            factor = part * slope[i, k]
                            b[k] -= factor
                            factor *= unit
                            for j in range(inputs):
                                wk[j] -= factor * np.float32(row[j])

    return clients


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="bespoke-descent")


def _per_client(value: Tensor, clients: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(value.detach().float().expand(clients).numpy())


class LinearDescent(torch.autograd.Function):
    """repeats epochs of SGD on a linear model; (weight, bias) after them. Not differentiable."""

    @staticmethod
    def forward(
        x: Tensor, y: Tensor, index: Tensor, used: Tensor, weight: Tensor, bias: Tensor, anchor_weight: Tensor,
        anchor_bias: Tensor, lr: Tensor, decay: Tensor, pull: Tensor, repeats: int, loss: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        run = LinearDescent._run(
            x, y, index[None], used[None], weight[None], bias[None], anchor_weight[None], anchor_bias[None],
            lr[None], decay[None], pull[None], repeats, loss,
        )  # fmt: skip
        return run[0][0], run[1][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        x, y, *each, repeats, loss = arguments
        if in_dims[0] is not None or in_dims[1] is not None:
            raise RuntimeError("rows must be shared by all clients")
        count = info.batch_size
        moved = []
        for place, (value, dim) in enumerate(zip(each, in_dims[2:-2])):
            batched = value[None] if dim is None else value.movedim(dim, 0)
            shared_anchor = place in (4, 5) and dim is None  # read only: one row serves all
            moved.append(batched if dim is not None or shared_anchor else batched.expand(count, *batched.shape[1:]))
        index, used, weight, bias, anchor_weight, anchor_bias, lr, decay, pull = moved
        run = LinearDescent._run(
            x, y, index, used, weight, bias, anchor_weight, anchor_bias, lr, decay, pull, repeats, loss
        )  # fmt: skip
        return run, (0, 0)

    @staticmethod
    def _run(
        x: Tensor, y: Tensor, index: Tensor, used: Tensor, weight: Tensor, bias: Tensor, anchor_weight: Tensor,
        anchor_bias: Tensor, lr: Tensor, decay: Tensor, pull: Tensor, repeats: int, loss: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        clients = len(index)
        w, b = weight.contiguous().clone(), bias.contiguous().clone()
        counts = used.to(torch.int64).contiguous().numpy()
        unit = np.float32(1 / 255) if x.dtype == torch.uint8 else np.float32(1)
        arguments = (
            x.numpy(), y.numpy(), unit, index.numpy(), counts, repeats, w.numpy(), b.numpy(),
            anchor_weight.contiguous().numpy(), anchor_bias.contiguous().numpy(),
            _per_client(lr, clients), _per_client(decay, clients), _per_client(pull, clients), LOSSES[loss],
        )  # fmt: skip
        kernel = _compiled()
        threads = min(torch.get_num_threads(), clients)
        if threads == 1:
            kernel(0, clients, *arguments)
            return w, b
        # contiguous shares of about equal work
        work = np.cumsum(counts)
        cuts = np.searchsorted(work, work[-1] * np.arange(1, threads) / threads)
        ends = [0, *np.minimum(cuts + 1, clients).tolist(), clients]
        list(_threads(threads).map(lambda pair: kernel(pair[0], pair[1], *arguments), pairwise(ends)))
        return w, b
