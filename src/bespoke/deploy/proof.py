"""The proof that a client is gone: decodes every file of a folder and searches it for the client's id and bytes."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bespoke.storage import open_arrays

SHORTEST, DIFFERENT = 8, 6  # bytes of a trace, and distinct bytes: shorter ones occur by chance


@dataclass
class Found:
    """The findings of a search by file: the client's bytes, or its id as a word."""

    files: int = 0
    bytes: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)


def telling(trace: bytes) -> bool:
    """Whether these bytes are long and varied enough for a search: they must not occur by chance."""
    return len(trace) >= SHORTEST and len(set(trace)) >= DIFFERENT


def search(folder: Path, client: str, traces: Iterable[bytes], leave_out: Iterable[Path] = ()) -> Found:
    """Searches all files below a folder."""
    traces, found, word = list(traces), Found(), _word(client)
    for path in sorted(set(folder.rglob("*")) - set(leave_out)):
        name = str(path.relative_to(folder))
        if word.search(path.name):
            found.named.append(name)
        if not path.is_file():
            continue
        found.files += 1
        whole, *columns = _bytes(path)
        if any(trace in part for part in (whole, *columns) for trace in traces):
            found.bytes.append(name)
        if any(word.search(text) for text in _texts(path, whole)):
            found.named.append(name)
    found.named = list(dict.fromkeys(found.named))
    return found


def _word(client: str) -> re.Pattern[str]:
    """A pattern for the id as a whole word, also as HTML and JSON escape it."""
    spellings = {client, html.escape(client), html.escape(client, quote=False)}
    for escaped in (json.dumps(client), json.dumps(client, ensure_ascii=False)):
        spellings |= {escaped[1:-1], escaped[1:-1].replace("<", "\\u003c")}
    return re.compile(
        "|".join(rf"(?<!\w){re.escape(spelling)}(?!\w)" for spelling in sorted(spellings, key=len, reverse=True))
    )


def _bytes(path: Path) -> Iterator[bytes]:
    """The bytes of a file, and for a table, which is compressed, its columns."""
    yield path.read_bytes()
    if path.suffix == ".parquet":
        for column in _columns(path).values():
            if column.dtype.kind in "biuf":
                yield column.tobytes()


def _texts(path: Path, whole: bytes) -> Iterator[str]:
    """Every text in a file."""
    if path.suffix == ".parquet":
        for name, column in _columns(path).items():
            yield name
            if column.dtype.kind not in "biuf":
                yield from map(str, set(column.tolist()))
    elif path.suffix == ".safetensors":
        arrays, about = open_arrays(path)
        yield from arrays
        for text in about.values():
            yield text
            yield from _strings(json.loads(text))
    else:
        yield whole.decode(errors="replace")


def _strings(value: Any) -> Iterator[str]:
    """All strings in JSON, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from _strings(entry)
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield key
            yield from _strings(entry)


def _columns(path: Path) -> dict[str, Any]:
    from pyarrow import parquet

    table = parquet.read_table(path)
    return {name: table[name].to_numpy() for name in table.column_names}
