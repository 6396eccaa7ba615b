"""Files of run, comparison and tuning folders that are damaged: the same results, or refused with the file's name.

A folder is finished, or its command was killed. One of its files is damaged; then a command continues with the folder
or reads it. The resulting files are compared with those of an intact folder.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import shutil
from pathlib import Path
from typing import Any

from benchmarks.attack.campaign import Verdict
from benchmarks.attack.child import CRASH, Ended, bespoke
from benchmarks.attack.events import Events
from benchmarks.attack.fuzz import crash
from benchmarks.attack.kills import SLOW, differences, last_line, once, prepare, reference, results
from benchmarks.attack.worlds import Case, cases

WAYS = ("flipped", "cut", "emptied", "deleted", "zeroed", "padded", "swapped", "lowered", "line lost", "line twice")
KILLS = 6  # so many unfinished folders of each case
READING = {"run": ("report", "export", "analyze"), "compare": ("report", "analyze"), "tune": ()}


def attempt(draw: random.Random, number: int, folder: Path, references: Path) -> Verdict:
    """Damage one file of one folder, let a command have it, and judge how that ends."""
    command, finished = draw.choice(("run", "run", "compare", "tune")), draw.random() < 0.4
    known = [case for case in cases() if case.command[0] == command and not case.secret and case.kind != "workers"]
    case, kind = draw.choice(known), f"{command}, {'finished' if finished else 'killed'}"
    about = reference(case, references)
    if about["problem"]:
        return Verdict(kind, f"{case.name}: not damaged", about["problem"])
    whole = Path(about["folder"]) if finished else _unfinished(case, about["events"], draw.randrange(KILLS), references)
    _copy(whole, folder)
    words = _command(draw, case, finished)
    files = [path for path in sorted((folder / "out").rglob("*")) if path.is_file() and path.name != ".lock"]
    if not files:
        return Verdict(kind, f"{case.name}: killed before there was a file")
    path = draw.choice(files)
    way, *damaged = spoil(path, draw.choice(WAYS), draw, files)
    names = [str(each.relative_to(folder / "out")) for each in damaged]
    story = f"{case.name}: {' with '.join(names)} {way}; bespoke {' '.join(words)}"
    ended = bespoke(words, folder, limit=SLOW)
    mentioned = any(each.name in ended.said for each in damaged)
    if way == "deleted" and path.name == "result.json":  # then the run is simply not finished
        mentioned = mentioned or "unfinished" in ended.said
    found, expected = results(folder / "out"), _expected(case, words, about, references)
    if "--resume" not in words:  # such a command repairs nothing
        for each, name in itertools.product((found, expected), names):
            each.pop(name, None)
    return Verdict(kind, story, _problem(ended, mentioned, found, expected), ended.code == 2, ended.said)


def spoil(path: Path, way: str, draw: random.Random, files: list[Path]) -> tuple[Any, ...]:
    """Damage a file in this way, or flip a bit where the way does not apply; returns what was done, and to what."""
    content, mode = bytearray(path.read_bytes()), path.stat().st_mode
    others = [other for other in files if other.suffix == path.suffix and other.read_bytes() != bytes(content)]
    numbers = list(re.finditer(rb"[1-9]\d*", bytes(content[:4000])))
    lines = bytes(content).splitlines(keepends=True)
    if way == "deleted":
        path.unlink()
        return way, path
    if way == "swapped" and others:
        other = draw.choice(others)
        path.write_bytes(other.read_bytes())
        other.write_bytes(bytes(content))
        return way, path, other
    if not content:
        path.write_bytes(b"\x00" * 7)
        return "padded", path
    if way == "lowered" and numbers:
        found = draw.choice(numbers)
        lower = str(int(found[0]) - 1).encode().rjust(len(found[0]), b"0" if path.suffix == ".parquet" else b" ")
        content[found.start() : found.end()] = lower
    elif way == "line lost" and len(lines) > 1:
        del lines[draw.randrange(len(lines))]
        content = bytearray(b"".join(lines))
    elif way == "line twice" and len(lines) > 1:
        place = draw.randrange(len(lines))
        content = bytearray(b"".join([*lines[:place], lines[place], *lines[place:]]))
    elif way == "cut":
        del content[draw.randrange(len(content)) :]
    elif way == "emptied":
        content.clear()
    elif way == "zeroed":
        begin = draw.randrange(len(content))
        end = min(len(content), begin + draw.choice((1, 64, 4096)))
        content[begin:end] = bytes(end - begin)
    elif way == "padded":
        content += bytes(draw.choice((1, 64, 4096)))
    else:
        way = "flipped"
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(bytes(content))
    path.chmod(mode)
    return way, path


def _command(draw: random.Random, case: Case, finished: bool) -> list[str]:
    """What goes on with the folder, or reads it."""
    reading = READING[case.command[0]]
    if not finished or not reading or draw.random() < 0.5:
        return case.words(resume=True)
    chosen = draw.choice(reading)
    more = ["--client", "0000001"] if chosen == "export" else []
    return [chosen, "out", *more]


def _unfinished(case: Case, events: int, number: int, references: Path) -> Path:
    """A folder of the case that was killed in one of a few places."""

    def make(folder: Path) -> None:
        case.write(folder)
        (folder / "out").mkdir()
        at = int(events * (number + 0.9) / KILLS)
        before = functools.partial(prepare, Events(at, "after"), True, folder / "messages.jsonl")
        bespoke(case.words(), folder, limit=SLOW, before=before)

    return once(references / "unfinished" / f"{case.name} {number}", make)


def _expected(case: Case, words: list[str], about: dict[str, str], references: Path) -> dict[str, bytes]:
    """What the command leaves of a folder that nobody damaged."""

    def make(folder: Path) -> None:
        _copy(Path(about["folder"]), folder)
        bespoke(words, folder, limit=SLOW)

    if "--resume" in words:
        return results(Path(about["folder"]) / "out")
    return results(once(references / "read" / f"{case.name} {words[0]}", make) / "out")


def _copy(source: Path, target: Path) -> None:
    for name in ("exp.toml", "out"):
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
        else:
            shutil.copy(source / name, target / name)


def _problem(ended: Ended, mentioned: bool, found: dict[str, bytes], expected: dict[str, bytes]) -> str:
    """What is wrong with how the command ended, if anything."""
    if ended.code is None:
        return f"it took more than {SLOW:.0f} s"
    if CRASH in ended.said:
        return f"traceback: {crash(ended.said)}"
    if ended.code == 2:
        return "" if mentioned else f"refused without the file's name: {last_line(ended.err)}"
    if ended.code != 0:
        return f"exit code {ended.code}: {last_line(ended.err)}"
    return differences(found, expected)
