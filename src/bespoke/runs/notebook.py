"""Progress in a notebook: one bar for the current work and one for each run; bars disappear at the end."""

from __future__ import annotations

import html
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from bespoke.runs.events import Progress, Silent
from bespoke.terminal import printable

REDRAWN = 0.2  # seconds between two drawings, at least


def in_notebook() -> bool:
    """Whether the code runs in a notebook; terminals have their own bars, and scripts have none."""
    shell = sys.modules.get("IPython")
    current = shell.get_ipython() if shell is not None else None
    return current is not None and hasattr(current, "kernel")


def watched() -> AbstractContextManager[Progress]:
    """Progress bars in a notebook; silent in a script."""
    return NotebookBars() if in_notebook() else nullcontext(Silent())


class NotebookBars:
    """Draws bars as HTML in the output of a cell. Use as a context manager."""

    def __init__(self) -> None:
        self.bars: list[NotebookBar] = [NotebookBar(self)]
        self.cell: Any = None
        self.drawn = 0.0

    def __enter__(self) -> NotebookBars:
        from IPython.display import display

        self.cell = display(self._shown(), display_id=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars = []
        self.draw(at_once=True)

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.bars[0].begin(what, total, done)

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.bars[0].advance(steps, note)

    def note(self, text: str) -> None:
        """Does nothing: the result has all notes."""

    def lane(self) -> NotebookBar:
        """Makes a bar for one of several runs at the same time."""
        self.bars.append(NotebookBar(self))
        return self.bars[-1]

    def draw(self, at_once: bool = False) -> None:
        if self.cell is not None and (at_once or time.monotonic() - self.drawn > REDRAWN):
            self.drawn = time.monotonic()
            self.cell.update(self._shown())

    def _shown(self) -> Any:
        from IPython.display import HTML

        return HTML("".join(bar.html() for bar in self.bars))


class NotebookBar:
    """One bar."""

    def __init__(self, beside: NotebookBars) -> None:
        self.beside, self.what, self.total, self.done, self.said = beside, "reading the data", 0, 0, ""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.what, self.total, self.done, self.said = what, total, done, ""
        self.beside.draw()

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.done, self.said = self.done + steps, note or self.said
        self.beside.draw()

    def note(self, text: str) -> None: ...

    def close(self) -> None:
        self.beside.bars = [bar for bar in self.beside.bars if bar is not self]

    def html(self) -> str:
        what, said = (html.escape(printable(text)) for text in (self.what, self.said))
        many = f'<progress value="{self.done}" max="{self.total}"></progress> {self.done}/{self.total}'
        return f"<div>{what} {many if self.total else ''} {said}</div>"
