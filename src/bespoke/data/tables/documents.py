"""Reads a user's own texts by client: a table with a column of texts, or a folder of files by client.

A text longer than `length` becomes several rows of nearly equal length, the segments of one unit, so that no text is
half in training and half in test. What was dropped, cut or inferred is said in `about['notes']`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bespoke.data.about import About, TextRule
from bespoke.data.population import Population
from bespoke.data.tables.columns import is_missing
from bespoke.data.tables.read import read_file
from bespoke.data.tables.table import clients_of, labels_of, times_of
from bespoke.data.texts import vocabulary as texts
from bespoke.data.texts.tokenizers import Tokenizer, plain, tokenizer_of
from bespoke.errors import UserError, unknown

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Segmenting:
    """How texts become rows; None means the tokenizer's default."""

    tokenizer: str = "words"
    pretrained: str = ""  # the model whose tokenizer is meant by "model"
    lower: bool | None = None
    length: int | None = None
    vocabulary: int | None = None
    shortest: int = 1
    end: bool = True

    def settled(self, found: Tokenizer) -> TextRule:
        """All settings with their values."""
        rule: TextRule = {"tokenizer": self.tokenizer, "end": self.end, "least": found.least}
        if self.tokenizer == "model":
            rule["pretrained"] = self.pretrained
        rule["lower"] = found.lower if self.lower is None else self.lower
        rule["length"] = found.length if self.length is None else self.length
        rule["vocabulary"] = found.vocabulary if self.vocabulary is None else self.vocabulary
        return rule


def open_texts(
    path: str | Path,
    client: str | None = None,
    text: str | None = None,
    *,
    group: str | None = None,
    context: str | None = None,
    time: str | None = None,
    how: Segmenting | None = None,
    words: tuple[str, ...] | None = None,
) -> Population:
    """Texts as a raw population (see data/texts/vocabulary.py), of which nothing is learned.

    `client` names a column, or several joined by commas, and `text` the column of texts; a folder needs neither.
    `context` names a column of what was around the text, kept as the column `context` with names in
    `about["contexts"]`. `words` are the vocabulary, if it is declared.
    """
    path, how, notes = Path(path), how or Segmenting(), list[str]()
    if path.is_dir():
        named = {"client": client, "text": text, "group": group, "context": context, "time": time}
        if given := [f"{name} = {value!r}" for name, value in named.items() if value is not None]:
            raise UserError(
                f"{path} is a folder of texts by client: it has no columns, and {given[0]} names one "
                "(a folder of pictures is told by its target: --target folder, or a column of its labels)"
            )
        table, client, text = _read_folder(path, notes), "client", "text"
    else:
        table = read_file(path, notes)
    names = table.column_names
    if not client or not text:
        raise UserError(f"name the columns of {path.name}: those of clients and of texts")
    clients = [client] if client in names else [part.strip() for part in client.split(",")]
    for name in [*clients, text, *(name for name in (group, context, time) if name)]:
        if name not in names:
            raise unknown("column", name, names, where=path.name)
    if text in [*clients, group, context, time]:
        raise UserError(f"the text column {text!r} of {path.name} cannot be client, group, context or time as well")
    table = _with_texts(table, clients, text, path, notes)
    ids, code = clients_of(table, clients, path)
    tokenizer = tokenizer_of(how.tokenizer, how.pretrained)
    settings = how.settled(tokenizer)
    cut = _Cut.of(table[text].to_pylist(), tokenizer, settings, how.shortest)
    if not cut.sentences:
        raise UserError(f"no text of {path.name} has {how.shortest} {_unit(tokenizer)} or more; lower data.shortest")
    notes += [*cut.notes(how.shortest, tokenizer, settings), *_few(code[cut.kept], len(ids))]
    columns: dict[str, NDArray[Any]] = {}
    if len(cut.row) > len(cut.kept):
        columns["unit"] = cut.row
    if time is not None:
        columns["time"] = times_of(table[time], time, path, notes)[cut.row]
    about: About = {
        "name": path.name.split(".")[0], "title": f"{path.name}: the next {_unit(tokenizer, 1)} of texts by {client}",
        "licence": "the user's own", "notes": notes, "target": f"next {_unit(tokenizer, 1)}", "metric": "perplexity",
        "tokenizer": how.tokenizer,
    }  # fmt: skip
    if context is not None:
        contexts, columns["context"] = np.unique(labels_of(table[context])[cut.row], return_inverse=True)
        about |= {"contexts": contexts.tolist(), "context": context}
    if words is not None:
        about["declared"] = list(words)
    if tokenizer.public:
        about["public"] = list(tokenizer.public)
    return texts.population(
        cut.sentences, ids[code][cut.row], group=None if group is None else labels_of(table[group])[cut.row],
        length=settings["length"], vocabulary=settings["vocabulary"], least=settings["least"], end=settings["end"],
        whole=cut.whole, characters=cut.characters, columns=columns, about={**about, "text": settings},
    )  # fmt: skip


# Rows


