"""Losses of places where clients live: how many a run bears before it gives up.

A place that is gone took the private state of its clients with it. The run builds all places anew and goes on from its
last checkpoint, as a resumed run does (training.py); so its result is that of a run without the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bespoke.errors import RemoteLost


@dataclass
class Losses:
    """Counts losses in a row: a new checkpoint in between begins the count anew."""

    most: int  # in a row
    note: Callable[[str], None]
    since: int = 0
    point: object = None  # the checkpoint that the run went on from when it lost a place the last time

    def bear(self, lost: RemoteLost, point: object) -> None:
        """Note a loss since this checkpoint; raises it if there were too many."""
        self.since = self.since + 1 if point == self.point else 1
        self.point = point
        if not self.most:
            raise lost
        if self.since > self.most:
            raise RemoteLost(
                f"{lost} (lost {self.since} times in a row without a new checkpoint; the run can be resumed)"
            ) from lost
        self.note(f"{lost}; building all places anew and going on from the last checkpoint")
