"""Measures how well a group's own word frequencies predict its held-out text, compared with those of all clients.

The cheapest language model, so the cheapest look at whether groups are worth models of their own. A group's frequencies
are drawn towards everybody's, (count + strength * p) / (total + strength); the strength that is best on validation rows
is used on query rows. Any division concentrates a client's own words a little, so a division at random into groups of
the same sizes is the yardstick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.splits import Rows, Split

Floats = NDArray[np.float64]
STRENGTHS = (100.0, 1e3, 3e3, 1e4, 3e4, 1e5, 1e6)
ADDED = 0.5  # to the count of every word, of all clients together


@dataclass(frozen=True)
class GroupPerplexity:
    """Perplexity of a group's query text: by everybody's word frequencies, and by the group's own."""

    group: str
    clients: int
    words: int
    common: float
    own: float

    @property
    def percent(self) -> float:
        """How much lower the perplexity is by the group's own frequencies."""
        return 100 * (1 - self.own / self.common)


def gains(raw: Population, split: Split, vocabulary: int) -> list[GroupPerplexity]:
    """What each group gains, in the order of `raw.groups`, and last what all gain."""
    assert raw.group is not None
    counts = {name: _counts(raw, rows, vocabulary, split) for name, rows in _parts(split).items()}
    total = counts["train"].sum(0) + ADDED
    common = total / total.sum()
    strength = min(STRENGTHS, key=lambda s: float(_loss(counts["train"], counts["validation"], common, s).sum()))
    own, shared = _loss(counts["train"], counts["query"], common, strength), -(counts["query"] @ np.log(common))
    said = counts["query"].sum(1)
    clients = np.bincount(raw.group, minlength=len(raw.groups))
    found = [
        GroupPerplexity(name, int(clients[k]), int(said[k]), math.exp(shared[k] / said[k]), math.exp(own[k] / said[k]))
        for k, name in enumerate(raw.groups)
        if said[k]
    ]
    whole = math.exp(shared.sum() / said.sum()), math.exp(own.sum() / said.sum())
    return [*found, GroupPerplexity("all", len(raw), int(said.sum()), *whole)]


def _parts(split: Split) -> dict[str, Rows]:
    return {"train": split.train, "validation": split.selection.validation, "query": split.test.query}


def _counts(raw: Population, rows: Rows, vocabulary: int, split: Split) -> Floats:
    """How often each group says each word of the vocabulary of the training rows, the last being unknown words."""
    pieces = raw.columns["pieces"].numpy()
    trained, _ = split.train.of(split.train.clients)
    often = np.bincount(pieces[trained].ravel(), minlength=len(raw.about["pieces"]) + 1)
    often[0] = 0
    place = np.full(len(often), vocabulary)
    place[np.argsort(-often, kind="stable")[:vocabulary]] = np.arange(min(vocabulary, len(often)))
    where, sizes = rows.of(rows.clients)
    assert raw.group is not None
    group = np.repeat(raw.group[rows.clients], sizes)
    found = np.zeros((len(raw.groups), vocabulary + 1))
    for k in range(len(raw.groups)):
        said = pieces[where[group == k]]
        found[k] = np.bincount(place[said[said > 0]], minlength=vocabulary + 1)
    return found


def _loss(train: Floats, text: Floats, common: Floats, strength: float) -> Floats:
    """Minus the log-likelihood of each group's text by its own frequencies."""
    own = (train + strength * common) / (train.sum(1, keepdims=True) + strength)
    losses: Floats = -(text * np.log(own)).sum(1)
    return losses
