"""Command lines: the options that the program declares, with odd values, on existing folders."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import tomli_w
from benchmarks.attack import odd
from benchmarks.attack.child import bespoke
from benchmarks.attack.kills import once
from benchmarks.attack.odd_experiments import TABLE
from benchmarks.attack.worlds import experiment

CHEAP = {
    "compare": ["t.csv", "--client=client", "--target=y", "--rounds=1", "--seeds=1", "--no-tune", "--methods=fedavg",
                "--jobs=1"],
    "run": ["exp.toml"], "tune": ["exp.toml", "--jobs=1"], "report": ["run"], "analyze": ["run"],
    "export": ["run", "--client=0000001"], "forget": ["run", "--client=0000001"], "methods": [], "data": [],
}  # fmt: skip
PLACES = ("run", "compared", "t.csv", "exp.toml", ".", "nowhere", "run/checkpoints", "run/result.json", "compared/runs",
          "new/deep/er", "/dev/null", "/proc/nowhere", "fedavg", "exam", "synthetic")  # fmt: skip


def make(draw: random.Random, folder: Path, references: Path) -> list[str]:
    """Put a table, an experiment, a run and a comparison into the folder and return a command on them."""
    for made in _ready(references).iterdir():
        (shutil.copytree if made.is_dir() else shutil.copy)(made, folder / made.name)
    known = _commands()
    command = draw.choice([*known, draw.choice(odd.NAMES)]) if draw.random() < 0.95 else draw.choice(odd.NAMES)
    if command not in known:
        return [command, draw.choice(PLACES)]
    words = list(CHEAP.get(command, []))
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        _change(draw, words, known[command])
    return [command, *words]


def _commands() -> dict[str, list[Any]]:
    """The options of every command, as the program declares them."""
    from typer.main import get_command

    from bespoke.cli.app import app

    return {name: list(command.params) for name, command in get_command(app).commands.items()}  # type: ignore[attr-defined]


def _change(draw: random.Random, words: list[str], options: list[Any]) -> None:
    """One more option, one less, another value, or a word in a wrong place."""
    kind = draw.randrange(6)
    if kind <= 2 and options:
        option = draw.choice(options)
        name = draw.choice(option.opts)
        if option.param_type_name == "argument":
            words.insert(draw.randrange(len(words) + 1), draw.choice(PLACES))
        elif getattr(option, "is_flag", False):
            words.append(name)
        else:
            words.append(f"{name}={_value(draw, option.name)}")
    elif kind == 3 and words:
        place = draw.randrange(len(words))
        name, equals, _ = words[place].partition("=")
        words[place] = f"{name}={_value(draw, name.lstrip('-'))}" if equals else draw.choice(PLACES)
    elif kind == 4 and words and not words[0].startswith("t.csv"):
        words.pop(draw.randrange(len(words)))
    else:
        words.insert(draw.randrange(len(words) + 1), draw.choice((*odd.NAMES[2:], "-", "--", "--bogus", "-o", "--out")))


def _value(draw: random.Random, name: str) -> str:
    """A text that an option might be given; nothing with a NUL, which no shell can pass."""
    plain = ["fedavg,local", "ditto", "x", "client", "y", "group", "epsilon=4,clip=0.5", "noise=1", "margin=0.1", "mlp",
             "linear", "lr=0.1,0.2", "0.5,1", "out", *PLACES]  # fmt: skip
    number = draw.choice((odd.integer(draw, name), draw.choice(odd.FLOATS)))
    chosen = draw.choice((str(number), draw.choice(odd.NAMES), draw.choice(plain)))
    return chosen.replace("\x00", "")


def _ready(references: Path) -> Path:
    """The folder that each try gets a copy of; made once."""

    def make(folder: Path) -> None:
        (folder / "t.csv").write_text(TABLE, encoding="utf-8")
        (folder / "exp.toml").write_text(tomli_w.dumps(experiment("ditto")), encoding="utf-8")
        bespoke(["run", "exp.toml", "--out", "run"], folder)
        bespoke(["compare", *CHEAP["compare"], "--out=compared"], folder)
        (folder / "compared" / "report.html").unlink(missing_ok=True)  # the largest part of it by far

    return once(references / "for commands", make)
