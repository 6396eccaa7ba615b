"""Gaussian noise from the operating system's generator (unpredictable) or from keys (repeatable).

Secret noise is made from os.urandom (a cryptographic generator) by the transform of Box and Muller, in double
precision. The sum is then rounded to the message's own precision. The grid of float32 is 2^29 times as coarse as that
of the noise, which hides the gaps between the doubles that a generator can give.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.randomness import Word, generator
from bespoke.tensors import named_map

Shape = tuple[int, ...]


def secret_normal(shape: Shape) -> NDArray[np.float64]:
    """Standard normal numbers that no seed can reproduce."""
    count = int(np.prod(shape, dtype=np.int64))
    pairs = (count + 1) // 2
    bits = np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64).reshape(2, pairs)
    above_zero = ((bits[0] >> np.uint64(11)) + np.uint64(1)) * 2.0**-53  # in (0, 1]: its logarithm is finite
    radius = np.sqrt(-2.0 * np.log(above_zero))
    angle = (bits[1] >> np.uint64(11)) * (2.0**-53 * 2.0 * np.pi)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count].reshape(shape)


def keyed_normal(shape: Shape, *words: Word) -> NDArray[np.float64]:
    """The same numbers for the same key words: not private against anyone who knows the seed."""
    return generator("noise", *words).standard_normal(shape)


def with_noise(tree: Any, deviation: float, words: tuple[Word, ...] | None) -> Any:
    """Independent noise on every entry of a tree; `words` None: secret noise."""

    def noisy(name: str, leaf: Tensor) -> Tensor:
        shape = tuple(leaf.shape)
        return added(leaf, deviation * (secret_normal(shape) if words is None else keyed_normal(shape, *words, name)))

    return named_map(noisy, tree)


def with_noise_each(tree: Any, deviation: float, clients: NDArray[np.uint64], words: tuple[Word, ...] | None) -> Any:
    """The same for a stacked tree: every client draws its own noise, whatever else is in the stack."""

    def noisy(name: str, leaf: Tensor) -> Tensor:
        shape = tuple(leaf.shape)
        if words is None:
            return added(leaf, deviation * secret_normal(shape))
        drawn = np.stack([keyed_normal(shape[1:], *words, name, int(client)) for client in clients])
        return added(leaf, deviation * drawn)

    return named_map(noisy, tree)


def added(leaf: Tensor, drawn: NDArray[np.float64]) -> Tensor:
    """leaf + noise, added in double precision and rounded to the leaf's precision."""
    return (leaf.double() + torch.from_numpy(np.asarray(drawn)).to(leaf.device)).to(leaf.dtype)
