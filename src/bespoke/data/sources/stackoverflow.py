"""StackOverflow by user, from TensorFlow Federated's files: next-word prediction in questions and answers.

As in Reddi et al. 2021 and Motley: the 10,000 most frequent words of the training clients, the first 20 words of a
sentence, at most 1,024 sentences of a user, sorted by date (the column `time`). Users of the train file train; of the
held-out file's, 10,000 validate and the rest are tested. All users together need tens of gigabytes and an hour to read:
`train_clients` and `test_clients` take fewer.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bespoke.data.population import Population
from bespoke.data.sources.formats.roles import MOTLEY_SEED, TEST, TRAIN, VALIDATION, role_facts
from bespoke.data.sources.formats.tff import FilePart, client_ids, find_part, read_clients, texts
from bespoke.data.sources.formats.words import Vocabulary, ranked, shifted
from bespoke.data.sources.registry import at_least, damaged
from bespoke.errors import UserError

LAYOUT = "examples/<USER>/tokens and creation_date"
Said = tuple[str, list[bytes], NDArray[np.float64]]  # user, sentences, dates
MODEL = {"name": "lstm", "embedding": 96, "hidden": 670, "layers": 1, "projection": 96}


def load(
    length: int = 20,
    vocabulary: int = 10_000,
    most: int = 1024,
    train_clients: int = 0,
    validation_clients: int = 10_000,
    test_clients: int = 0,
) -> Population:
    """Users of stackoverflow.sqlite, or stackoverflow_train.h5 and stackoverflow_held_out.h5; 0 clients are all."""
    at_least("stackoverflow", 1, length=length, vocabulary=vocabulary, most=most, validation_clients=validation_clients)
    at_least("stackoverflow", 0, train_clients=train_clients, test_clients=test_clients)
    train, held_out = (
        find_part("stackoverflow", f"stackoverflow_{part}.h5", "stackoverflow.sqlite", part.replace("_", ""))
        for part in ("train", "held_out")
    )
    training = _shuffled(train)[: train_clients or None]
    evaluated = _shuffled(held_out)
    if len(evaluated) <= validation_clients:
        raise UserError(
            f"option 'validation_clients' of the source 'stackoverflow' is {validation_clients}, and {held_out.path} "
            f"has {len(evaluated)} users: none is left to be tested"
        )
    validating = evaluated[:validation_clients]
    testing = evaluated[validation_clients:][: test_clients or None]

    counts: Counter[str] = Counter()
    for user, arrays in read_clients(train, "stackoverflow", ("tokens",), LAYOUT, sorted(training)):
        for sentence in texts(train.path, user, "tokens", arrays["tokens"][:most]):
            counts.update(_words(sentence))
    words = Vocabulary(tuple(ranked(counts)[:vocabulary]))

    roles = {**dict.fromkeys(training, TRAIN), **dict.fromkeys(validating, VALIDATION), **dict.fromkeys(testing, TEST)}
    rows, times, users = [], [], []
    # In the order of ids, which is a population's: it need not be sorted again, at twice the memory.
    for user, sentences, dates in _merged(train, training, held_out, [*validating, *testing], most):
        order = np.argsort(dates, kind="stable")
        rows.append(words.encode([_words(sentence) for sentence in sentences], length)[order])
        times.append(dates[order])
        users.append(user)
    sizes = [len(time) for time in times]
    role = np.array([roles[user] for user in users], dtype=np.uint8)
    about = words.about(
        "stackoverflow", length, model=MODEL,
        notes=[
            f"At most {most} sentences of a user, as stored, then sorted by date; the first {length} words of each.",
            f"{len(words.words)} words of {len(counts)} found in the training clients' sentences.",
        ],
        **role_facts(role),
    )  # fmt: skip
    columns: dict[str, NDArray[Any] | Tensor] = {
        **shifted(np.concatenate(rows)), "time": np.concatenate(times), "role": np.repeat(role, sizes)
    }  # fmt: skip
    return Population.build(columns, np.repeat(users, sizes), about=about)


def _words(sentence: bytes) -> list[str]:
    return sentence.decode(errors="replace").split()


def _shuffled(part: FilePart) -> list[str]:
    """The users of a part in Motley's order."""
    ids = client_ids(part, "stackoverflow", LAYOUT)
    if not ids:
        raise damaged(part.path, "no users", LAYOUT)
    shuffled: list[str] = np.random.RandomState(MOTLEY_SEED).permutation(np.array(ids)).tolist()
    return shuffled


def _merged(
    train: FilePart, training: list[str], held_out: FilePart, evaluated: list[str], most: int
) -> Iterator[Said]:
    """Both parts' users and what they said, by user id."""
    double = set(training) & set(evaluated)
    if double:
        raise damaged(held_out.path, f"user {min(double)!r}, who is in {train.path.name} too", "users who do not train")
    return heapq.merge(
        _sentences(train, sorted(training), most),
        _sentences(held_out, sorted(evaluated), most),
        key=lambda said: said[0],
    )


def _sentences(part: FilePart, users: list[str], most: int) -> Iterator[Said]:
    for user, arrays in read_clients(part, "stackoverflow", ("tokens", "creation_date"), LAYOUT, users):
        sentences = texts(part.path, user, "tokens", arrays["tokens"][:most])
        if sentences:
            yield user, sentences, _seconds(part.path, user, arrays["creation_date"][:most])


def _seconds(path: Path, user: str, dates: NDArray[Any]) -> NDArray[np.float64]:
    """Seconds since 1970 of dates like '2010-05-08 22:44:07.477 UTC'."""
    stamps = [text.decode(errors="replace").removesuffix(" UTC") for text in texts(path, user, "creation_date", dates)]
    try:
        return np.array(stamps, dtype="datetime64[ms]").astype(np.int64) / 1000.0
    except ValueError as error:
        raise damaged(
            path, f"examples/{user}/creation_date: {error}", "dates like 2010-05-08 22:44:07.477 UTC"
        ) from None
