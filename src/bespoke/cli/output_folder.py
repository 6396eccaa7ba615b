"""Output folders of commands: where results go, and how an interrupted command is resumed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bespoke.errors import UserError
from bespoke.runs.events import Interrupted

# What lies in a folder that a command has begun: the only folders that --resume goes on with.
BEGUN = {
    "compare": ("compare.json", "runs", "tuning", "stages"),
    "run": ("config.toml", "checkpoints"),
    "tune": ("search.json",),
    "rescore": (),  # it is over before anybody would stop it
}


class Stopped(Exception):
    """Ctrl-C, with the next step for the user."""


def _folders(stem: str) -> Iterator[Path]:
    """runs/STEM, runs/STEM-2, runs/STEM-3, ..."""
    yield Path("runs") / stem
    for number in range(2, 10_000):
        yield Path("runs") / f"{stem}-{number}"
    raise UserError(f"runs/{stem} to runs/{stem}-9999 exist already; choose a folder with --out")


def place(out: Path | None, stem: str, resume: bool, kind: str) -> Path:
    """The output folder: a new one, or with --resume an existing one."""
    if out is None and not resume:
        return next(path for path in _folders(stem) if not path.exists())
    if out is None:
        begun = sorted(str(path) for path in Path("runs").glob(f"{stem}*") if _begun(path, kind))
        begun = [path for path in begun if path.removeprefix(f"runs/{stem}").lstrip("-").isdigit() or path[5:] == stem]
        if len(begun) != 1:
            found = f"there are {', '.join(begun)}" if begun else f"there is no runs/{stem}"
            raise UserError(f"--resume: which {kind} is to go on? Say --out FOLDER ({found})")
        return Path(begun[0])
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder, which may be new")
    empty = not out.is_dir() or not any(out.iterdir())
    if resume and not out.is_dir():
        raise UserError(f"--resume: there is no folder {out}; leave --resume out to begin there")
    if resume and not empty and not _begun(out, kind):
        lacks = " or ".join(BEGUN[kind])
        raise UserError(f"--resume: {out} holds nothing that `bespoke {kind}` began (no {lacks}); choose another --out")
    if not resume and not empty:
        rest = "add --resume to go on with it, or " if _begun(out, kind) else ""
        raise UserError(f"--out {out} exists already and is not empty; {rest}choose another folder")
    return out


def _begun(folder: Path, kind: str) -> bool:
    return any((folder / name).exists() for name in BEGUN[kind])


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Adds to every interruption or error inside the command that resumes the work."""
    arguments = [a for a in sys.argv[1:] if a != "--resume"]
    if not any(a == "--out" or a.startswith("--out=") for a in arguments):
        arguments += ["--out", str(folder)]
    again = shlex.join(["bespoke", *arguments, "--resume"])
    try:
        yield
    except KeyboardInterrupt:
        kept = f"what was finished is kept; go on with: {again}" if folder.exists() else "nothing was written"
        raise Stopped(f"interrupted; {kept}") from None
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = str(folder)  # a write that fails does not know the name of its file
        if folder.exists():
            error.add_note(f"Nothing finished is lost; afterwards go on with: {again}")
        raise
    except Interrupted as error:
        raise Stopped(f"{error}; go on with: {again}") from None
    except Exception as error:
        if "WorkerFailed" in (kind.__name__ for kind in type(error).__mro__):  # by name: its module is heavy to import
            error.add_note(f"Nothing finished is lost; go on with: {again}")
        raise


@contextmanager
def goes_on() -> Iterator[None]:
    """Handles Ctrl-C in work that continues when the same command is repeated."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted):
        again = shlex.join(["bespoke", *sys.argv[1:]])
        raise Stopped(f"interrupted; what was finished is kept; go on with: {again}") from None
