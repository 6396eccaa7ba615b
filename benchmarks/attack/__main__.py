"""python -m benchmarks.attack [kills | damage | fuzz | page] [--count N] [--seed S] [--only ID]"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import benchmarks.attack

from bespoke.cli.console import print_error
from bespoke.cli.exit_codes import program
from bespoke.errors import UserError

COUNTS = {"kills": 200, "damage": 200, "fuzz": 10_000}


def main() -> int:
    asked = _arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported
    from benchmarks.attack import child, damage, fuzz, kills, page
    from benchmarks.attack.campaign import Campaign

    attempts = {"kills": kills.attempt, "damage": damage.attempt, "fuzz": fuzz.attempt}
    if asked.part == "page":
        page.write(asked.folder, list(COUNTS), asked.output)
        return 0
    child.ready()
    folder = asked.folder.resolve()
    shutil.rmtree(folder / "references", ignore_errors=True)
    if asked.only:
        part, seed, number = _id(asked.only)
        campaign = Campaign(part, attempts[part], folder, seed)
        record = campaign.one(number, keep=True)
        print_error((folder / "failures" / asked.only / "said.txt").read_text(encoding="utf-8"))
        return int(bool(record["problem"]))
    parts = [asked.part] if asked.part else list(COUNTS)
    counts = asked.count or [COUNTS[part] for part in parts]
    if len(counts) not in (1, len(parts)):
        raise UserError(f"--count has {len(counts)} numbers for {len(parts)} parts: give one for all, or one for each")
    for part, count in zip(parts, counts * len(parts)):
        Campaign(part, attempts[part], folder, asked.seed).run(count, asked.lanes, asked.minutes, asked.again)
    shutil.rmtree(folder / "references", ignore_errors=True)
    print(page.table(folder, parts))
    return int(page.failures(folder, parts) > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attack",
        description=benchmarks.attack.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="?", choices=(*COUNTS, "page"), help="one part of it (default: all campaigns)")
    parser.add_argument("--count", type=_numbers, metavar="N[,N,N]", help=f"tries of each part (default: {COUNTS})")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other tries (default: %(default)s)")
    parser.add_argument("--lanes", type=int, default=2, help="tries at a time (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no try of a part after so long")
    parser.add_argument("--again", action="store_true", help="repeat the tries that failed before")
    parser.add_argument("--only", metavar="ID", help="repeat one try, keep its folder, show what was said")
    parser.add_argument("--folder", type=Path, default=Path("runs/attack"), help="logs and failures (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("docs/reliability.md"), help="the page")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _id(text: str) -> tuple[str, int, int]:
    """(part, seed, number) of an id such as fuzz-0-17."""
    part, _, rest = text.partition("-")
    seed, _, number = rest.partition("-")
    if part not in COUNTS or not (seed.isdigit() and number.isdigit()):
        raise UserError(f"--only {text}: an id is PART-SEED-NUMBER, such as fuzz-0-17; parts: {', '.join(COUNTS)}")
    return part, int(seed), int(number)


if __name__ == "__main__":
    program(main)
