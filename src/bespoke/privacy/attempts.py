"""The record of attempts: attempts.jsonl has a line for every round begun or finished, with its noise.

The account is computed from these lines, not from the plan. So it is right for a stage that another run trained, and
for rounds before privacy.json was changed or lost. Lines of a stage that was adopted from the cache name the stage
(`from`), and one of them the run that made it (`by`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bespoke.storage import write_text

Line = dict[str, Any]


class Made(NamedTuple):
    """How a round was made: noise multipliers on sum and client, and the largest participation rate of any client."""

    noise: float | None
    local_noise: float | None
    rate: float


class Attempts:
    """How each round (stage, number) was made, for every attempt."""

    def __init__(self, folder: Path, unsaid: Callable[[int], Made]) -> None:
        """Reads the lines of earlier processes; `unsaid`: the noise for lines without it, by stage."""
        self.folder, self.lines = folder, _read(folder)
        self.made: dict[str, dict[tuple[int, int], list[Made]]] = {"begun": {}, "done": {}}
        for line in self.lines:
            if line["what"] in self.made:
                made = Made(**line["made"]) if "made" in line else unsaid(line["stage"])
                self.made[line["what"]].setdefault((line["stage"], line["round"]), []).append(made)

    def begun(self, place: int, number: int) -> list[Made]:
        return self.made["begun"].get((place, number), [])

    def done(self, place: int, number: int) -> list[Made]:
        return self.made["done"].get((place, number), [])

    def last(self, place: int) -> int:
        """The last round of a stage that was begun; 0 if none is noted."""
        return max((number for stage, number in self.made["begun"] if stage == place), default=0)

    def share(self, stage: Path, place: int) -> None:
        """Stores the attempts at a stage beside it in the cache."""
        _write(stage, [line for line in self.lines if line["stage"] == place and line["what"] in self.made])

    def adopt(self, stage: Path, place: int, by: str) -> None:
        """Adds the attempts at a stage of the cache to this run's own: atomically, and once even if repeated."""
        kept = [line for line in self.lines if line["stage"] != place or "from" not in line]
        theirs = [{**line, "stage": place, "from": stage.name} for line in _read(stage)]
        _write(self.folder, [*kept, {"stage": place, "what": "adopted", "from": stage.name, "by": by}, *theirs])


def run_name(folder: Path) -> str:
    """The name of a run within a comparison or tuning: runs/fedavg-seed0."""
    return f"{folder.parent.name}/{folder.name}"


def adopted(folder: Path) -> dict[int, tuple[str, str]]:
    """The adopted stages of a run: their names in the cache, and the names of the runs that trained them."""
    return {line["stage"]: (line["from"], line["by"]) for line in _read(folder) if line["what"] == "adopted"}


def note(folder: Path, line: Line) -> None:
    """Appends a line, which is on disk when the call returns."""
    with open(folder / "attempts.jsonl", "ab") as file:
        file.write(f"\n{json.dumps(line)}".encode())
        file.flush()
        os.fsync(file.fileno())


def _write(folder: Path, lines: list[Line]) -> None:
    if lines:
        write_text(folder / "attempts.jsonl", "\n".join(json.dumps(line) for line in lines))


def _read(folder: Path) -> list[Line]:
    path, found = folder / "attempts.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:  # cut off by a kill, before noise was drawn or results were visible
            continue
    return found
