"""Progress bars for long work, and a Ctrl-C that waits until the current round has ended."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bespoke.terminal import Terminal


def _columns(width: int) -> list[ProgressColumn]:
    """The columns that fit beside each other; a truncated bar would be useless."""
    what, done, remaining, note = (
        TextColumn("{task.description:<34}" if width >= 100 else "{task.description:<24}"),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    if width >= 100:
        return [what, BarColumn(), done, TimeElapsedColumn(), remaining, note]
    return [what, BarColumn(16), done, remaining, note] if width >= 80 else [what, done, remaining]


class Bars:
    """A progress bar for the current work, and lines for decisions. Without a terminal, plain lines."""

    def __init__(self, title: str, quiet: bool = False) -> None:
        self.console = Terminal(stderr=True, quiet=quiet)
        self.title = title
        self.bars = Progress(
            *_columns(self.console.width), console=self.console, transient=True,
            disable=quiet or not self.console.is_terminal,
        )  # fmt: skip
        self.task = self.bars.add_task("reading the data", total=None, note="")
        self.said = ""

    def __enter__(self) -> Bars:
        self._print(self.title)
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.bars.reset(self.task, description=escape(what), total=total, completed=done, note="")
        run = what.partition(":")[0]
        if not self.console.is_terminal and run != self.said:  # a line a run, where there are no bars
            self._print(f"  {run}")
        self.said = run

    def advance(self, steps: int = 1, note: str = "") -> None:
        if note:
            self.bars.update(self.task, note=escape(note))
        self.bars.advance(self.task, steps)

    def note(self, text: str) -> None:
        self._print(f"  {text}")

    def lane(self) -> Bar:
        """A further bar, for one of several concurrent runs."""
        return Bar(self)

    def _print(self, text: str) -> None:
        # names from a user's file are no markup; where there is no terminal a line stays one line
        self.console.print(text, highlight=False, markup=False, soft_wrap=not self.console.is_terminal)

    @contextmanager
    def stopping(self) -> Iterator[Callable[[], bool]]:
        """Turns the first Ctrl-C or SIGTERM into a question asked after each round; the second interrupts at once."""
        asked = False

        def ask(number: int, frame: object) -> None:
            nonlocal asked
            if asked:
                raise KeyboardInterrupt
            asked = True
            self._print("stopping after this round (Ctrl-C again to stop at once)")

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield lambda: asked
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Bar:
    """One of several bars."""

    def __init__(self, bars: Bars) -> None:
        self.bars, self.said = bars, ""
        self.task = bars.bars.add_task("starting", total=None, note="")

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.bars.bars.reset(self.task, description=escape(what), total=total, completed=done, note="")
        run = what.partition(":")[0]
        if not self.bars.console.is_terminal and run != self.said:
            self.bars._print(f"  {run}")
        self.said = run

    def advance(self, steps: int = 1, note: str = "") -> None:
        if note:
            self.bars.bars.update(self.task, note=escape(note))
        self.bars.bars.advance(self.task, steps)

    def note(self, text: str) -> None:
        self.bars.note(text)

    def close(self) -> None:
        self.bars.bars.remove_task(self.task)
