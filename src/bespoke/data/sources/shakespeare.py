"""Shakespeare by speaking role, from TensorFlow Federated's files: predict the next character.

As in Reddi et al. 2021 (Adaptive Federated Optimization): 86 characters (those of Shakespeare and Dickens) and four
special tokens make a vocabulary of 90. Each snippet, as <bos> text <eos>, is cut into pieces of 81 tokens, the last one
padded; a piece without its last token is x, without its first token y. Ids are in the order of VOCABULARY below.

With tokens = "words" the next word is predicted instead: words are lower-case letters with their apostrophes, and a
snippet is cut into pieces of `length` words, of which only the last has an end.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.sources.formats import tff
from bespoke.data.sources.registry import at_least, describe
from bespoke.data.texts import vocabulary as texts
from bespoke.errors import UserError

CHARACTERS = "\n\r !\"#$%&'()*,-./0123456789:;?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]_abcdefghijklmnopqrstuvwxyz"
VOCABULARY = ("<pad>", *CHARACTERS, "<oov>", "<bos>", "<eos>")
PAD, OOV, BOS, EOS = (VOCABULARY.index(token) for token in ("<pad>", "<oov>", "<bos>", "<eos>"))
# The plays that the published role names start with. The publisher's parser missed the others' titles, so that roles
# of a missed play stand under the one before it (Adam of "As You Like It" under "All's Well That Ends Well").
PLAYS = (
    "ALL_S_WELL_THAT_ENDS_WELL",
    "MUCH_ADO_ABOUT_NOTHING",
    "PERICLES__PRINCE_OF_TYRE",
    "THE_FIRST_PART_OF_KING_HENRY_THE_FOURTH",
    "THE_TAMING_OF_THE_SHREW",
    "THE_TRAGEDY_OF_KING_LEAR",
)
_IDS = np.full(256, OOV, dtype=np.int16)  # of a byte
TITLE = "Shakespeare's plays by speaking role: the next word"
NOTES = (
    "Plays are those of the published role names, which put many roles under a wrong play.",
    "Sequences of the published train file stand before those of its test file.",
)
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")
_IDS[np.frombuffer(CHARACTERS.encode(), dtype=np.uint8)] = np.arange(1, len(CHARACTERS) + 1)


def load(
    length: int = 80, most: int = 0, tokens: Literal["characters", "words"] = "characters", vocabulary: int = 10000
) -> Population:
    """715 roles in six groups; rows are sequences of `length` tokens, the train file's before the test file's.

    most: a role keeps its first so many sequences; 0: all. vocabulary: of words, the most frequent so many are known.
    """
    at_least("shakespeare", 1, length=length, vocabulary=vocabulary)
    at_least("shakespeare", 0, most=most)
    snippets: dict[str, list[bytes]] = {}
    for part in ("train", "test"):
        found = tff.find_part("shakespeare", f"shakespeare_{part}.h5", "shakespeare.sqlite", part)
        for role, arrays in tff.read_clients(found, "shakespeare", ("snippets",), "examples/<ROLE>/snippets"):
            snippets.setdefault(role, []).extend(tff.texts(found.path, role, "snippets", arrays["snippets"]))
    return _characters(snippets, length, most) if tokens == "characters" else _words(snippets, length, most, vocabulary)


def _words(snippets: dict[str, list[bytes]], length: int, most: int, vocabulary: int) -> Population:
    pieces: list[list[str]] = []
    whole: list[bool] = []
    roles: list[str] = []
    for role, spoken in snippets.items():
        cut = [piece for text in spoken for piece in word_pieces(text, length)][: most or None]
        pieces += [words for words, _ in cut]
        whole += [last for _, last in cut]
        roles += [role] * len(cut)
    if not pieces:
        raise UserError("the shakespeare files hold no text")
    return texts.population(
        pieces, roles, group=[play_of(role) for role in roles], whole=whole, length=length, vocabulary=vocabulary,
        about=describe("shakespeare", input="tokens", title=TITLE, notes=list(NOTES)),
    )  # fmt: skip


def word_pieces(text: bytes, length: int) -> list[tuple[list[str], bool]]:
    """The words of a snippet in pieces, and whether the snippet ends with the piece."""
    words = _WORD.findall(text.decode(errors="replace").lower())
    return [(words[begin : begin + length], begin + length >= len(words)) for begin in range(0, len(words), length)]


def _characters(snippets: dict[str, list[bytes]], length: int, most: int) -> Population:
    pieces = {role: [sequences(text, length) for text in spoken if text] for role, spoken in snippets.items()}
    kept = {role: np.concatenate(parts)[: most or None] for role, parts in pieces.items() if parts}
    if not kept:
        raise UserError("the shakespeare files hold no text")
    tokens = np.concatenate(list(kept.values()))
    roles = np.repeat(list(kept), [len(part) for part in kept.values()])
    plays = np.repeat([play_of(role) for role in kept], [len(part) for part in kept.values()])
    about = describe(
        "shakespeare",
        input="tokens",
        vocabulary=len(VOCABULARY),
        words=list(CHARACTERS),
        text={"tokenizer": "characters", "lower": False, "end": True},
        features=[f"character {i}" for i in range(length)],
        numeric=[False] * length,
        target="next character",
        notes=list(NOTES),
    )
    columns: dict[str, NDArray[Any]] = {
        "x": np.ascontiguousarray(tokens[:, :-1]),
        "y": np.ascontiguousarray(tokens[:, 1:]),
    }
    return Population.build(columns, roles, group=plays, about=about)


def sequences(text: bytes, length: int) -> NDArray[np.int16]:
    """<bos> text <eos> in pieces of length + 1 tokens, padded; a last piece of one token predicts nothing: left out."""
    ids = np.concatenate([[BOS], _IDS[np.frombuffer(text, dtype=np.uint8)], [EOS]])
    whole = len(ids) // (length + 1) + (len(ids) % (length + 1) > 1)
    padded = np.full(whole * (length + 1), PAD, dtype=np.int16)
    padded[: len(ids)] = ids[: len(padded)]
    return padded.reshape(whole, length + 1)


def play_of(role: str) -> str:
    """The play that a published role name starts with."""
    return next((play for play in PLAYS if role.startswith(f"{play}_")), "(unknown play)")
