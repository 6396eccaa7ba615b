"""Clipping: bounds the norm of one client's message."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bespoke.messages.transform import Outgoing, Transform
from bespoke.tensors import T, leaves, scale, without_buffers


def norms(tree: Any) -> Tensor:
    """The Euclidean norm of each client's part of a stacked tree."""
    squares = [(leaf * leaf).flatten(1).sum(1) if leaf.dim() > 1 else leaf * leaf for leaf in leaves(tree)]
    return torch.stack(squares).sum(0).sqrt()


def clipped(tree: T, bound: float) -> T:
    """The stacked tree with each client's part scaled to a norm of at most `bound`."""
    if not leaves(tree):  # no part of the model is shared
        return tree
    return scale(tree, (bound / norms(tree).clamp(min=1e-12)).clamp(max=1.0))


@dataclass(frozen=True)
class Clip(Transform):
    """Scale the named fields, taken together, to a Euclidean norm of at most `bound`."""

    bound: float
    fields: tuple[str, ...] = ("delta",)

    title = "transform.clip"

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.fields

    def client(self, sent: Outgoing) -> Outgoing:
        bounded = clipped({name: without_buffers(sent.up[name]) for name in self.fields}, self.bound)
        # buffers are not parameters: their size does not measure a client's influence, so they are not scaled
        return replace(sent, up={**sent.up, **{name: _over(sent.up[name], bounded[name]) for name in self.fields}})


def _over(whole: T, part: T) -> T:
    """The tree with the leaves of `part` replaced."""
    if not isinstance(whole, dict):
        return part
    rest: Any = part
    merged: Any = {name: _over(value, rest[name]) if name in rest else value for name, value in whole.items()}
    found: T = merged
    return found
