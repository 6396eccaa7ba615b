"""Runs a part of the study: `python benchmarks/self_fl synthetic | steps | uncertainty | page`, each with --help."""

import sys
from importlib import import_module
from pathlib import Path

from bespoke.cli.exit_codes import program

PARTS = ("synthetic", "steps", "uncertainty", "page")

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the folder of the package, not the package
    if len(sys.argv) < 2 or sys.argv[1] not in PARTS:
        sys.exit(f"usage: python benchmarks/self_fl {{{','.join(PARTS)}}} ... (each has --help)")
    program(import_module(f"self_fl.{sys.argv.pop(1)}").main)
