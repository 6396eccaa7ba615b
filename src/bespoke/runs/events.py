"""Interfaces for watching long work: it reports progress, and may be stopped."""

from __future__ import annotations

from typing import Protocol


class Interrupted(Exception):
    """The user asked to stop; the run can be resumed."""


class Pruned(Exception):
    """The run was ended early because its learning curve is much worse than those of other trials."""


class Progress(Protocol):
    """Receives progress; the command line draws bars from it."""

    def begin(self, what: str, total: int, done: int = 0) -> None: ...
    def advance(self, steps: int = 1, note: str = "") -> None: ...
    def note(self, text: str) -> None: ...


class Silent:
    def begin(self, what: str, total: int, done: int = 0) -> None: ...
    def advance(self, steps: int = 1, note: str = "") -> None: ...
    def note(self, text: str) -> None: ...