def _with_texts(table: pa.Table, clients: list[str], text: str, path: Path, notes: list[str]) -> pa.Table:
    """The rows with both a client and a text."""
    column = table[text]
    if not pa.types.is_string(column.type) and column.type != pa.null():
        raise UserError(
            f"the text column {text!r} of {path.name} holds {column.type}, no texts; the columns that do: "
            + (", ".join(n for n in table.column_names if pa.types.is_string(table[n].type)) or "none")
        )
    no_client = np.logical_or.reduce([is_missing(table[name], [""]) for name in clients])
    blank = np.array([value is None or not value.strip() for value in column.to_pylist()], dtype=bool) & ~no_client
    for which, reason in ((no_client, "the client is missing"), (blank, "there is no text")):
        if count := int(which.sum()):
            notes.append(f"{count:,} of {table.num_rows:,} rows were dropped: {reason}.")
    keep = ~(no_client | blank)
    if not keep.any():
        raise UserError(f"{path.name} has no usable row: {' '.join(notes)}")
    return table.filter(pa.array(keep))


@dataclass(frozen=True)
class _Cut:
    """Texts as segments."""

    sentences: list[list[str]]
    row: Ints  # the text of each segment
    whole: list[bool]  # whether the text ends with it
    characters: list[int]
    kept: Ints  # texts that are long enough
    texts: int

    @classmethod
    def of(cls, found: list[str], tokenizer: Tokenizer, settings: TextRule, shortest: int) -> _Cut:
        sentences, row, whole, characters, kept = list[list[str]](), [], list[bool](), list[int](), []
        for place, text in enumerate(found):
            text = plain(text, settings["lower"])
            pieces = tokenizer.pieces(text)
            if len(pieces) < max(shortest, 1):
                continue
            kept.append(place)
            parts = -(-len(pieces) // settings["length"])
            ends = [part * len(pieces) // parts for part in range(parts + 1)]
            starts = [0, *(pieces[end][1] for end in ends[1:-1]), len(text) + settings["end"]]
            for part in range(parts):
                sentences.append([piece for piece, _ in pieces[ends[part] : ends[part + 1]]])
                row.append(place)
                whole.append(part == parts - 1)
                characters.append(starts[part + 1] - starts[part])
        return cls(sentences, np.array(row, np.int64), whole, characters, np.array(kept, np.int64), len(found))

    def notes(self, shortest: int, tokenizer: Tokenizer, settings: TextRule) -> list[str]:
        several = int((np.bincount(self.row) > 1).sum())
        unit = _unit(tokenizer)
        found = [f"Texts are {_HOW.get(tokenizer.name, 'pieces of the tokenizer ' + tokenizer.name)}"
                 f"{', lower-cased' if settings['lower'] else ''}."]  # fmt: skip
        if short := self.texts - len(self.kept):
            found.append(f"{short:,} of {self.texts:,} texts are too short and were dropped: below {shortest} {unit}.")
        if several:
            found.append(
                f"{several:,} of {len(self.kept):,} texts are longer than {settings['length']} {unit} and were cut: "
                f"{len(self.row):,} segments in all. Segments of one text are trained or tested on together."
            )
        return found


_HOW = {
    "words": "words, letters and digits with the apostrophes inside; any other sign is a word by itself",
    "characters": "characters",
}


def _unit(tokenizer: Tokenizer, count: int = 2) -> str:
    one = {"words": "word", "characters": "character"}.get(tokenizer.name, "token")
    return one if count == 1 else f"{one}s"


def _few(code: Ints, clients: int) -> list[str]:
    sizes = np.bincount(code, minlength=clients)
    if not (single := int((sizes == 1).sum())):
        return []
    return [f"{single:,} of {clients:,} clients have one text: they can train or be tested, not both."]


# A folder


def _read_folder(path: Path, notes: list[str]) -> pa.Table:
    """A file ID.txt, or a folder ID of .txt files, for each client; a text is a paragraph or, without any, a line."""
    files = sorted(file for file in (*path.glob("*.txt"), *path.glob("*/*.txt")) if file.is_file())
    if not files:
        raise UserError(
            f"{path} holds no texts by client: a file ID.txt for each, or a folder ID with .txt files (a folder of "
            "pictures is told by its target: --target folder, or a column of its labels)"
        )
    clients, found, paragraphs = list[str](), list[str](), 0
    owners = [file.stem if file.parent == path else file.parent.name for file in files]
    if both := {file.stem for file in path.glob("*.txt")} & {file.parent.name for file in path.glob("*/*.txt")}:
        raise UserError(f"{path} has both a file and a folder for the client {min(both)!r}; keep one of them")
    for owner, file in zip(owners, files):
        whole = _read_text(file)
        parts = [" ".join(part.split()) for part in whole.replace("\r\n", "\n").split("\n\n")]
        parts = [part for part in parts if part]
        paragraphs += len(parts) > 1
        parts = parts if len(parts) > 1 else [line for line in whole.splitlines() if line.strip()]
        clients += [owner] * len(parts)
        found += parts
    notes.append(
        f"Read {len(files):,} files of {len(set(owners)):,} clients: every line is a text"
        + (f", but in {paragraphs:,} files with empty lines every paragraph." if paragraphs else ".")
    )
    return pa.table({"client": pa.array(clients, pa.string()), "text": pa.array(found, pa.string())})


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        return file.read_text(encoding="cp1252", errors="replace")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error})") from None
