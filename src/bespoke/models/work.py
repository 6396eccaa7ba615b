"""The work of a network, counted where it is done: multiply-adds of its matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class _Counter(TorchDispatchMode):
    """Adds up the floating point operations of what is executed, by PyTorch's own formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is torch.ops.aten.mkldnn_rnn_layer:  # the one for which PyTorch has no formula
            inputs, *weights = args[:3]
            self.operations += 2 * inputs.shape[0] * inputs.shape[1] * sum(weight.numel() for weight in weights)
        elif packet in flop_registry:
            self.operations += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


def multiply_adds(call: Callable[[], Any]) -> int:
    """Multiply-adds of a call, which is made once; lookups and elementwise work count as nothing."""
    with torch.no_grad(), _Counter() as counter:
        call()
    return counter.operations // 2
