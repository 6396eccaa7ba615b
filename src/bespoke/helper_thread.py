"""A thread for work that does not hold Python's lock: compiled loops and reads from disk."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, Thread
from typing import Any


class Helper:
    """A thread that executes one call at a time. It has two locks, because futures cost more than a small round.

    Calls go strictly start, finish, start, finish.
    """

    def __init__(self) -> None:
        self.go, self.done = Lock(), Lock()
        self.go.acquire()
        self.done.acquire()
        self.call: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self.result: Any = None
        self.failure: BaseException | None = None
        Thread(target=self._serve, name="bespoke-helper", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.go.acquire()
            assert self.call is not None
            function, arguments = self.call
            try:
                self.result = function(*arguments)
            except BaseException as error:  # raised by `finish`
                self.failure = error
            self.done.release()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments
        self.go.release()

    def finish(self) -> Any:
        """Waits for the call; returns its result or raises its exception."""
        self.done.acquire()
        result, failure = self.result, self.failure
        self.call = self.result = self.failure = None
        if failure:
            raise failure
        return result
