"""What acts on messages between client and server: clipping, noise, compression."""

from __future__ import annotations

from typing import Protocol

from bespoke.method import Cohort
from bespoke.tensors import Tree


class Transform(Protocol):
    """Clip, noise, compress: a client half on what leaves, a server half on the sum, undone in reverse order."""

    @property
    def fields(self) -> tuple[str, ...]: ...  # the uplink fields it acts on

    def client(self, up: Tree) -> Tree: ...
    def server(self, cohort: Cohort) -> Cohort: ...
