"""Trained stages that several runs share: `stages/KEY/` of a comparison or tuning, complete or absent.

A stage appears there by one rename, with the digests of its files in `whole`. A damaged stage is removed and trained
again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from bespoke.digests import Damaged, check_files, digests, read_json, sealed
from bespoke.errors import UserError
from bespoke.privacy.account import Account
from bespoke.runs.folder import LOGS, Checkpoint, RunFolder
from bespoke.storage import write_text


def look_up(
    path: Path, place: int, account: Account | None, note: Callable[[str], None]
) -> tuple[RunFolder, Checkpoint] | None:
    """A stage that another run stored, if this run may use it."""
    if not (path / "whole").exists():
        return None
    try:
        shared = _whole(path)
        return shared if account is None or account.fits(path, place) else None
    except UserError as problem:
        note(f"{problem}; the stage is trained again")
        return None


def _whole(path: Path) -> tuple[RunFolder, Checkpoint]:
    """Reads the stage if it is intact, and removes it if it is damaged."""
    try:
        if (path / "whole").stat().st_size:  # empty: older versions kept no digests
            whole = read_json(path / "whole")
            if whole.get("stage") != path.name or not isinstance(whole.get("files"), dict):
                raise Damaged(f"{path / 'whole'} is damaged, or that of another stage")
            check_files(path, whole["files"], "the stage cannot be used")
        ended = max((path / "checkpoints").glob("*.safetensors"), default=path / "checkpoints" / "of its end")
        shared = RunFolder(path, path.name)
        return shared, shared.read(ended)
    except UserError:
        _take_away(path)
        raise


def share(
    path: Path, place: int, run: RunFolder, account: Account | None, ended: Callable[[RunFolder], Checkpoint]
) -> None:
    """Stores a trained stage where other runs find it: its logs, its account, and its last checkpoint."""
    if (path / "whole").exists():
        return

    def fill(entry: RunFolder) -> None:
        for log in LOGS:
            lines = [json.dumps(line) for line in run.log_lines(log) if line["stage"] == place]
            write_text(entry.path / log, "".join(f"{line}\n" for line in lines))
        if account:
            account.share(entry.path, place)
        entry.save(ended(entry))

    _put(path, fill)


def _put(path: Path, fill: Callable[[RunFolder], None]) -> None:
    """Lets `fill` write a stage, then renames it into place, because other processes may do the same."""
    making = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    (making / "checkpoints").mkdir(parents=True)
    fill(RunFolder(making, path.name))
    reseal(making, path.name)
    if path.exists() and not (path / "whole").exists():
        _take_away(path)
    try:
        os.replace(making, path)
    except OSError:
        shutil.rmtree(making, ignore_errors=True)
        if not (path / "whole").exists():  # otherwise another process was faster
            raise


def reseal(folder: Path, name: str) -> None:
    """Writes the digests of a stage's files."""
    files = digests(folder, [file for file in folder.rglob("*") if file.is_file() and file.name != "whole"])
    write_text(folder / "whole", json.dumps(sealed({"stage": name, "files": files})))


def _take_away(stage: Path) -> None:
    aside = stage.with_name(f".{stage.name}.damaged.{os.getpid()}")
    with contextlib.suppress(OSError):  # another process may be doing the same
        os.replace(stage, aside)
    shutil.rmtree(aside, ignore_errors=True)
