"""Counts what a run does to its folder, kills it at a chosen event, and records the messages that leave clients.

Installed in a forked child before the command begins. A kill "at" an event happens before, during or after the event.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
from typing import Any

from bespoke.privacy.account import Account
from bespoke.privacy.gaussian import Gaussian
from bespoke.runs.folder import RunFolder

WHEN = ("before", "amid", "after")


class Events:
    """Counts what is done to the folder, and dies at the event it was told."""

    def __init__(self, at: int | None = None, when: str = "before", kind: str | None = None) -> None:
        self.at, self.when, self.kind = at, when, kind
        self.seen: list[str] = []

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def due(self, name: str) -> bool:
        if self.kind not in (None, name):
            return False
        self.seen.append(name)
        return len(self.seen) - 1 == self.at

    def install(self) -> None:
        replace, truncate, unlink, append = os.replace, os.truncate, pathlib.Path.unlink, RunFolder.append
        events = self

        def wrapped(name: str, function: Any, middle: Any) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                due = events.due(name)
                if due and events.when == "before":
                    events.die()
                if due and events.when == "amid":
                    middle(*arguments)
                    events.die()
                result = function(*arguments, **named)
                if due:
                    events.die()
                return result

            return call

        def half_written(temporary: Any, target: Any) -> None:
            truncate(temporary, os.path.getsize(temporary) // 2)  # as if killed while writing it

        def half_a_line(self: RunFolder, log: str, entry: dict[str, Any]) -> None:
            text = json.dumps(entry)
            with open(self.path / log, "a", encoding="utf-8") as file:
                file.write(text[: len(text) // 2])

        def half_an_attempt(self: Account, place: int, number: int, what: str) -> None:
            with open(self.folder / "attempts.jsonl", "a", encoding="utf-8") as file:
                file.write(f'\n{{"stage": {place}, "rou')

        Gaussian.client = wrapped("message", Gaussian.client, lambda *_: None)  # type: ignore[method-assign]
        Account.attempt = wrapped("attempt", Account.attempt, half_an_attempt)  # type: ignore[method-assign]
        os.replace = wrapped("replace", replace, half_written)
        os.truncate = wrapped("truncate", truncate, lambda *_: None)
        pathlib.Path.unlink = wrapped("unlink", unlink, lambda *_: None)  # type: ignore[method-assign]
        RunFolder.append = wrapped("append", append, half_a_line)  # type: ignore[method-assign]


def watch_messages(path: pathlib.Path) -> None:
    """Write down whose message of which round leaves a client, before anything else is done with it."""
    before = Gaussian.client

    def client(self: Gaussian, sent: Any) -> Any:
        made = before(self, sent)
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"key": sent.key, "clients": [str(key) for key in sent.clients]}) + "\n")
        return made

    Gaussian.client = client  # type: ignore[method-assign]
