"""In how much of a comparison's time is nothing trained or scored?

    python benchmarks/outside_training.py                 # the default comparison; writes its section of docs/speed.md
    python benchmarks/outside_training.py hsb82 --seeds 1 # another comparison (arguments of `bespoke compare`); prints

Training means the rounds of a stage with the points of its learning curve, and the pooled fit beside the methods.
Scoring means that personal models are made, chosen and scored. A sampling profiler in each process
(benchmarks/stopwatch) records what the process does. A second counts as outside if no process trains or scores in it.
The time runs from before Python starts until it has ended.
"""

import argparse
import compileall
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import bespoke
import sections
from bespoke.cli.exit_codes import program
from bespoke.errors import UserError

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "speed.md"
INSIDE = ("training", "scoring")
IDLE = "waiting"
LONGEST = 0.5  # seconds from a process's last word to its end: it says something as often

Stretch = tuple[float, float, str]  # from, until, what


def stretches(notes: list[tuple[float, str]], end: float) -> list[Stretch]:
    """What one process did and when, from its notes. The last note holds until `end`, or until the notes stop."""
    heard = [at for at, _ in notes[1:]] + [min(end, notes[-1][0] + LONGEST)]
    return [(at, until, what) for (at, what), until in zip(notes, heard)]


def without(busy: Iterable[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """The gaps between begin and end that none of these stretches covers."""
    gaps, reached = [], begin
    for start, stop in sorted(busy):
        if start > reached:
            gaps.append((reached, min(start, end)))
        reached = max(reached, stop)
    return [*gaps, *([(reached, end)] if reached < end else [])]


def shares(processes: list[list[Stretch]], begin: float, end: float) -> dict[str, float]:
    """Seconds by activity. Outside: the activity of the first process, or of the others while it waits.

    The values sum to end - begin.
    """
    found: defaultdict[str, float] = defaultdict(float)
    every = [stretch for process in processes for stretch in process]
    gaps = without([(start, stop) for start, stop, what in every if what in INSIDE], begin, end)
    first, *others = sorted(processes, key=lambda process: process[0][0]) or [[]]
    found["training and scoring"] = end - begin - sum(stop - start for start, stop in gaps)
    for gap in gaps:
        alone = [(max(start, gap[0]), min(stop, gap[1]), what) for start, stop, what in first]
        alone = [stretch for stretch in alone if stretch[0] < stretch[1]]
        for start, stop, what in alone:
            if what != IDLE:
                found[what] += stop - start
                continue
            helping = [(max(a, start), min(b, stop), did) for process in others for a, b, did in process]
            reached = start
            for a, b, did in sorted(stretch for stretch in helping if stretch[0] < stretch[1] and stretch[2] != IDLE):
                found[f"{did}, in processes"] += max(b - max(a, reached), 0.0)
                reached = max(reached, b)
            idle = sum(b - a for a, b in without([(a, b) for a, b, did in helping if did != IDLE], start, stop))
            found["processes started and ended"] += idle
        silent = without([(start, stop) for start, stop, _ in alone], *gap)
        found["Python started and ended"] += sum(stop - start for start, stop in silent)
    return dict(found)


def measured(arguments: list[str]) -> tuple[dict[str, float], int]:
    """Seconds by activity, and the number of processes."""
    compileall.compile_dir(str(Path(bespoke.__file__).parent), quiet=2)  # as an installation does
    with tempfile.TemporaryDirectory() as temporary:
        notes = Path(temporary) / "notes"
        notes.mkdir()
        path = os.pathsep.join([str(HERE / "stopwatch"), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "bespoke", "compare", *arguments, "--out", str(Path(temporary) / "out")]
        begin = time.time()
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "STOPWATCH": str(notes)}
        )
        end = time.time()
        if done.returncode:
            raise UserError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        read = [[json.loads(line) for line in log.read_text().splitlines()] for log in notes.iterdir()]
    processes = [stretches([(at, what) for at, what in lines], end) for lines in read if lines]
    return shares(processes, begin, end), len(processes)


def table(found: dict[str, float]) -> str:
    whole = sum(found.values())
    rows = sorted(found.items(), key=lambda entry: (entry[0] != "training and scoring", -entry[1]))
    lines = ["| what | seconds | share |", "| --- | ---: | ---: |"]
    lines += [f"| {what} | {seconds:.1f} | {100 * seconds / whole:.1f} % |" for what, seconds in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, arguments = parser.parse_known_args()
    found, processes = measured(arguments)
    outside = 1 - found["training and scoring"] / sum(found.values())
    print(f"{100 * outside:.1f} % outside of training and scoring; {processes} processes\n{table(found)}")
    if arguments:
        return
    load = os.getloadavg()[0]
    text = f"""## Time outside of training and scoring

The default comparison, `bespoke compare` on Chem97 with its report, takes {sum(found.values()):.0f} seconds. In
**{100 * outside:.0f} %** of them nothing is trained or scored. Target: less than a fifth. {processes} processes on
{os.cpu_count()} cores; the load average at the end was {load:.0f}. Python
{platform.python_version()}. Command: `python benchmarks/outside_training.py`

{table(found)}

Training means the rounds of a stage with the points of its learning curve, and the pooled fit beside the methods.
Scoring means that personal models are made, chosen and scored. A sampling profiler in each process records what the
process does. A second counts as training and scoring if any process does one of them. Other seconds are assigned by
what the first process does, or, while it waits, by what the other processes do."""
    sections.put(PAGE, sections.parts(PAGE.read_text(encoding="utf-8"))[0], [text])


if __name__ == "__main__":
    program(main)
