"""python -m benchmarks.trust [tables | oracle | run | shuffle | page]"""

from __future__ import annotations

import argparse
from pathlib import Path

import benchmarks.trust
from benchmarks.trust import page, run, tables

from bespoke.cli.console import print_error
from bespoke.cli.exit_codes import program

PARTS = ("tables", "oracle", "run", "shuffle", "page")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trust",
        description=benchmarks.trust.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="?", choices=PARTS, help="one part (default: all)")
    parser.add_argument("--only", default="", metavar="NAMES", help="tables by name: Milk,plm/Males (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("runs/trust"), help="folder of all results")
    parser.add_argument("--output", type=Path, default=Path("docs/trust.md"), help="the page")
    parser.add_argument("--settings", default="", help="options of `bespoke compare`, for a trial: '--rounds 5'")
    parser.add_argument("--cheap", default=run.CHEAP, help="options for shuffled tables (default: %(default)s)")
    parser.add_argument(
        "--shuffles", type=int, default=run.SHUFFLES, help="number of shuffles in total (default: %(default)s)"
    )
    asked = parser.parse_args()
    chosen = tables.declared([name.strip() for name in asked.only.split(",") if name.strip()])
    for part in [asked.part] if asked.part else PARTS:
        if part == "tables":
            tables.show()
        elif part == "oracle":
            _consult(chosen, asked.folder)
        elif part == "run":
            run.answers(chosen, asked.folder, asked.settings)
        elif part == "shuffle":
            run.shuffled(chosen, asked.folder, f"{asked.settings} {asked.cheap}", asked.shuffles)
        else:
            page.write(chosen, asked.folder, asked.output)


def _consult(chosen: list[tables.Table], folder: Path) -> None:
    from benchmarks.trust import oracle

    for place, table in enumerate(chosen, 1):
        done = folder / "oracle" / f"{table.slug}.json"
        if not done.exists():
            oracle.consult(table, folder)
        print_error(f"[{place}/{len(chosen)}] {table.name}: {done}")


if __name__ == "__main__":
    program(main)
