"""What commands print."""

from __future__ import annotations

import csv
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any


def say(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document; not-a-number and infinity, which JSON does not know, become null."""

    def known(part: Any) -> Any:
        if isinstance(part, dict):
            return {str(name): known(entry) for name, entry in part.items()}
        if isinstance(part, list | tuple):
            return [known(entry) for entry in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    print(json.dumps(known(value), allow_nan=False))


def listed(text: str) -> list[str]:
    """Names between commas; one that contains a comma stands in double quotes."""
    parts = next(csv.reader([text], skipinitialspace=True), [])
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def this_command() -> str:
    """The command that repeats this, without what only says where it is written and how it came about."""
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word == "--out":
            next(words, None)
        elif word != "--resume" and not word.startswith("--out="):
            kept.append(word)
    return shlex.join(["bespoke", *kept])


def show_report(paths: list[Path], output: Path, as_json: bool, name_clients: bool = False) -> None:
    from bespoke.data.arrays import write_text
    from bespoke.metrics.summary import summarize
    from bespoke.reports.html import write_report

    summary = summarize(paths, name_clients)
    if len(paths) == 1 and paths[0].is_dir():
        write_text(paths[0] / "summary.json", summary.to_json())
    write_report(paths, output, name_clients)
    if as_json:
        print_json({**json.loads(summary.to_json()), "report": str(output), "folder": str(paths[0])})
        return
    from bespoke.reports.table import print_summary
    from bespoke.terminal import Terminal

    console = Terminal()
    print_summary(summary, console)
    console.print(f"\nReport: {output}", highlight=False, markup=False, soft_wrap=True)
