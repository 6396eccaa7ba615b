"""python -m benchmarks.fedpc [rates | known | withheld | seasons | smollm2 | private | costs | examples | page]"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import benchmarks.fedpc
from benchmarks.fedpc import costs, examples, page, parts

from bespoke.cli.console import print_error
from bespoke.cli.exit_codes import program

PARTS = (*parts.PARTS, "costs", "examples", "page")


# glibc maps memory again for each of the many temporary tensors of a head of tens of megabytes. Touching these pages
# for the first time takes longer than the arithmetic. glibc reads this when a process starts, so it is set for the
# runs.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_TOP_PAD_": str(2**28)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fedpc",
        description=benchmarks.fedpc.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)} (default: all)", metavar="PART")
    parser.add_argument("--folder", type=Path, default=Path("runs/fedpc"), help="folder of all results")
    parser.add_argument("--output", type=Path, default=Path("docs/fedpc.md"), help="the page")
    parser.add_argument("--pretrained", help="another model than stories15M: a folder, a GGUF file or a name")
    parser.add_argument("--rounds", type=int, help="for a trial: rounds of every part")
    parser.add_argument("--most", type=int, help="for a trial: utterances of a user")
    parser.add_argument("--seeds", type=int, help="for a trial: how many")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: %(default)s)")
    asked = parser.parse_args()
    for name, value in KEEP_MEMORY.items():
        os.environ.setdefault(name, value)
    for name in asked.part:
        if name not in PARTS:
            parser.error(f"unknown part {name!r}; one of {', '.join(PARTS)}")
    for part in asked.part or PARTS:
        begun = time.monotonic()
        if part == "costs":
            costs.write(asked.folder / "costs.json", asked.pretrained or "stories15M")
        elif part == "examples":
            examples.tables(asked.folder)
        elif part == "page":
            page.write(asked.folder, asked.output)
        else:
            parts.run(part, asked)
        print_error(f"{part}: {(time.monotonic() - begun) / 60:.1f} minutes")


if __name__ == "__main__":
    program(main)
