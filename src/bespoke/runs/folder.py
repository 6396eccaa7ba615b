"""The run folder on disk. A kill at any moment loses no finished work.

config.toml      the resolved experiment          rounds.jsonl   one line a round: cohort, cost, validation metrics
engine.json      how clients are executed         ledger.jsonl   one line a round: bytes, steps, what was revealed
clients.parquet  one row a test client            result.json    written last: totals; without it a run is unfinished
checkpoints/     server state and counters        private/       segments of private state
timing.jsonl     wall time: not a result
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, overload

from filelock import FileLock, Timeout
from numpy.typing import NDArray
from torch import Tensor

from bespoke.digests import (
    SEAL,
    Damaged,
    broken_line,
    check_finished,
    check_seal,
    digest,
    digests,
    file_digest,
    new,
    parsed_json,
    results,
    sealed,
)
from bespoke.errors import UserError
from bespoke.federation.segments import read_segment
from bespoke.plain import JsonObject
from bespoke.records import RESULT_FORMAT, LedgerLine, RoundLine, RunRecord
from bespoke.storage import open_arrays, settle, write_arrays, write_text
from bespoke.tensors import Tree, flatten, unflatten

CHECKPOINT = 2  # the format of checkpoints; 1 had a digest of the server's state only
LOGS = ("rounds.jsonl", "ledger.jsonl")
ATTEMPTS = "attempts.jsonl"  # the spent privacy budget: lines are only added, never removed
SETTLED = ("engine.json", "privacy.json")  # written when a run begins; checkpoints hold a copy
Mark = tuple[int, str | None]  # a log's length in bytes (of ATTEMPTS: in lines), and the digest of that part


class CheckpointRefused(UserError):
    """An error that an earlier checkpoint cannot repair."""


@dataclass
class Checkpoint:
    """The position of a run: this many rounds of a stage are done."""

    stage: int
    round: int
    server: Tree
    logs: dict[str, Mark]  # the log files at this point
    segments: list[str]  # files of private state, in the order written
    about: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)  # the contents of the files of SETTLED
    passed_over: tuple[str, ...] = ()  # problems of the later checkpoints, which were skipped
    verified: bool = True  # False: written by a version without digests of logs and private state


class RunFolder:
    """Reads and writes one run. `run` is its identity; files of other runs are refused."""

    def __init__(self, path: Path, run: str | None = None) -> None:
        self.path, self._run = path, run
        self._logs: dict[str, Any] = {}  # open files: opening one for every line takes longer than a small round
        self._hashed: dict[str, tuple[Any, int]] = {}  # by log: the digest so far, and its number of bytes
        self._spent = AttemptLines(path / ATTEMPTS)
        self._named: dict[Path, list[str]] = {}  # by checkpoint: the segments it needs

    @property
    def run(self) -> str:
        if self._run is None:
            self._run = file_digest(self.path / "config.toml")
        return self._run

    # -- life ----------------------------------------------------------------------------------------------------------
    @classmethod
    def create(cls, path: Path, config: str) -> RunFolder:
        """A new folder, or an existing one with exactly this experiment."""
        folder = cls(path)
        begun = path / "config.toml"
        if begun.is_file() and begun.read_bytes() != config.encode():
            raise UserError(f"{begun} holds a different experiment, or was changed; choose another folder")
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
        """Locks the run: one process at a time may write."""
        lock = FileLock(self.path / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(f"{self.path} is in use by another process; wait for it or stop it") from None
        try:
            # leftovers of a killed process; safetensors has temporary names of its own
            for half_written in [*self.path.rglob(".*.partial"), *self.path.rglob(".tmp*")]:
                half_written.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    # -- logs ----------------------------------------------------------------------------------------------------------
    def append(self, log: str, entry: Mapping[str, object]) -> None:
        if log not in self._logs:
            self._logs[log] = open(self.path / log, "ab", buffering=0)  # noqa: SIM115  (lives as long as the folder)
        line = f"{json.dumps(entry)}\n".encode()
        while line:  # unbuffered, so that a kill loses nothing; a full disk may accept only a part
            line = line[self._logs[log].write(line) :]

    @overload
    def read_log(self, log: Literal["rounds.jsonl"]) -> list[RoundLine]: ...
    @overload
    def read_log(self, log: Literal["ledger.jsonl"]) -> list[LedgerLine]: ...
    def read_log(self, log: str) -> Any:
        return self.log_lines(log)

    def log_lines(self, log: str) -> list[JsonObject]:
        """The lines of any log."""
        path = self.path / log
        if not path.exists():
            return []
        text = path.read_bytes()
        try:
            return [json.loads(line) for line in text.splitlines() if line]
        except ValueError as error:
            raise Damaged(f"{path}, {broken_line(text)}, is damaged ({error}); {self._begin_again()}") from None

    def marks(self) -> dict[str, Mark]:
        """The current lengths and digests of the logs; only new lines are read."""
        found: dict[str, Mark] = {ATTEMPTS: self._spent.mark()} if self._spent.path.exists() else {}
        for log in LOGS:
            if (self.path / log).exists():
                made, length = self._hashed.get(log) or (new(), 0)
                with open(self.path / log, "r+b") as file:
                    file.seek(length)
                    added = file.read()
                    os.fsync(file.fileno())  # logs must be on disk before the checkpoint that names them
                made.update(added)
                self._hashed[log] = made, length + len(added)
                found[log] = length + len(added), made.hexdigest()
        return found

    def rewind(self, marks: dict[str, Mark]) -> None:
        """Removes log lines after the checkpoint; their rounds are repeated."""
        for log in LOGS:
            self._hashed.pop(log, None)
            length, _ = marks.get(log, (0, None))
            if (self.path / log).exists() and (self.path / log).stat().st_size > length:
                os.truncate(self.path / log, length)

    def _check_log(self, log: str, mark: Mark) -> None:
        """Compares the beginning of a log with what a checkpoint records of it."""
        (length, known), path = mark, self.path / log
        text = path.read_bytes()[:length] if path.exists() else b""
        if len(text) < length:
            lines = text.count(b"\n")
            what = f"ends in line {lines + 1}" if path.exists() else "is missing"
            raise Damaged(f"{path} {what}: it has {len(text):,} bytes of the {length:,} that were written")
        if known is not None and digest(text) != known:
            raise Damaged(f"{path}, {broken_line(text)}: damaged, the contents do not match their digest")

    # -- checkpoints ---------------------------------------------------------------------------------------------------
    def save(self, checkpoint: Checkpoint, keep: int = 2) -> None:
        """Writes a checkpoint atomically; keeps only the last `keep` checkpoints and the stage's first."""
        self.write_checkpoint(checkpoint)
        self.prune(checkpoint.stage, keep)

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint and leaves all others."""
        flat = flatten(checkpoint.server)
        settled = [self.path / name for name in SETTLED if (self.path / name).exists()]
        about = {
            "format": CHECKPOINT, "run": self.run, "stage": checkpoint.stage, "round": checkpoint.round,
            "logs": checkpoint.logs, "segments": checkpoint.segments, "about": checkpoint.about,
            "files": {path.name: path.read_text(encoding="utf-8") for path in settled}, "digest": _digest(flat),
        }  # fmt: skip
        path = self.checkpoint_path(checkpoint.stage, checkpoint.round)
        write_arrays(path, flat, {"bespoke": json.dumps(sealed(about))})
        self._named[path] = list(checkpoint.segments)

    def prune(self, stage: int, keep: int = 2) -> None:
        """Removes all checkpoints but the last `keep` and the stage's first, and the private state of removed ones."""
        paths = sorted((self.path / "checkpoints").glob("*.safetensors"))
        kept = {*paths[-keep:], self.checkpoint_path(stage, -1)}
        for old in paths:
            if old not in kept:
                old.unlink()
        for path in kept - self._named.keys():
            try:
                self._named[path] = self.read(path).segments
            except UserError:  # a damaged checkpoint cannot be resumed from
                self._named[path] = []
        stood_on = {name for path in kept for name in self._named[path]}
        for segment in (self.path / "private").glob("*.safetensors"):
            if segment.name not in stood_on:
                segment.unlink()

    def go_back(self, found: Checkpoint) -> None:
        """Resets the folder to a checkpoint: files settled before it stay, later checkpoints go."""
        for name, text in found.files.items():
            path = self.path / name
            if not path.exists() or path.read_bytes() != text.encode():
                write_text(path, text)
        newest = self.checkpoint_path(found.stage, found.round)
        for path in (self.path / "checkpoints").glob("*.safetensors"):
            if path > newest:  # damaged, and skipped
                path.unlink()
        self.prune(found.stage)

    def checkpoint_path(self, stage: int, round: int) -> Path:
        return self.path / "checkpoints" / f"{stage:03d}-{round:07d}.safetensors"

    def read(self, path: Path) -> Checkpoint:
        """A checkpoint of this run."""
        return read_checkpoint(path, self.run)

    def beginning(self, stage: int) -> Checkpoint:
        """The state from which a stage started."""
        return self.read(self.checkpoint_path(stage, -1))

    def latest(self) -> Checkpoint | None:
        """The newest intact checkpoint with intact files behind it; damaged ones are skipped."""
        problems: list[str] = []
        for path in sorted((self.path / "checkpoints").glob("*.safetensors"), reverse=True):
            try:
                found = self.read(path)
                self._check_spent(found)
                for log in LOGS:
                    if log in found.logs:
                        self._check_log(log, found.logs[log])
                self._check_stood_on(found)
                found.passed_over = tuple(dict.fromkeys(problems))
                return found
            except CheckpointRefused:
                raise
            except UserError as problem:
                problems.append(str(problem))
        if problems:
            said = "; ".join(dict.fromkeys(problems))
            raise UserError(f"no checkpoint of {self.path} can be used: {said}; {self._begin_again()}")
        return None

    def final(self) -> Checkpoint | None:
        """The last checkpoint of a finished run. No earlier one may replace it."""
        result = self._result()
        ended = result.get("written", {}).get("checkpoint") if result else None
        if ended is None:
            return self.latest()
        found = self.read(self.path / "checkpoints" / ended)
        self._check_stood_on(found)
        return found

    def _check_stood_on(self, found: Checkpoint) -> None:
        for name in found.segments:
            read_segment(self.path / "private" / name, verify=found.verified, run=self.run)
        if found.stage and found.round >= 0:
            self.beginning(found.stage)

    def _check_spent(self, found: Checkpoint) -> None:
        """Refuses to resume if the record of the spent privacy budget is lost."""
        lines, known = found.logs.get(ATTEMPTS, (0, None))
        if known is not None and AttemptLines(self.path / ATTEMPTS).mark(lines) != (lines, known):
            raise CheckpointRefused(
                f"{self.path / ATTEMPTS} is missing or damaged (lines 1 to {lines}): what was spent of the privacy "
                f"budget is unknown. Put the file back, or count its budget as spent, and {self._begin_again()}"
            )

    def _begin_again(self) -> str:
        return f"to begin again, remove the folder {self.path}"

    # -- results -------------------------------------------------------------------------------------------------------
    def write_result(self, result: RunRecord) -> RunRecord:
        """Writes result.json with the digests of all files behind it; returns its content."""
        newest = max((path.name for path in (self.path / "checkpoints").glob("*.safetensors")), default=None)
        files = digests(self.path, results(self.path))
        written = {"run": self.run, "checkpoint": newest, "files": files}
        record = sealed({"format": RESULT_FORMAT, **result, "written": written})
        text = json.dumps(record, indent=1)
        write_text(self.path / "result.json", text)
        return cast(RunRecord, {k: v for k, v in json.loads(text).items() if k not in (SEAL, "written")})

    def reseal(self) -> None:
        """Renews the digests of a finished run after its files were changed on purpose."""
        result = self._result()
        if result is not None:
            self.write_result(cast(RunRecord, {k: v for k, v in result.items() if k not in ("format", "written")}))

    def result(self) -> RunRecord | None:
        """The content of result.json, after verifying all files behind it; None if the run is unfinished."""
        result = self._result()
        if result is not None:
            check_finished(self.path, result)
            result.pop("written", None)
        return result

    def _result(self) -> RunRecord | None:
        path = self.path / "result.json"
        if not path.exists():
            return None
        advice = "remove it and resume the run"
        result = parsed_json(path, advice)
        if "format" not in result or "label" not in result:
            raise Damaged(f"{path} is damaged (it is not a result); {advice}")
        if result.get("format") != RESULT_FORMAT:
            raise UserError(
                f"{path} was written by another version (format {result.get('format')!r}, known: {RESULT_FORMAT})"
            )
        return cast(RunRecord, check_seal(result, path, advice))

    def write_table(self, name: str, columns: Mapping[str, Sequence[Any] | NDArray[Any]]) -> None:
        import pyarrow
        from pyarrow import parquet

        temporary = self.path / f".{name}.partial"
        parquet.write_table(pyarrow.table(columns), temporary)
        settle(temporary, self.path / name)


