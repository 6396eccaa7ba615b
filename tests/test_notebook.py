"""Bars in a notebook: what they show, and that nobody else is shown any."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bespoke.runs.notebook import NotebookBars, in_notebook


class Cell:
    """The output of a cell: what it shows, one thing after the other."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, what: str) -> None:
        self.shown.append(what)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """A kernel's IPython, as far as it is asked for."""
    made = Cell()
    shell, display = ModuleType("IPython"), ModuleType("IPython.display")
    shell.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]

    def show(what: str, display_id: bool) -> Cell:
        made.update(what)
        return made

    display.display, display.HTML = show, str  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("bespoke.runs.notebook.REDRAWN", -1.0)
    return made


def test_what_bars_show(cell: Cell) -> None:
    assert in_notebook()
    with NotebookBars() as bars:
        bars.begin("runs/<b>fedavg</b>: FedAvg", 10, 2)
        bars.advance(3, "mse 0.1")
        lane = bars.lane()
        lane.begin("seed 1", 4)
        lane.advance()
        both = cell.shown[-1]
        lane.close()
        bars.advance()
    assert "&lt;b&gt;fedavg&lt;/b&gt;" in both
    assert '<progress value="5" max="10"></progress> 5/10 mse 0.1' in both
    assert '<progress value="1" max="4"></progress> 1/4' in both
    assert "seed 1" not in cell.shown[-2]
    assert '"6"' in cell.shown[-2]
    assert cell.shown[-1] == ""  # gone at the end


def test_no_bars_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    for found in (None, SimpleNamespace()):  # imported in a script; IPython in a terminal
        shell: Any = ModuleType("IPython")
        shell.get_ipython = lambda found=found: found
        monkeypatch.setitem(sys.modules, "IPython", shell)
        assert not in_notebook()
