"""Clipping: bound the norm of what one client can send."""

from __future__ import annotations

from dataclasses import dataclass

from bespoke.method import Cohort
from bespoke.tensors import Tree, norm, scale


@dataclass(frozen=True)
class Clip:
    """Scale the named fields, taken together, to a Euclidean norm of at most `bound`."""

    bound: float
    fields: tuple[str, ...] = ("delta",)

    def client(self, up: Tree) -> Tree:
        chosen = {name: up[name] for name in self.fields}
        factor = (self.bound / norm(chosen).clamp(min=1e-12)).clamp(max=1.0)
        return {**up, **scale(chosen, factor)}

    def server(self, cohort: Cohort) -> Cohort:
        return cohort
