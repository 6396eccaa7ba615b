"""A copy of a population on disk that other processes map. It is removed with its owner, or by the next owner."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from bespoke.data.population import Population

PREFIX = "bespoke-population-"


class SharedCopy:
    """A folder with a population, and a lock file that its owner holds as long as it lives."""

    def __init__(self, population: Population, place: Path | None = None) -> None:
        """`place`: the folder that it lies in, if not that of temporary files: one that other machines reach, too."""
        place = place or Path(tempfile.gettempdir())
        _clear(place)
        self.folder = place / f"{PREFIX}{secrets.token_hex(8)}"
        self.lock = FileLock(lock_of(self.folder), thread_local=False)  # another thread may close it
        self.lock.acquire()  # before there is a folder: it is never seen without its lock
        self.folder.mkdir(0o700)
        population.save(self.folder)

    def close(self) -> None:
        _remove(self.folder, self.lock)


def lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove(folder: Path, lock: FileLock) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)


def _clear(place: Path) -> None:
    """Removes folders that killed processes left behind, because they contain clients' rows."""
    for folder in place.glob(f"{PREFIX}*/"):
        if not lock_of(folder).exists():  # anybody's
            continue
        try:
            lock = FileLock(lock_of(folder), timeout=0)
            lock.acquire()
            _remove(folder, lock)
        except (Timeout, OSError):  # its owner lives, or is another user
            continue
