"""Digests, which detect later damage to files.

Files that are written at once carry their own digest (checkpoints, segments of private state, JSON). Other digests are
in the files that depend on them: a checkpoint has those of the logs up to its round, result.json those of the finished
run, `whole` those of a shared stage. Files of older versions, which have no digests, are read without a check.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bespoke.errors import UserError
from bespoke.plain import JsonObject

SEAL = "seal"  # the key of the digest in JSON
NO_RESULT = (  # in a run folder: may change after its end
    "result.json", "timing.jsonl", "report.html", "summary.json", "forgotten.json", "forgetting.safetensors",
)  # fmt: skip
AGAIN = "remove it and resume"


class Damaged(UserError):
    """A file's content differs from what was written."""


def new() -> Any:
    return hashlib.blake2b(digest_size=16)


def digest(*parts: bytes) -> str:
    made = new()
    for part in parts:
        made.update(part)
    return str(made.hexdigest())


def file_digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, new).hexdigest()
    except FileNotFoundError:
        return "missing"


def sealed(record: Mapping[str, object]) -> JsonObject:
    """The record with a digest of its content."""
    return {**record, SEAL: _of_record(record)}


def check_seal(record: JsonObject, where: object, advice: str = AGAIN) -> JsonObject:
    """The record without its digest, if the digest is right. Records of earlier versions have none."""
    rest = {name: value for name, value in record.items() if name != SEAL}
    if (SEAL in record or "written" in record) and record.get(SEAL) != _of_record(rest):
        raise Damaged(f"{where} is damaged: its contents do not match its digest; {advice}")
    return rest


def _of_record(record: Mapping[str, object]) -> str:
    plain = json.loads(json.dumps(record))  # the form after reading: keys are texts, tuples are lists
    return digest(json.dumps(plain, sort_keys=True).encode())


def read_json(path: Path, advice: str = AGAIN) -> JsonObject:
    """Reads a JSON object and checks its digest, if it has one."""
    return check_seal(parsed_json(path, advice), path, advice)


def parsed_json(path: Path, advice: str = AGAIN) -> JsonObject:
    """Parses a JSON object without checking its digest."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged ({error}); {advice}") from None
    if not isinstance(found, dict):
        raise Damaged(f"{path} is damaged (not a JSON object); {advice}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> JsonObject:
    """An object without duplicate keys; bespoke never writes any."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def digests(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in sorted(files)}


def results(folder: Path) -> list[Path]:
    """The files directly in a run folder that its result consists of or depends on."""
    found = (path for path in folder.iterdir() if path.is_file())
    return [path for path in found if path.name not in NO_RESULT and not path.name.startswith(".")]


def check_files(folder: Path, expected: dict[str, str], advice: str) -> None:
    """Compares files with their digests; the error names the first that differs."""
    for name, known in expected.items():
        found = file_digest(folder / name)
        if found != known:
            what = "is missing" if found == "missing" else "is damaged: its contents do not match its digest"
            raise Damaged(f"{folder / name} {what}; {advice}")


def check_finished(folder: Path, result: Mapping[str, Any]) -> None:
    """Compares the files of a finished run with their digests in result.json."""
    written = result.get("written") or {}
    if written and written.get("run") != file_digest(folder / "config.toml"):
        raise Damaged(
            f"{folder / 'result.json'} is not the result of {folder / 'config.toml'}: one of the two was changed or "
            "belongs to another run; put the right one back, or run the experiment again in another folder"
        )
    advice = f"remove {folder / 'result.json'} and resume, to make it again from the last checkpoint"
    check_files(folder, written.get("files") or {}, advice)


def broken_line(text: bytes) -> str:
    """The damaged line of a log in words: the first that is not a JSON object, if there is one."""
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            if line and not isinstance(json.loads(line), dict):
                return f"line {number}"
        except ValueError:
            return f"line {number}"
    return f"lines 1 to {len(lines)}"
