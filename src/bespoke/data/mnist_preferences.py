"""MNIST preferences: users who each like one digit, so that the same image has other labels for others.

Silva et al., FedEmbed, Section 4.2: 9,000 users prefer one of ten digits; each has 30 of MNIST's 60,000 training
images, half of them of its digit (label 1), half of other digits (label 0); 20 are for training and 10 for testing.

9,000 times 30 are more than 60,000: an image belongs to several users. Which images may be trained on, chosen on and
tested on is decided by image, once for all users, so that nobody is tested on what somebody trained on. A user's rows
are stored in that order, 16, 4 and 10: `split.order = "stored"` with fractions of 20 and 10 of 30 gives the paper's
split, and with 16, 4 and 10 one that has rows to choose on.

The paper leaves preferences that change, and new sub-populations, to future work: here some users may come to like
another digit after a number of rounds (then named 3to7-00042: rows of both, their group the first), and the users of
some digits may join late. See changes.py for how rows come and go.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bespoke.data.changes import FOREVER
from bespoke.data.mnist_writers import read_mnist
from bespoke.data.population import Population
from bespoke.data.sources import at_least, describe
from bespoke.errors import UserError
from bespoke.randomness import generator, uniform

NAME = "mnist-preferences"
PARTS = (16, 4, 10)  # rows of a user to train, to choose, to be tested on
LABELS = np.tile([1, 0], sum(PARTS) // 2)  # alternating, so that every part has as many of both
SHARES = {"balanced": (10,) * 10, "imbalanced": (25, 15, 10, 10, 10, 10, 5, 5, 5, 5)}  # percent of users, by digit

Ints = NDArray[np.int64]


def load(
    users: Literal["balanced", "imbalanced"] = "balanced", number: int = 9000, seed: int = 0, change: float = 0.0,
    change_after: int = 0, late: int = 0, late_after: int = 0,
) -> Population:  # fmt: skip
    """`number` users, each with 30 images; `users` says how many of them like which digit.

    change, change_after: the share of users that like another digit after so many rounds, with 30 other images.
    late, late_after: the users of so many digits, the last, take part after so many rounds only.
    """
    at_least(NAME, 20, number=number)
    _check_changes(change, change_after, late, late_after)
    images, labels = read_mnist("train", NAME)
    likes = _likes(SHARES[users], number)
    becomes = _becomes(likes, change, 10 - late, seed)
    changed = np.flatnonzero(becomes != likes)
    kind, row = _rows(labels, likes, seed)
    new_kind, new_row = _rows(labels, becomes[changed], seed, " after")
    names = [f"{a}-{i:05d}" if a == b else f"{a}to{b}-{i:05d}" for i, (a, b) in enumerate(zip(likes, becomes))]
    who = np.concatenate([np.arange(number), changed])
    after = np.arange(len(who)) >= number  # rows of changed preferences
    since = np.where(after, change_after + 1, np.where(likes[who] >= 10 - late, late_after + 1, 1))
    until = np.where(~after & np.isin(who, changed), change_after, FOREVER)
    columns: dict[str, Any] = {
        "x": images[np.concatenate([row, new_row]).flatten()],
        "y": np.tile(LABELS, len(who)),
        "kind": np.concatenate([kind, new_kind]).flatten(),
        **({"since": np.repeat(since, len(LABELS)), "until": np.repeat(until, len(LABELS))} if change or late else {}),
    }
    digits = [str(digit) for digit in range(10)]
    about = describe(
        NAME, input="image", side=28, channels=1, classes=["other", "preferred"], kinds=digits, target="preferred",
        features=[f"pixel {i}" for i in range(784)], numeric=[False] * 784, model={"name": "fedembed-cnn"},
        notes=["Users are artificial: each likes one digit, and MNIST's training images were dealt out to them."],
    )  # fmt: skip
    owners, groups = np.repeat(np.array(names)[who], len(LABELS)), np.repeat(likes.astype(str)[who], len(LABELS))
    return Population.build(columns, owners, group=groups, about=about)


def _check_changes(change: float, change_after: int, late: int, late_after: int) -> None:
    if not 0 <= change <= 1 or not 0 <= late <= 8:
        raise UserError(
            f"options of the source {NAME!r}: change = {change:g} is a share of users, 0 to 1, and late = {late} a "
            "number of digits, 0 to 8"
        )
    for option, given, after in (("change", change, change_after), ("late", late, late_after)):
        if bool(given) != (after > 0):
            raise UserError(
                f"options of the source {NAME!r}: {option} = {given:g} needs {option}_after, a number of rounds above "
                f"0 where {option} is and 0 where it is not; it is {after}"
            )


def _becomes(likes: Ints, change: float, digits: int, seed: int) -> Ints:
    """What every user likes in the end: a share of those who like one of the first digits come to like another."""
    user = np.arange(len(likes), dtype=np.uint64)
    changes = (uniform("changes", seed, user) < change) & (likes < digits)
    step = 1 + np.floor((digits - 1) * uniform("becomes", seed, user)).astype(np.int64)
    return np.where(changes, (likes + step) % digits, likes)


def _rows(labels: NDArray[np.uint8], likes: Ints, seed: int, when: str = "") -> tuple[Ints, Ints]:
    """(users, rows) each: the digits shown to users that like these, and the images dealt to them."""
    part = np.repeat(np.arange(len(PARTS)), PARTS)
    user, place = np.indices((len(likes), len(LABELS)), dtype=np.uint64)
    # of those not liked each of the nine others is as likely
    step = 1 + np.floor(9 * uniform(f"kinds{when}", seed, user, place)).astype(np.int64)
    kind = np.where(LABELS == 1, likes[:, None], (likes[:, None] + step) % 10)
    row = np.empty(kind.shape, dtype=np.int64)
    for digit in range(10):
        for index, pool in enumerate(_pools(np.flatnonzero(labels == digit), digit, seed)):
            slots = (kind == digit) & (part == index)
            row[slots] = _dealt(pool, int(slots.sum()), generator(f"deal{when}", seed, digit, index))
    return kind, row


def _likes(shares: tuple[int, ...], number: int) -> Ints:
    """The digit of every user: shares as given, in order of digit."""
    ends = np.round(np.cumsum(shares) * number / sum(shares)).astype(np.int64)
    return np.repeat(np.arange(10), np.diff(ends, prepend=0))


def _pools(images: Ints, digit: int, seed: int) -> list[Ints]:
    """A digit's images, divided among training, choosing and testing as the rows of a user are."""
    order = generator("pools", seed, digit).permutation(images)
    return np.split(order, np.cumsum(PARTS)[:-1] * len(order) // sum(PARTS))


def _dealt(pool: Ints, slots: int, random: np.random.Generator) -> Ints:
    """So many of the pool, as from a deck: every image once before any comes again."""
    decks = [random.permutation(pool) for _ in range(-(-slots // max(len(pool), 1)))]
    return np.concatenate([np.zeros(0, np.int64), *decks])[:slots]
