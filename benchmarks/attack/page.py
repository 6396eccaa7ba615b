"""The table of tries and failures, and its place in docs/reliability.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bespoke.errors import UserError

BEGIN, END = "<!-- attack: begin -->", "<!-- attack: end -->"


def records(folder: Path, part: str) -> list[dict[str, Any]]:
    """The last verdict of each try."""
    log = folder / f"{part}.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return list({line["id"]: line for line in map(json.loads, lines)}.values())


def failures(folder: Path, parts: list[str]) -> int:
    return sum(bool(record["problem"]) for part in parts for record in records(folder, part))


def table(folder: Path, parts: list[str]) -> str:
    """Tries and failures by kind, as Markdown."""
    lines = [
        "| part | kind | tries | of these refused | failures | core seconds a try |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for part in parts:
        found = records(folder, part)
        for kind in (*sorted({record["kind"] for record in found}), "all"):
            these = [record for record in found if kind in ("all", record["kind"])]
            if these:
                refused, failed = (sum(bool(record[key]) for record in these) for key in ("refused", "problem"))
                core = sum(record["core"] for record in these) / len(these)
                lines.append(f"| {part} | {kind} | {len(these):,} | {refused:,} | {failed:,} | {core:.2f} |")
    return "\n".join(lines)


def write(folder: Path, parts: list[str], output: Path) -> None:
    """Put the table where the page has its marks."""
    if not any(records(folder, part) for part in parts):
        raise UserError(f"there is no log of a campaign in {folder}; run python -m benchmarks.attack first")
    text = output.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"{output} has no marks {BEGIN} and {END} between which the table goes")
    output.write_text(f"{before}{BEGIN}\n{table(folder, parts)}\n{END}{after}", encoding="utf-8")
