"""Dropout with keyed masks: the same masks whether clients run one by one or vectorized.

A mask's entry is a hash of the key, the number of earlier dropouts in the forward pass, and its own place. So the rows
of a padded batch have the same masks. Other random operations draw from torch's generator, which is seeded by the same
key; torch.func.vmap cannot run these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_GOLDEN = 0x9E3779B1
# how many of the first dimensions have an entry each in the mask; None: all
_DROPOUTS: dict[Any, int | None] = {
    F.dropout: None, torch.dropout: None, F.dropout1d: 2, F.dropout2d: 2, F.dropout3d: 2,
}  # fmt: skip


def uniform(key: Tensor, count: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers in [0, 1) of this shape, each a function of the key, the count and its own place."""
    word = _scrambled((key + (count + 1) * _GOLDEN) & 0xFFFFFFFF)
    for length in shape:
        word = _scrambled(word[..., None] ^ (torch.arange(1, length + 1) * _GOLDEN & 0xFFFFFFFF))
    return (word >> 8).float() * 2.0**-24


def _scrambled(word: Tensor) -> Tensor:
    for _ in range(2):
        word = ((word ^ (word >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return word ^ (word >> 16)


class _Keyed(TorchFunctionMode):
    """Replaces dropout's masks by keyed ones."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key, self.count = key, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _DROPOUTS:
            return func(*args, **kwargs)
        return self._dropped(_DROPOUTS[func], *args, **kwargs)

    def _dropped(
        self, dims: int | None, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False,
        train: bool | None = None,
    ) -> Tensor:  # fmt: skip
        if not (training if train is None else train) or p == 0:
            return input
        shape = tuple(input.shape[:dims]) if dims else tuple(input.shape)
        kept = (uniform(self.key, self.count, shape) >= p).to(input.dtype)
        self.count += 1
        if dims:
            kept = kept.reshape(*shape, *(1,) * (input.dim() - dims))
        dropped = input * kept / (1 - p) if p < 1 else input * 0
        return input.copy_(dropped) if inplace and not input.requires_grad else dropped


@contextmanager
def drawn(key: Tensor, seeded: bool) -> Iterator[_Keyed]:
    """A context in which random draws follow from the key; `seeded`: torch's generator too (not under vmap)."""
    if not seeded:
        with _Keyed(key) as mode:
            yield mode
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(key))
        with _Keyed(key) as mode:
            yield mode
