"""Odd inputs: experiments, tables, command lines. A command must succeed, or end with exit code 2 and a message."""

from __future__ import annotations

import os
import random
import re
import shlex
from pathlib import Path

from benchmarks.attack import odd_commands, odd_experiments, odd_tables
from benchmarks.attack.campaign import Verdict
from benchmarks.attack.child import CRASH, SECONDS, Ended, bespoke

KINDS = (("experiment", 45), ("table", 40), ("command", 15))
FRAME = re.compile(r'File "([^"]*)", line (\d+), in (\S+)')
ERROR = re.compile(r"\w[\w.]*(Error|Exception|Warning|Invalid)")


def attempt(draw: random.Random, number: int, folder: Path, references: Path) -> Verdict:
    """Make one input, give it to the command line, and judge how that ends."""
    kind = draw.choices([name for name, _ in KINDS], [weight for _, weight in KINDS])[0]
    if kind == "command":
        words = odd_commands.make(draw, folder, references)
    else:
        words = (odd_experiments if kind == "experiment" else odd_tables).make(draw, folder)
    ended = bespoke(words, folder, before=_alone)
    return Verdict(kind, shlex.join(["bespoke", *words]), problem(ended), ended.code == 2, ended.said)


def _alone() -> None:
    """In the child: no data of this machine, which would only take time."""
    os.environ["BESPOKE_DATA"] = "nowhere"


def problem(ended: Ended) -> str:
    """What is wrong with how a command ended, if anything."""
    if ended.code is None:
        return f"it took more than {SECONDS:.0f} s"
    if CRASH in ended.said:
        return f"traceback: {crash(ended.said)}"
    if ended.orphans:
        return f"{ended.orphans} processes outlived it"
    if "\x1b" in ended.said:
        return "a terminal escape of the input is in the output"
    if ended.code == 1 and "bespoke: not enough memory" in ended.err:
        return ""
    if ended.code not in (0, 2):
        return f"exit code {ended.code}"
    if ended.code == 2 and not re.search(r"^(bespoke: \S|\s*Usage: )", ended.said, re.MULTILINE):
        return "exit code 2 without a message"
    return ""


def crash(text: str) -> str:
    """The error of a traceback and where in bespoke it came up: the same for the same fault."""
    last = next((line for line in reversed(text.splitlines()) if ERROR.match(line)), "")
    frames = [match for match in FRAME.finditer(text) if "/bespoke/" in match[1]]
    where = f"{frames[-1][1].rpartition('/bespoke/')[2]}:{frames[-1][2]}" if frames else "outside of bespoke"
    return f"{last[:200]} ({where})"
