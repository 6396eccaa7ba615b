"""MNIST preferences: users who each like one digit, so that the same image has other labels for others.

Silva et al., FedEmbed, Section 4.2: 9,000 users prefer one of ten digits; each has 30 of MNIST's 60,000 training
images, 20 to train on and 10 to be tested on. See bespoke.data.preferences for how they are dealt out.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from bespoke.data.mnist_writers import read_mnist
from bespoke.data.population import Population
from bespoke.data.preferences import ROWS, deal, parted
from bespoke.data.sources import at_least, describe
from bespoke.randomness import generator

NAME = "mnist-preferences"
SHARES = {"balanced": (10,) * 10, "imbalanced": (25, 15, 10, 10, 10, 10, 5, 5, 5, 5)}  # percent of users, by digit


def load(users: Literal["balanced", "imbalanced"] = "balanced", number: int = 9000, seed: int = 0) -> Population:
    """`number` users, each with 30 images; `users` says how many of them like which digit."""
    at_least(NAME, 20, number=number)
    images, labels = read_mnist("train", NAME)
    dealt = deal(
        SHARES[users],
        number,
        lambda digit: parted(np.flatnonzero(labels == digit), generator("pools", seed, digit)),
        seed,
    )
    names = np.array([f"{digit}-{i:05d}" for i, digit in enumerate(dealt.likes)])
    columns: dict[str, Any] = {
        "x": images[dealt.row.flatten()],
        "y": dealt.label.flatten(),
        "kind": dealt.kind.flatten(),
    }
    digits = [str(digit) for digit in range(10)]
    about = describe(
        NAME, input="image", side=28, channels=1, classes=["other", "preferred"], kinds=digits, target="preferred",
        features=[f"pixel {i}" for i in range(784)], numeric=[False] * 784, model={"name": "fedembed-cnn"},
        notes=["Users are artificial: each likes one digit, and MNIST's training images were dealt out to them."],
    )  # fmt: skip
    group = np.repeat(dealt.likes.astype(str), ROWS)
    return Population.build(columns, np.repeat(names, ROWS), group=group, about=about)
