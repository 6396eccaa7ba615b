"""MNIST preferences: each user likes one digit, so the same image has different labels for different users.

Silva et al., FedEmbed, Section 4.2: 9,000 users prefer one of ten digits; each has 30 of MNIST's 60,000 training
images, 20 to train on and 10 to be tested on. See bespoke.data.sources.formats.preferences for how they are dealt out.

The paper leaves preferences that change, and new sub-populations, to future work: here some users may come to like
another digit after a number of rounds (then named 3to7-00042: rows of both, their group the first), and the users of
some digits may join late. See bespoke.data.periods for how rows come and go.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bespoke.data.periods import FOREVER
from bespoke.data.population import Population
from bespoke.data.sources.formats.preferences import ROWS, Ints, deal, liking, parted
from bespoke.data.sources.mnist_writers import read_mnist
from bespoke.data.sources.registry import at_least, describe
from bespoke.errors import UserError
from bespoke.randomness import generator, uniform

NAME = "mnist-preferences"
SHARES = {"balanced": (10,) * 10, "imbalanced": (25, 15, 10, 10, 10, 10, 5, 5, 5, 5)}  # percent of users, by digit


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

    def pools(digit: int) -> list[Ints]:
        return parted(np.flatnonzero(labels == digit), generator("pools", seed, digit))

    likes = liking(SHARES[users], number)
    becomes = _becomes(likes, change, 10 - late, seed)
    changed = np.flatnonzero(becomes != likes)
    dealt = [deal(likes, 10, pools, seed), deal(becomes[changed], 10, pools, seed, " after")]
    names = [f"{a}-{i:05d}" if a == b else f"{a}to{b}-{i:05d}" for i, (a, b) in enumerate(zip(likes, becomes))]
    client = np.concatenate([np.arange(number), changed])
    after = np.arange(len(client)) >= number  # rows of changed preferences
    since = np.where(after, change_after + 1, np.where(likes[client] >= 10 - late, late_after + 1, 1))
    until = np.where(~after & np.isin(client, changed), change_after, FOREVER)
    columns: dict[str, NDArray[Any]] = {
        "x": images[np.concatenate([one.row for one in dealt]).flatten()],
        "y": np.concatenate([one.label for one in dealt]).flatten(),
        "kind": np.concatenate([one.kind for one in dealt]).flatten(),
        **({"since": np.repeat(since, ROWS), "until": np.repeat(until, ROWS)} if change or late else {}),
    }
    digits = [str(digit) for digit in range(10)]
    about = describe(
        NAME, input="image", side=28, channels=1, classes=["other", "preferred"], kinds=digits, target="preferred",
        features=[f"pixel {i}" for i in range(784)], numeric=[False] * 784, model={"name": "fedembed-cnn"},
        notes=["Users are artificial: each likes one digit, and MNIST's training images were dealt out to them."],
    )  # fmt: skip
    owners, groups = np.repeat(np.array(names)[client], ROWS), np.repeat(likes.astype(str)[client], ROWS)
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
