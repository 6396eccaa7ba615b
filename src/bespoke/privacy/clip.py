"""Clipping: bound the norm of what one client can send."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bespoke.privacy.transform import Sent, Transform
from bespoke.tensors import leaves, scale


def norms(tree: Any) -> Tensor:
    """The Euclidean norm of every client's part of a stacked tree."""
    squares = [(leaf * leaf).flatten(1).sum(1) if leaf.dim() > 1 else leaf * leaf for leaf in leaves(tree)]
    return torch.stack(squares).sum(0).sqrt()


def clipped(tree: Any, bound: float) -> Any:
    """Every client's part of a stacked tree, scaled to a norm of at most `bound`."""
    if not leaves(tree):  # a model of which nothing is shared
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

    def client(self, sent: Sent) -> Sent:
        chosen = {name: sent.up[name] for name in self.fields}
        return replace(sent, up={**sent.up, **clipped(chosen, self.bound)})
