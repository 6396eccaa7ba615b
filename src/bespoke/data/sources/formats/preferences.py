"""FedEmbed's simulated users: each likes one kind of row, so the same row has different labels for different users.

Silva et al., FedEmbed, Section 4: a user has 30 rows, half of them of the kind that it likes (label 1), half of other
kinds (label 0); 20 are for training and 10 for testing. There are fewer rows than users times 30: a row belongs to
several users. Which rows may be trained on, chosen on and tested on is decided once for all users, so that nobody is
tested on what somebody trained on. A user's rows are stored in that order, 16, 4 and 10: `split.order = "stored"` with
fractions of 20 and 10 of 30 gives the paper's split, and with 16, 4 and 10 one that has rows to choose on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bespoke.randomness import generator, uniform

PARTS = (16, 4, 10)  # rows of a user to train, to choose, to be tested on
ROWS = sum(PARTS)

Ints = NDArray[np.int64]
Pools = Callable[[int], list[Ints]]  # a kind's rows to train, to choose, to be tested on


@dataclass(frozen=True)
class Dealt:
    """What users were dealt: (users, ROWS) numbers of rows, their kinds and labels."""

    row: Ints
    kind: Ints
    label: Ints


def liking(shares: Sequence[int], number: int) -> Ints:
    """What each of `number` users likes: shares as given, in order of kind."""
    ends = np.round(np.cumsum(shares) * number / sum(shares)).astype(np.int64)
    return np.repeat(np.arange(len(shares)), np.diff(ends, prepend=0))


def deal(likes: Ints, kinds: int, pools: Pools, seed: int, when: str = "") -> Dealt:
    """Rows from the pools of kinds, for users who like these; another `when` deals others."""
    label = np.tile([1, 0], ROWS // 2)  # alternating, so that every part has as many of both
    part = np.repeat(np.arange(len(PARTS)), PARTS)
    kind = _kinds(likes, label, kinds, f"kinds{when}", seed)
    row = np.empty(kind.shape, dtype=np.int64)
    for which in range(kinds):
        for place, pool in enumerate(pools(which)):
            slots = (kind == which) & (part == place)
            row[slots] = _dealt(pool, int(slots.sum()), generator(f"deal{when}", seed, which, place))
    return Dealt(row, kind, np.broadcast_to(label, row.shape))


def parted(rows: Ints, random: np.random.Generator) -> list[Ints]:
    """Rows in a new order, divided among training, choosing and testing as the rows of a user are."""
    order = random.permutation(rows)
    return np.split(order, np.cumsum(PARTS)[:-1] * len(order) // ROWS)


def _kinds(likes: Ints, label: Ints, kinds: int, purpose: str, seed: int) -> Ints:
    """(users, rows): the kind of every row; of those not liked each of the others is as likely."""
    user, place = np.indices((len(likes), len(label)), dtype=np.uint64)
    step = 1 + np.floor((kinds - 1) * uniform(purpose, seed, user, place)).astype(np.int64)
    return np.where(label == 1, likes[:, None], (likes[:, None] + step) % kinds)


def _dealt(pool: Ints, slots: int, random: np.random.Generator) -> Ints:
    """So many of the pool, as from a deck: every row once before any comes again."""
    decks = [random.permutation(pool) for _ in range(-(-slots // max(len(pool), 1)))]
    return np.concatenate([np.zeros(0, np.int64), *decks])[:slots]
