"""TedMulti (Qi et al. 2018) with Motley's clients: a client is a talk in one language; next-word prediction.

`all_talks_train.tsv`, `_dev.tsv` and `_test.tsv` have a column talk_name and a column per language, with a line per
sentence; '__NULL__' stands for a missing translation. A client is language-talk; clients of the three files train,
validate and are tested. Clients of fewer than 20 sentences are left out; the vocabulary is the words that occur in 20
training clients (15,814 of English and Spanish in the published form). Words are lower case and without punctuation, a
sentence is its first 20 words, a training client its first 512 sentences.
"""

from __future__ import annotations

import csv
import string
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bespoke.data.population import Population
from bespoke.data.sources.formats.roles import TEST, TRAIN, VALIDATION, role_facts
from bespoke.data.sources.formats.words import Vocabulary, client_counts, ranked, shifted
from bespoke.data.sources.registry import at_least, damaged, find_file
from bespoke.errors import UserError, unknown

FILES = {TRAIN: "all_talks_train.tsv", VALIDATION: "all_talks_dev.tsv", TEST: "all_talks_test.tsv"}
MISSING = ("__NULL__", "_ _ NULL _ _")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def load(
    languages: str = "en,es",
    least: int = 20,
    most: int = 512,
    in_clients: int = 20,
    length: int = 20,
) -> Population:
    """Talks of these languages (the groups); the column `role` says which train, validate and are tested."""
    at_least("tedmulti", 1, least=least, most=most, in_clients=in_clients, length=length)
    spoken = [language.strip() for language in languages.split(",")]
    talks: dict[str, list[list[str]]] = {}
    roles: dict[str, int] = {}
    for role, name in FILES.items():
        path = find_file(f"tedmulti/{name}", "tedmulti")
        for client, sentences in _read(path, spoken).items():
            if client in roles:
                raise damaged(path, f"the talk {client!r}, which is in {FILES[roles[client]]} too", "each talk once")
            roles[client] = role
            if len(sentences) >= least:
                talks[client] = sentences[:most] if role == TRAIN else sentences
    counts = client_counts(sentences for client, sentences in talks.items() if roles[client] == TRAIN)
    words = Vocabulary(tuple(word for word in ranked(counts) if counts[word] >= in_clients))
    if not words.words:
        raise UserError(
            f"the source 'tedmulti': no word occurs in {in_clients} training clients of {least} sentences or more "
            f"({len(talks)} clients of {', '.join(spoken)}); lower the options 'in_clients' and 'least'"
        )
    clients = sorted(talks)
    sizes = [len(talks[client]) for client in clients]
    role_of = np.array([roles[client] for client in clients], dtype=np.uint8)
    about = words.about(
        "tedmulti", length, model={"name": "transformer"},
        notes=[
            f"{len(roles) - len(talks)} of {len(roles)} talks have fewer than {least} sentences and are left out.",
            f"{len(words.words)} words occur in {in_clients} training clients or more.",
        ],
        **role_facts(role_of),
    )  # fmt: skip
    tokens = words.encode([sentence for client in clients for sentence in talks[client]], length)
    columns: dict[str, NDArray[Any] | Tensor] = {**shifted(tokens), "role": np.repeat(role_of, sizes)}
    group = np.repeat([client.split(":")[0] for client in clients], sizes)
    return Population.build(columns, np.repeat(clients, sizes), group=group, about=about)


def plain(sentence: str) -> list[str]:
    """The words of a sentence, ASCII letters in lower case and ASCII punctuation left out, as in Motley: É stays."""
    return sentence.encode().lower().decode().replace("<br />", " ").translate(_PUNCTUATION).split()


def _read(path: Path, languages: list[str]) -> dict[str, list[list[str]]]:
    """The sentences of each language:talk, in the file's order."""
    talks: dict[str, list[list[str]]] = {}
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            columns = list(reader.fieldnames or ())
            if "talk_name" not in columns or len(columns) < 2:
                raise damaged(path, f"the columns {columns[:5]}", "talk_name and a column per language, between tabs")
            for language in languages:
                if language not in columns:
                    raise unknown("language", language, set(columns) - {"talk_name"}, str(path))
            for number, row in enumerate(reader, start=2):
                if None in row or None in row.values():
                    raise damaged(path, f"line {number} of another number of columns", f"{len(columns)}")
                for language in languages:
                    text = row[language]
                    if text and not any(mark in text for mark in MISSING):
                        talks.setdefault(f"{language}:{row['talk_name']}", []).append(plain(text))
    except UnicodeDecodeError as error:
        raise damaged(path, error, "UTF-8 text") from None
    if not talks:
        raise damaged(path, f"no sentence in {', '.join(languages)}", "a sentence per line")
    return talks
