"""Protects the terminal from control characters in names, files and error messages.

`guard` filters the standard streams. Rich needs its own escapes, so it writes to the streams behind the filter.
`Terminal` is Rich's console, which filters texts before Rich adds colours and cursor movements.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 and C1 controls except line feed and tab, line separators, and marks that reverse the direction of writing
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with U+FFFD for every character that could control a terminal."""
    return _CONTROLS.sub("\ufffd", text)


class Guarded:
    """A text stream that writes printable text only."""

    def __init__(self, stream: IO[str]) -> None:
        self.rich_proxied_file = stream  # Rich writes to this

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def guard() -> None:
    """Filters this process's standard output and standard error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, Guarded):
            setattr(sys, name, Guarded(stream))


class Terminal(Console):
    """A console with printable texts; only Rich adds escapes."""

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None, **options: Any) -> None:
        stream = sys.stderr if stderr else sys.stdout
        super().__init__(file=file or getattr(stream, "rich_proxied_file", stream), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
