"""BatchNorm in evaluation mode as an affine map, which torch.func can run.

Its own slope under vmap is composed in Python by PyTorch's compiler, whose loading takes seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class StillNorm(TorchFunctionMode):
    """Within it BatchNorm in evaluation mode is written out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return _normed(*args, **kwargs)
        return func(*args, **kwargs)


def _normed(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    scale = torch.rsqrt(running_var + eps)
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    ends = (-1, *(1,) * (input.dim() - 2))
    return input * scale.reshape(ends) + shift.reshape(ends)
