"""MNIST preferences: users who each like one digit, so that the same image has other labels for others.

Silva et al., FedEmbed, Section 4.2: 9,000 users prefer one of ten digits; each has 30 of MNIST's 60,000 training
images, half of them of its digit (label 1), half of other digits (label 0); 20 are for training and 10 for testing.

9,000 times 30 are more than 60,000: an image belongs to several users. Which images may be trained on, chosen on and
tested on is decided by image, once for all users, so that nobody is tested on what somebody trained on. A user's rows
are stored in that order, 16, 4 and 10: `split.order = "stored"` with fractions of 20 and 10 of 30 gives the paper's
split, and with 16, 4 and 10 one that has rows to choose on.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bespoke.data.mnist_writers import read_mnist
from bespoke.data.population import Population
from bespoke.data.sources import at_least, describe
from bespoke.randomness import generator, uniform

NAME = "mnist-preferences"
PARTS = (16, 4, 10)  # rows of a user to train, to choose, to be tested on
SHARES = {"balanced": (10,) * 10, "imbalanced": (25, 15, 10, 10, 10, 10, 5, 5, 5, 5)}  # percent of users, by digit

Ints = NDArray[np.int64]


def load(users: Literal["balanced", "imbalanced"] = "balanced", number: int = 9000, seed: int = 0) -> Population:
    """`number` users, each with 30 images; `users` says how many of them like which digit."""
    at_least(NAME, 20, number=number)
    images, labels = read_mnist("train", NAME)
    likes = _likes(SHARES[users], number)
    label = np.tile([1, 0], sum(PARTS) // 2)  # alternating, so that every part has as many of both
    part = np.repeat(np.arange(len(PARTS)), PARTS)
    kind = _kinds(likes, label, seed)
    row = np.empty(kind.shape, dtype=np.int64)
    for digit in range(10):
        for place, pool in enumerate(_pools(np.flatnonzero(labels == digit), digit, seed)):
            slots = (kind == digit) & (part == place)
            row[slots] = _dealt(pool, int(slots.sum()), generator("deal", seed, digit, place))
    names = np.array([f"{digit}-{i:05d}" for i, digit in enumerate(likes)])
    columns: dict[str, Any] = {
        "x": images[row.flatten()],
        "y": np.tile(label, number),
        "kind": kind.flatten(),
    }
    digits = [str(digit) for digit in range(10)]
    about = describe(
        NAME, input="image", side=28, channels=1, classes=["other", "preferred"], kinds=digits, target="preferred",
        features=[f"pixel {i}" for i in range(784)], numeric=[False] * 784, model={"name": "fedembed-cnn"},
        notes=["Users are artificial: each likes one digit, and MNIST's training images were dealt out to them."],
    )  # fmt: skip
    rows = sum(PARTS)
    return Population.build(columns, np.repeat(names, rows), group=np.repeat(likes.astype(str), rows), about=about)


def _likes(shares: tuple[int, ...], number: int) -> Ints:
    """The digit of every user: shares as given, in order of digit."""
    ends = np.round(np.cumsum(shares) * number / sum(shares)).astype(np.int64)
    return np.repeat(np.arange(10), np.diff(ends, prepend=0))


def _kinds(likes: Ints, label: Ints, seed: int) -> Ints:
    """(users, rows): the digit of every row; of those not liked each of the nine others is as likely."""
    user, place = np.indices((len(likes), len(label)), dtype=np.uint64)
    step = 1 + np.floor(9 * uniform("kinds", seed, user, place)).astype(np.int64)
    return np.where(label == 1, likes[:, None], (likes[:, None] + step) % 10)


def _pools(images: Ints, digit: int, seed: int) -> list[Ints]:
    """A digit's images, divided among training, choosing and testing as the rows of a user are."""
    order = generator("pools", seed, digit).permutation(images)
    return np.split(order, np.cumsum(PARTS)[:-1] * len(order) // sum(PARTS))


def _dealt(pool: Ints, slots: int, random: np.random.Generator) -> Ints:
    """So many of the pool, as from a deck: every image once before any comes again."""
    decks = [random.permutation(pool) for _ in range(-(-slots // max(len(pool), 1)))]
    return np.concatenate([np.zeros(0, np.int64), *decks])[:slots]
