"""Interfaces for watching long work: progress is reported to a watcher, which may stop the work."""

from __future__ import annotations

from typing import Protocol


class Interrupted(Exception):
    """The user asked to stop; the run can be resumed."""


class Pruned(Exception):
    """The learning curve is so much worse than others' that the run is not worth its end."""


class Progress(Protocol):
    """Told of what goes on; the command line draws bars of it."""

    def begin(self, what: str, total: int, done: int = 0) -> None: ...
    def advance(self, steps: int = 1, note: str = "") -> None: ...
    def note(self, text: str) -> None: ...


class Silent:
    def begin(self, what: str, total: int, done: int = 0) -> None: ...
    def advance(self, steps: int = 1, note: str = "") -> None: ...
    def note(self, text: str) -> None: ...
