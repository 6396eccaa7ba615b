"""Utterances by user and context as raw rows of texts (data/texts/vocabulary.py), cut after a number of tokens.

An utterance has three words or more, as in FedPC (Silva et al., 2022). They are counted with the tokenizer `words`,
whichever tokenizer cuts the rows, so that every language model reads the same utterances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from bespoke.data.about import About, RoleFacts, TextRule
from bespoke.data.population import Population
from bespoke.data.sources.registry import describe
from bespoke.data.texts import vocabulary as texts
from bespoke.data.texts.tokenizers import plain, tokenizer_of
from bespoke.randomness import client_keys, shuffles, text_key

SHORTEST = 3  # words
_words = tokenizer_of("words").pieces


class Utterance(NamedTuple):
    """What a user said, and in which context."""

    user: str
    context: str
    text: str


def long_enough(text: str) -> bool:
    """Whether a text has three words or more."""
    parts = text.split(None, SHORTEST - 1)  # each has at least one word, and counting them is faster
    return len(parts) == SHORTEST or len(_words(text)) >= SHORTEST


def kept_rows(users: Sequence[str], most: int) -> NDArray[np.int64]:
    """At most `most` rows of each user (0: all), drawn at random and in order; a larger number adds rows to them."""
    names, code, sizes = np.unique(users, return_inverse=True, return_counts=True)
    if not most:
        return np.arange(len(users))
    drawn = shuffles(text_key("utterances kept"), client_keys(names.tolist()), sizes)
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    first = np.arange(len(users)) - starts < most
    return np.sort(np.argsort(code, kind="stable")[(starts + drawn)[first]])


def spoken(
    source: str,
    said: Sequence[Utterance],
    *,
    contexts: Sequence[str],
    context: str,
    length: int,
    tokenizer: str,
    pretrained: str,
    end: bool,
    group: Sequence[str] | None = None,
    columns: dict[str, NDArray[Any]] | None = None,
    notes: Sequence[str] = (),
    **facts: Unpack[RoleFacts],
) -> Population:
    """Utterances as a raw population with the column `context`, a place in `contexts`.

    `context` is what one context is called; `columns` and `group` have an entry for each utterance.
    """
    found = tokenizer_of(tokenizer, pretrained)
    sentences, characters = list[list[str]](), list[int]()
    for utterance in said:
        text = plain(utterance.text, found.lower)
        pieces = found.pieces(text)
        sentences.append([piece for piece, _ in pieces])
        characters.append(pieces[length][1] if len(pieces) > length else len(text) + end)
    cut = sum(len(sentence) > length for sentence in sentences)
    place = {name: code for code, name in enumerate(contexts)}
    columns = {"context": np.array([place[one.context] for one in said], dtype=np.int64), **(columns or {})}
    rule: TextRule = {"tokenizer": tokenizer, "lower": found.lower}
    if tokenizer == "model":
        rule["pretrained"] = pretrained
    about: About = {"input": "tokens"}
    if facts:
        about |= {"roles": facts["roles"], "role": facts["role"]}
    about |= {
        "metric": "perplexity", "tokenizer": tokenizer, "contexts": list(contexts), "context": context, "text": rule,
        "notes": [*notes, f"{cut:,} of {len(said):,} utterances are longer than {length} tokens and were cut there."],
    }  # fmt: skip
    if found.public:
        about["public"] = list(found.public)
    return texts.population(
        sentences, [one.user for one in said], about=describe(source, **about), length=length,
        vocabulary=found.vocabulary, least=found.least, end=end, characters=characters, group=group, columns=columns,
    )  # fmt: skip
