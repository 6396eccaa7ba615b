"""Odd values, drawn at random, and hostile names."""

from __future__ import annotations

import datetime
import random
from typing import Any

# How much work there is, in an experiment or an option: large values of these are long work, not odd input.
AMOUNTS = (
    "rounds", "epochs", "steps", "iterations", "clients", "examples", "features", "groups", "trials", "seeds", "hidden",
    "size", "k", "watched", "partitions", "samples", "times", "every",
)  # fmt: skip
PROCESSES = ("workers", "jobs")  # large values would take the whole machine

NAMES = (
    "", " ", ".", "..", "/", "a/b", "../up", "a,b", "a;b", "a\tb", "a\nb", "\r\n", '"', "'", "\\", "$m1", "%s", "{0}",
    "{x}", "\x1b[31mred\x1b[0m", "\x07", "\x00", "日本語", "Ünïcödé", "e\u0301", "\u202eright to left", "😀",
    "\ufeffbom", "\ud7ff", "<script>alert(1)</script>", "&amp;", "[bold]x[/bold]", "[/]", "__proto__", "constructor",
    "None", "nan", "NaN", "null", "true", "0", "-1", "1e5", "inf", "index", "client", "y", "x missing", "x = 1",
    "intercept", "n" * 300, "-x", "--help", "CON", "seed", "method", "*", "?", "~", "#", "|", "` `", "\x7f", "ａ",
)  # fmt: skip

SMALL = (-1, 0, 1, 2, 3, 7)
HUGE = (2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), -(10**30))
INFINITE = float("inf")
FLOATS = (0.0, -0.0, -1.0, 0.5, 1.0, 1e-300, 5e-324, 1e-9, 1e9, 1e30, 1e308, -1e308, INFINITE, -INFINITE, float("nan"))


def value(draw: random.Random, key: str = "") -> Any:
    """Any value that TOML knows."""
    kind = draw.randrange(9)
    if kind == 0:
        return draw.choice(FLOATS)
    if kind <= 2:
        return integer(draw, key)
    if kind == 3:
        return draw.choice(NAMES)
    if kind == 4:
        return draw.choice((True, False))
    if kind == 5:
        return [value(draw, key) for _ in range(draw.randrange(4))]
    if kind == 6:
        return {draw.choice(NAMES): value(draw, key) for _ in range(draw.randrange(3))}
    if kind == 7:
        return draw.choice((datetime.date(1, 1, 1), datetime.datetime(9999, 12, 31, 23, 59), datetime.time(0, 0)))
    return draw.choice(("auto", "global", "none", "uniform", "linear", "all", "fedavg"))


def integer(draw: random.Random, key: str) -> int:
    """A whole number; none that asks for long work or many processes."""
    if key in PROCESSES:
        return draw.choice((-1, 0, -(2**63)))
    if any(word in AMOUNTS for word in key.split("_")):
        return draw.choice((*SMALL, 2**63, 10**30, -(10**30)))
    return draw.choice((*SMALL, *HUGE))


def like(draw: random.Random, key: str, found: Any) -> Any:
    """A value of the same type as the one found: likely to be accepted."""
    if isinstance(found, bool):
        return not found
    if key in PROCESSES:
        return draw.choice((0, -1, "two"))
    if isinstance(found, int):
        return draw.choice((found + 1, found + 2, *SMALL))
    if isinstance(found, float):
        return draw.choice(FLOATS) if draw.random() < 0.3 else found * draw.choice((0.0, 0.1, 0.7, 2.0, 1e6))
    if isinstance(found, str):
        return draw.choice((*NAMES, found.upper(), found[:-1], found + found))
    if isinstance(found, list | tuple):
        return [like(draw, key, each) for each in found][: draw.randrange(4)]
    return value(draw, key)


def bytes_of(draw: random.Random, content: bytes, times: int = 3) -> bytes:
    """The bytes with some of them flipped, removed, repeated or put in."""
    made = bytearray(content)
    for _ in range(draw.randrange(1, times + 1)):
        place = draw.randrange(len(made) + 1)
        kind = draw.randrange(5)
        if kind == 0 and place < len(made):
            made[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del made[place : place + draw.randrange(1, 20)]
        elif kind == 2:
            made[place:place] = made[place : place + 20]
        elif kind == 3:
            made[place:place] = draw.choice((b"\x00", b"\xff", b"\xed\xa0\x80", b'"', b"]", b"=", b",", b"\n", b"#"))
        else:
            made[place : place + 1] = b""
    return bytes(made)
