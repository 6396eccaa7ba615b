"""Numbers of language models: perplexity over all sentences, its mean over clients, and bits per character.

The perplexity of all sentences together is exp(sum of losses / sum of tokens), as Liu et al. (ICASSP 2023) report it. A
client with many sentences counts for more in it than one with few; in the mean over clients all count the same. Bits
per character do not depend on how texts are cut into tokens, so that vocabularies can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bespoke.statistics import clients as over
from bespoke.statistics.clients import ALL, Floats, OverSeeds, cells, over_seeds

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Together:
    """One method on the test sentences of a group, or of all clients."""

    perplexity: OverSeeds  # of all sentences together
    mean_perplexity: OverSeeds  # over clients
    bits_per_character: OverSeeds  # of all sentences together; NaN where the data do not know characters


@dataclass(frozen=True)
class LanguageRow:
    """A group of clients, or all of them, under every method."""

    group: str
    clients: int
    tokens: float  # tested, the mean over seeds
    values: dict[str, Together]  # by label


def language_rows(table: pd.DataFrame, methods: Sequence[str]) -> list[LanguageRow]:
    """All clients first, then the groups, the largest first; empty if the runs are not of language models."""
    if "query_perplexity" not in table or "query_loss" not in table:
        return []
    losses = cells(table, "query_loss", methods, weight=tokens_column(table))
    means = cells(table, "query_perplexity", methods)
    bits = None
    if "query_bits_per_character" in table:
        bits = cells(table, "query_bits_per_character", methods, weight="query_characters")
    names = np.array(losses.groups)
    found = []
    for name in [ALL, *group_names(losses.groups)]:
        inside = np.ones(len(names), bool) if name == ALL else names == name
        values = {
            label: Together(
                pooled_perplexity(losses.of(label)[:, inside], losses.weights[:, inside]),
                over.mean(means.of(label)[:, inside]),
                over.weighted_mean(bits.of(label)[:, inside], bits.weights[:, inside]) if bits else over_seeds([]),
            )
            for label in methods
        }
        tokens = float(losses.weights[:, inside].sum(1).mean())
        found.append(LanguageRow(name, int(inside.sum()), tokens, values))
    return found


def tokens_column(table: pd.DataFrame) -> str:
    """The column by which losses are weighted: tokens; of runs that did not count them, rows."""
    return "query_tokens" if "query_tokens" in table else "query_examples"


def pooled_perplexity(losses: Floats, tokens: Floats) -> OverSeeds:
    """exp of the loss over all tokens together, from each client's mean loss and its tokens."""
    with np.errstate(over="ignore"):
        return over_seeds(np.exp(loss) for loss in over.weighted_mean(losses, tokens).by_seed)


def group_names(groups: Sequence[str]) -> list[str]:
    """The groups, the largest first; empty where groups say no more than the clients' ids."""
    sizes = {name: groups.count(name) for name in dict.fromkeys(groups)}
    order = sorted(sizes, key=lambda name: (-sizes[name], name))
    return [] if len(order) < 2 or len(order) == len(groups) else order
