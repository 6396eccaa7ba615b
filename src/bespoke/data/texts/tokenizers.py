"""Tokenizers: words, characters, or a Hugging Face tokenizer from a folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bespoke import pretrained
from bespoke.errors import UserError
from bespoke.plain import JsonObject

# a run of letters and digits, apostrophes inside it included; any other sign is a word by itself
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")
Pieces = list[tuple[str, int]]  # each with the place in the text where it begins


@dataclass(frozen=True)
class Tokenizer:
    """Pieces of a text, and what is usual for them where nobody says."""

    name: str
    pieces: Callable[[str], Pieces]
    lower: bool  # texts are lower-cased
    length: int  # pieces of a segment
    vocabulary: int
    least: int  # times that a known piece occurs in training rows
    public: tuple[str, ...] = ()  # all pieces there are, where they are known without the data


def tokenizer_of(name: str, model: str = "") -> Tokenizer:
    """A tokenizer by name, by the folder or file of a Hugging Face tokenizer, or ("model") of a pretrained model."""
    if name == "words":
        return Tokenizer(name, lambda text: [(m[0], m.start()) for m in _WORD.finditer(text)], True, 32, 10_000, 2)
    if name == "characters":
        return Tokenizer(name, lambda text: [(c, i) for i, c in enumerate(text)], True, 128, 1_000, 1)
    if name == "model" and not model:
        raise UserError("tokenizer = 'model' is that of a pretrained model; set [model] name = 'frozen' and pretrained")
    found = pretrained.tokenizer(model) if name == "model" else _hugging_face(Path(name))

    def pieces(text: str) -> Pieces:
        coded = found.encode(text, add_special_tokens=False)
        return [(piece, begin) for piece, (begin, _) in zip(coded.tokens, coded.offsets)]

    known = found.get_vocab()
    return Tokenizer(name, pieces, False, 48, 50_000, 1, tuple(sorted(known, key=lambda piece: known[piece])))


def plain(text: str, lower: bool) -> str:
    """A text with single spaces, lower-cased if asked for."""
    return " ".join((text.lower() if lower else text).split())


def pieces_of(text: str, settings: JsonObject) -> list[str]:
    """The pieces of a text as a model's data have them (`about["text"]`); by spaces where nothing is said."""
    if "tokenizer" not in settings:
        return text.split()
    found = tokenizer_of(settings["tokenizer"], settings.get("pretrained", ""))
    return [piece for piece, _ in found.pieces(plain(text, settings["lower"]))]


def _hugging_face(path: Path) -> Any:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"tokenizer = {str(path)!r}: 'words', 'characters', or the folder of a Hugging Face tokenizer, which holds "
            f"a tokenizer.json; there is no {file}"
        )
    try:
        from tokenizers import Tokenizer as HuggingFace
    except ImportError:
        raise UserError(
            f"tokenizer = {str(path)!r} needs the package tokenizers: pip install 'bespoke-fl[language]'"
        ) from None
    try:
        return HuggingFace.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise UserError(f"{file} is not the file of a Hugging Face tokenizer ({error})") from None
