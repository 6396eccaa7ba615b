"""Counts a network's work: the multiply-adds of its matrix products and convolutions.

torch.utils.flop_counter counts the same below Python, but loads PyTorch's compiler for it, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def _affine(inputs: Tensor, weight: Tensor, *_: Any) -> int:
    return inputs.numel() * len(weight)


def _product(left: Tensor, right: Tensor) -> int:
    return left.numel() * right.shape[-1]


def _lstm(inputs: Tensor, state: Any, weights: list[Tensor], *_: Any) -> int:
    positions = inputs.shape[0] * inputs.shape[1]
    return positions * sum(weight.numel() for weight in weights if weight.dim() == 2)


_RULES: dict[Any, Callable[..., int]] = {
    F.linear: _affine, torch.matmul: _product, Tensor.matmul: _product, Tensor.__matmul__: _product,
    torch.lstm: _lstm, torch._VF.lstm: _lstm,
}  # fmt: skip
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, F.conv1d, F.conv2d)


class _Counter(TorchFunctionMode):
    """Adds up the multiply-adds of what is executed."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _CONVOLUTIONS:
            self.total += out.numel() * args[1][0].numel()
        elif func in _RULES:
            self.total += _RULES[func](*args)
        return out


def multiply_adds(call: Callable[[], Any]) -> int:
    """Multiply-adds of a call, which is made once; lookups and elementwise work count as nothing."""
    counter = _Counter()
    with torch.no_grad(), counter:
        call()
    return counter.total
