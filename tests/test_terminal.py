"""What reaches the terminal: no character of a user's data steers it."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from rich.table import Table
from rich.text import Text

from bespoke.cli.progress import Bars
from command import plain_table, write_csv

ESCAPES = {
    "hidden": "\x1b[8m", "title": "\x1b]0;owned\x07", "wipe": "\x1b[2J", "c1": "\x9b2J", "back": "\x08\x08",
    "bidi": "\u202e",
}  # fmt: skip
OURS = re.compile(r"\x1b\[[\d;]*m|\x1b\[\d*[AKG]|\x1b\[\?25[hl]|\r")  # colours, cursor up and on, line erased


def foreign(text: str) -> list[str]:
    """Sequences of the data that a terminal would still read, and controls that the program itself never writes."""
    left = [sequence for sequence in ESCAPES.values() if sequence in text]
    return left + re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", OURS.sub("", text))


def at_a_terminal(arguments: list[str], folder: Path) -> str:
    """Everything that a process shows on a real terminal of a hundred columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=theirs, stderr=theirs, cwd=folder,
        env={**os.environ, "COLUMNS": "100", "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        shown += piece
    os.close(ours)
    process.wait(60)
    return shown.decode()


def hostile_table() -> pd.DataFrame:
    """Every name that a table can bring along, with an escape in it."""
    table = plain_table(8, 12)
    bad = list(ESCAPES.values())
    table["client"] = [f"{name}{bad[int(name[1:]) % len(bad)]}" for name in table["client"]]
    table["district"] = [f"d{bad[int(name[1]) % 2]}" for name in table["client"]]
    table["y"] = [f"low{bad[0]}" if y < 0 else f"high{bad[1]}" for y in table["y"]]
    return table.rename(columns={"x1": f"x1{bad[2]}"})


def test_a_comparison_of_hostile_names_at_a_terminal(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", hostile_table())
    shown = at_a_terminal(
        ["-m", "bespoke", "compare", "t.csv", "--client", "client", "--target", "y", "--group", "district", "--methods",
         "fedavg,local", "--rounds", "2", "--seeds", "1", "--no-tune", "--model", "logistic", "--jobs", "1"], tmp_path,
    )  # fmt: skip
    assert "Report: " in shown
    assert "\x1b[1m" in shown  # it is in colours: the escapes that are left are the program's own
    assert "\ufffd" in shown
    assert foreign(shown) == []


def test_errors_warnings_and_tracebacks_at_a_terminal(tmp_path: Path) -> None:
    bad = ESCAPES["wipe"] + ESCAPES["title"]
    shown = at_a_terminal(["-m", "bespoke", "report", f"nowhere{bad}"], tmp_path)
    assert "nowhere" in shown
    script = (
        "import warnings; from bespoke.cli.exit_codes import program\n"
        f"def work():\n  print('said', {bad!r})\n  warnings.warn('warned' + {bad!r})\n"
        f"  raise RuntimeError('broken' + {bad!r})\nprogram(work)"
    )
    shown += at_a_terminal(["-c", script], tmp_path)
    for word in ("said", "warned", "broken", "Traceback"):
        assert word in shown
    assert foreign(shown) == []


def test_bars_and_tables_show_names_without_their_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ESCAPES.values():
        out = io.StringIO()
        monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys, "stderr", out)
        with Bars(f"comparing {name}") as bars:
            bars.begin(f"run {name}", 2)
            bars.advance(1, f"note {name}")
            bars.note(f"found {name}")
            bars.bars.refresh()
            table = Table(f"column {name}", title=f"title {name}")
            table.add_row(Text(f"cell {name}", "bold"))
            bars.console.print(table)
        for word in ("comparing", "run", "note", "found", "column", "title", "cell"):
            assert word in out.getvalue()
        assert foreign(out.getvalue()) == []


def test_nothing_prints_past_the_guard() -> None:
    """Every console of the package is a Terminal."""
    source = Path(__file__).parents[1] / "src/bespoke"
    made = [path.name for path in source.rglob("*.py") if re.search(r"\bConsole\(", path.read_text(encoding="utf-8"))]
    assert made == []
