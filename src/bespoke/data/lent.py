"""A population on disk for other processes to map: it goes with its owner or, if that was killed, with the next one."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path

from bespoke.data.population import Population

PREFIX, OWNER = "bespoke-population-", ".owner"


class Lent:
    """A folder with a population, which whoever made it holds a lock on as long as it lives."""

    def __init__(self, population: Population) -> None:
        _clear()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.lock = open(self.folder / f"{OWNER}.partial", "w")  # noqa: SIM115  (lives as long as the folder)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        Path(self.lock.name).rename(self.folder / OWNER)  # under this name it is never seen without its lock
        population.save(self.folder)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.lock.close()


def _clear() -> None:
    """Remove what killed processes left: it holds clients' rows."""
    for owner in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{OWNER}"):
        try:
            with open(owner, "r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner.parent, ignore_errors=True)
        except OSError:  # its owner lives, or is another user
            continue
