"""bespoke's answers, from its command line with defaults. Finished runs are kept; started runs are resumed."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.trust.tables import Table

from bespoke.cli.console import print_error
from bespoke.storage import write_text

SHUFFLES = 100  # in total, spread evenly over the tables
CHEAP = "--seeds 1"  # for shuffled tables; the decision rule is the same


def command(table: Table, path: Path, out: Path, settings: Sequence[str]) -> list[str]:
    """`bespoke compare` as a user would type it."""
    words = ["compare", str(path), "--client", table.client, "--target", table.target]
    words += ["--features", ",".join(table.features), *(["--task", table.task] if table.task else [])]
    return [*words, *settings, "--out", str(out), "--json"]


def compare(table: Table, path: Path, out: Path, settings: Sequence[str]) -> str:
    """Run one comparison, or go on with it; returns what happened. A failure is kept in OUT.error and counted."""
    error = out.with_suffix(".error")
    if (out / "summary.json").exists():
        return "done before"
    begun = time.perf_counter()
    resume = ["--resume"] if out.is_dir() and any(out.iterdir()) else []
    out.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "bespoke", *command(table, path, out, settings), *resume]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        said = process.communicate()[1]
    except KeyboardInterrupt:
        process.wait()  # Ctrl-C reached it too: it stops after the current round, so that it can go on
        raise
    if process.returncode == 130:
        raise KeyboardInterrupt
    if process.returncode:
        last = said.strip().splitlines()[-1] if said.strip() else "no message"
        write_text(error, f"exit code {process.returncode}: {last}\n")
        return f"failed: {last}"
    error.unlink(missing_ok=True)
    return f"{time.perf_counter() - begun:.0f} s"


def answers(tables: Sequence[Table], folder: Path, settings: str) -> None:
    """bespoke's answer for every table: FOLDER/bespoke/NAME."""
    jobs = [(table, None, folder / "bespoke" / table.slug) for table in tables]
    _all(jobs, folder, shlex.split(settings))


def shuffled(tables: Sequence[Table], folder: Path, settings: str, shuffles: int = SHUFFLES) -> None:
    """bespoke's answer for tables whose client column means nothing: FOLDER/shuffled/NAME-N."""
    turns = [(table, turn) for turn in range(-(-shuffles // len(tables))) for table in tables][:shuffles]
    jobs = [(table, turn, folder / "shuffled" / f"{table.slug}-{turn}") for table, turn in turns]
    _all(jobs, folder, shlex.split(settings))


def _all(jobs: Iterable[tuple[Table, int | None, Path]], folder: Path, settings: Sequence[str]) -> None:
    jobs = list(jobs)
    for place, (table, turn, out) in enumerate(jobs, 1):
        what = table.name if turn is None else f"{table.name}, shuffle {turn}"
        path = table.write(folder / "tables", turn)
        print_error(f"[{place}/{len(jobs)}] {what}: {compare(table, path, out, settings)}")
