"""The command line as its users meet it, and small tables such as they might have."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd

from bespoke import cli


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


def bespoke(*arguments: object) -> Outcome:
    """Run `bespoke ARGUMENTS` in this process; a traceback is a failure of the test."""
    out, err = io.StringIO(), io.StringIO()
    words = ["bespoke", *map(str, arguments)]
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = 0
        try:
            with warnings.catch_warnings():
                cli.main()
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    return Outcome(code, out.getvalue(), err.getvalue())


def refused(outcome: Outcome, *words: str) -> str:
    """Check that this was a user's mistake, told in one message with all these words in it; returns the message."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    message = outcome.err.splitlines()[-1]
    assert message.startswith("bespoke: "), outcome.err
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    return message


def plain_table(clients: int = 20, rows: int = 20) -> pd.DataFrame:
    """y = 2 x1 + noise, at each of the clients c0, c1, ..."""
    random = np.random.default_rng(0)
    total = clients * rows
    x = random.normal(size=(total, 2))
    return pd.DataFrame({
        "client": np.repeat([f"c{i}" for i in range(clients)], rows),
        "x1": x[:, 0], "x2": x[:, 1], "y": 2 * x[:, 0] + random.normal(size=total),
    })  # fmt: skip


def messy_table(clients: int = 24, rows: int = 20) -> pd.DataFrame:
    """What nobody prepared: categories, booleans, dates, mixed types, free text, missing values, groups."""
    random = np.random.default_rng(1)
    total = clients * rows
    shop = np.repeat(np.arange(clients), rows)
    x = random.normal(size=(total, 2))
    slopes = random.normal(size=(clients, 2))
    score = (x * slopes[shop]).sum(1) + random.normal(size=total) / 3
    days = pd.to_datetime("2021-01-01") + pd.to_timedelta(random.integers(0, 700, total), unit="D")
    return pd.DataFrame({
        "shop": [f"shop {i % 12}" for i in shop],
        "city": [f"city {i // 12}" for i in shop],
        "day": days.strftime("%Y-%m-%d"),
        "price": np.where(random.random(total) < 0.1, np.nan, x[:, 0]),
        "area": x[:, 1],
        "colour": random.choice(["red", "green", "blue", None], total),
        "open": random.random(total) < 0.5,
        "mixed": random.choice(["1", "2.5", "x", "?"], total),
        "remark": [f"remark {i}" for i in range(total)],
        "score": score,
        "sold": score > 0,
        "size": np.array(["small", "medium", "large & <b>grün</b>"])[np.digitize(score, [-0.5, 0.5])],
    })  # fmt: skip


def write_csv(path: Path, table: pd.DataFrame, **options: object) -> Path:
    table.to_csv(path, index=False, **options)  # type: ignore[call-overload]
    return path
