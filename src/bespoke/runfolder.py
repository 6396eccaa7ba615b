"""The run folder: what a run is, on disk. Everything is written so that a kill at any instant loses nothing.

config.toml      the resolved experiment          rounds.jsonl   one line a round: cohort, cost, validation metrics
engine.json      how clients are executed         ledger.jsonl   one line a round: bytes, steps, what was revealed
clients.parquet  one row a test client            result.json    written last: totals; without it a run is unfinished
checkpoints/     server state and counters        private/       segments of private state
timing.jsonl     wall time: not a result
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from bespoke.data.arrays import open_arrays, settle, write_arrays, write_text
from bespoke.errors import UserError
from bespoke.tensors import Tree, flatten, unflatten

FORMAT = 1
LOGS = ("rounds.jsonl", "ledger.jsonl")


class OtherVersion(UserError):
    """A file of another version: not damaged, and not to be passed over."""


@dataclass
class Checkpoint:
    """Where a run stands: so many rounds of a stage are done."""

    stage: int
    round: int
    server: Tree
    logs: dict[str, int]  # lengths in bytes of the log files at this point
    segments: list[str]  # files of private state, in the order written
    about: dict[str, Any]


class RunFolder:
    """Reads and writes one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._logs: dict[str, Any] = {}  # open files: to open one for every line takes longer than a small round

    # -- life ----------------------------------------------------------------------------------------------------------
    @classmethod
    def create(cls, path: Path, config: str) -> RunFolder:
        """A new folder, or one in which this very experiment was begun."""
        folder = cls(path)
        begun = path / "config.toml"
        if begun.is_file() and begun.read_bytes() != config.encode():
            raise UserError(f"{path} already holds another experiment than this one; choose another folder")
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            write_text(path / "config.toml", config)
            for log in LOGS:
                (path / log).touch()
        except PermissionError as error:
            raise UserError(
                f"no permission to write to {path} ({error.strerror}); choose another place with --out"
            ) from None
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"{path} cannot be made a folder: a file of that name is in the way") from None
        return folder

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        if not (path / "config.toml").is_file():
            raise UserError(f"{path} is not a run folder: it has no config.toml")
        return cls(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time writes to a run."""
        lock = FileLock(self.path / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(f"{self.path} is in use by another process; wait for it or stop it") from None
        try:
            # by a process that was killed; safetensors writes under a temporary name of its own first
            for half_written in [*self.path.rglob(".*.partial"), *self.path.rglob(".tmp*")]:
                half_written.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    # -- logs ----------------------------------------------------------------------------------------------------------
    def append(self, log: str, entry: dict[str, Any]) -> None:
        if log not in self._logs:
            self._logs[log] = open(self.path / log, "ab", buffering=0)  # noqa: SIM115  (lives as long as the folder)
        line = f"{json.dumps(entry)}\n".encode()
        while line:  # at once, so that nothing is lost with the process; a full disk may take a part of it
            line = line[self._logs[log].write(line) :]

    def read_log(self, log: str) -> list[dict[str, Any]]:
        path = self.path / log
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]

    def log_lengths(self) -> dict[str, int]:
        return {log: (self.path / log).stat().st_size if (self.path / log).exists() else 0 for log in LOGS}

    def truncate_logs(self, lengths: dict[str, int]) -> None:
        """Forget lines written after the checkpoint: their rounds will be run again."""
        for log in LOGS:
            path = self.path / log
            if path.exists():
                os.truncate(path, lengths.get(log, 0))

    # -- checkpoints ---------------------------------------------------------------------------------------------------
    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, whole or not at all; only the last two and the stage's first are kept."""
        for log in LOGS:  # what the checkpoint says of the logs must be on disk before it
            if (self.path / log).exists():
                with open(self.path / log, "r+b") as file:
                    os.fsync(file.fileno())
        flat = flatten(checkpoint.server)
        about = {
            "format": FORMAT, "stage": checkpoint.stage, "round": checkpoint.round, "logs": checkpoint.logs,
            "segments": checkpoint.segments, "about": checkpoint.about, "digest": _digest(flat),
        }  # fmt: skip
        path = self._checkpoint(checkpoint.stage, checkpoint.round)
        write_arrays(path, flat, {"bespoke": json.dumps(about)})
        self.prune(checkpoint.stage)

    def prune(self, stage: int) -> None:
        """Remove all checkpoints but the last two and the stage's first."""
        for old in sorted((self.path / "checkpoints").glob("*.safetensors"))[:-2]:
            if old != self._checkpoint(stage, -1):
                old.unlink()

    def _checkpoint(self, stage: int, round: int) -> Path:
        return self.path / "checkpoints" / f"{stage:03d}-{round:07d}.safetensors"

    def beginning(self, stage: int) -> Checkpoint:
        """What a stage started from."""
        return read_checkpoint(self._checkpoint(stage, -1))

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint. A damaged one is passed over for the one before it."""
        problems = []
        for path in sorted((self.path / "checkpoints").glob("*.safetensors"), reverse=True):
            try:
                return read_checkpoint(path)
            except OtherVersion:
                raise
            except UserError as problem:
                problems.append(str(problem))
        if problems:
            raise UserError(
                f"no checkpoint of {self.path} can be read: {'; '.join(problems)}; to begin again, remove the folder"
            )
        return None

    # -- results -------------------------------------------------------------------------------------------------------
    def write_result(self, result: dict[str, Any]) -> None:
        write_text(self.path / "result.json", json.dumps({"format": FORMAT, **result}, indent=1))

    def result(self) -> dict[str, Any] | None:
        """What result.json says; None if the run is unfinished."""
        path = self.path / "result.json"
        if not path.exists():
            return None
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}); remove it and resume the run") from None
        if not isinstance(result, dict) or "format" not in result or "label" not in result:
            raise UserError(f"{path} is damaged (it is not a result); remove it and resume the run")
        if result.get("format") != FORMAT:
            raise UserError(f"{path} was written by another version (format {result.get('format')!r}, known: {FORMAT})")
        return result

    def write_table(self, name: str, columns: dict[str, Any]) -> None:
        import pyarrow
        from pyarrow import parquet

        temporary = self.path / f".{name}.partial"
        parquet.write_table(pyarrow.table(columns), temporary)
        settle(temporary, self.path / name)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint file."""
    flat, metadata = open_arrays(path)
    try:
        about = json.loads(metadata["bespoke"])
    except (KeyError, ValueError):
        raise UserError(f"{path} is not a checkpoint of bespoke") from None
    if about.get("format") != FORMAT:
        raise OtherVersion(f"{path} was written by another version (format {about.get('format')!r}, known: {FORMAT})")
    if _digest(flat) != about["digest"]:
        raise UserError(f"{path} is damaged: its contents do not match its digest")
    server = unflatten({name: leaf.clone() for name, leaf in flat.items()})
    return Checkpoint(about["stage"], about["round"], server, about["logs"], about["segments"], about["about"])


def _digest(flat: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(flat):
        leaf = flat[name].detach().contiguous()
        digest.update(f"{name} {leaf.dtype} {tuple(leaf.shape)}".encode())
        digest.update(leaf.reshape(-1).numpy().tobytes())
    return digest.hexdigest()