def read_checkpoint(path: Path, run: str | None = None) -> Checkpoint:
    """Reads and verifies a checkpoint file; `run` is the expected identity."""
    flat, metadata = open_arrays(path)
    try:
        about = json.loads(metadata["bespoke"])
        version = about["format"]
    except (KeyError, ValueError, TypeError):
        raise Damaged(f"{path} is not a checkpoint of bespoke") from None
    if version not in (1, CHECKPOINT):
        raise CheckpointRefused(f"{path} was written by another version (format {version!r}, known: {CHECKPOINT})")
    about = check_seal(about, path, "it cannot be used")
    try:
        if _digest(flat) != about["digest"]:
            raise Damaged(f"{path} is damaged: its contents do not match its digest")
        marks = {log: (mark, None) if version == 1 else tuple(mark) for log, mark in about["logs"].items()}
        server = unflatten({name: leaf.clone() for name, leaf in flat.items()})
        found = Checkpoint(
            about["stage"], about["round"], server, marks, list(about["segments"]), about["about"],
            about.get("files", {}), verified=version > 1,
        )  # fmt: skip
        named = f"{found.stage:03d}-{found.round:07d}"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{path} is damaged ({error!r})") from None
    if path.stem != named or (version > 1 and run is not None and about["run"] != run):
        raise Damaged(f"{path} holds the checkpoint {named} of {'this' if about.get('run') == run else 'another'} run")
    return found


class AttemptLines:
    """The number and the digest of the lines of attempts.jsonl, without reading any line twice.

    It counts lines, not bytes: a kill may cut off a line, and when a stage is adopted, the file is rewritten with the
    same lines at its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.file, self.bytes, self.lines, self.digest = path, 0, 0, 0, new()

    def mark(self, most: float = math.inf) -> Mark:
        """The number of lines, at most `most`, and their digest."""
        if not self.path.exists():
            return 0, None
        file = self.path.stat().st_ino
        if file != self.file:
            self.file, self.bytes, self.lines, self.digest = file, 0, 0, new()
        with open(self.path, "rb") as opened:
            opened.seek(self.bytes)
            added = opened.read()
        self.bytes += len(added)
        for line in added.splitlines():
            if self.lines < most and _is_json(line):
                self.lines += 1
                self.digest.update(line + b"\n")
        return self.lines, self.digest.hexdigest()


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _digest(flat: dict[str, Tensor]) -> str:
    made = new()
    for name in sorted(flat):
        leaf = flat[name].detach().contiguous()
        made.update(f"{name} {leaf.dtype} {tuple(leaf.shape)}".encode())
        made.update(leaf.reshape(-1).numpy().tobytes())
    return str(made.hexdigest())
