"""Printing of the commands: errors, JSON and reports."""

from __future__ import annotations

import csv
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any


def print_error(text: str) -> None:
    """Prints to stderr."""
    print(text, file=sys.stderr)


def print_json(value: Any) -> None:
    """Prints one JSON document. NaN and infinity become null, because JSON has neither."""

    def known(part: Any) -> Any:
        if isinstance(part, dict):
            return {str(name): known(entry) for name, entry in part.items()}
        if isinstance(part, list | tuple):
            return [known(entry) for entry in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    print(json.dumps(known(value), allow_nan=False))


def listed(text: str) -> list[str]:
    """Splits names at commas; a name that contains a comma stands in double quotes."""
    parts = next(csv.reader([text], skipinitialspace=True), [])
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def this_command() -> str:
    """The command that repeats this one, without its output options."""
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word == "--out":
            next(words, None)
        elif word != "--resume" and not word.startswith("--out="):
            kept.append(word)
    return shlex.join(["bespoke", *kept])


def show_report(paths: list[Path], output: Path, as_json: bool, name_clients: bool = False) -> None:
    """Reads the runs once, writes summary.json and the page, and prints the same report as text or JSON."""
    from bespoke.report.page import write_page
    from bespoke.report.report import Report
    from bespoke.storage import write_text

    report = Report.read(paths, name_clients)
    summary = report.summary
    if len(paths) == 1 and paths[0].is_dir():
        write_text(paths[0] / "summary.json", summary.to_json())
    write_page(report, output)
    if as_json:
        print_json({**json.loads(summary.to_json()), "report": str(output), "folder": str(paths[0])})
        return
    from bespoke.report.terminal import print_summary
    from bespoke.terminal import Terminal

    console = Terminal()
    print_summary(summary, console)
    console.print(f"\nReport: {output}", highlight=False, markup=False, soft_wrap=True)
