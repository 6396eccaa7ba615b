"""People added in the studio: models learned from a few sentences, stored only on this machine.

Each has a folder of its own with `voice.safetensors` (the personal model) and `voice.json`. The sentences are not kept.
Deleting the folder deletes all there is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke import pretrained
from bespoke.data.population import Population
from bespoke.errors import UserError
from bespoke.generation.voices import Voice, Voices
from bespoke.storage import open_arrays, write_arrays, write_text
from bespoke.tensors import Tree, flatten, unflatten

VOICE_FORMAT = 1
MOST = 200  # sentences
LONGEST_NAME = 60


def default_folder() -> Path:
    """Where people are kept: in BESPOKE_PEOPLE, or among the user's data."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(os.environ.get("BESPOKE_PEOPLE") or Path(base) / "bespoke" / "people")


@dataclass(frozen=True)
class Person:
    """What is known of a person."""

    id: str
    name: str
    context: str  # of the sentences
    sentences: int


def rows_of(voices: Voices, sentences: Sequence[str], context: str) -> Population:
    """Sentences as the rows of one client, cut as the run's data are."""
    about, facts = voices.experiment.population.about, pretrained.facts(voices.pretrained)
    width, rule = len(about["features"]), about["text"]
    y = np.full((len(sentences), width), -1, dtype=np.int32)
    for row, sentence in zip(y, sentences):
        tokens = voices.tokens(sentence)[1:]
        if rule["end"] and len(tokens) <= rule["length"]:
            tokens.append(facts.end)
        row[: len(tokens)] = tokens[:width]
    x = np.concatenate([np.full((len(y), 1), facts.begin, np.int32), y[:, :-1]], 1)
    columns: dict[str, NDArray[Any]] = {"x": np.where(x < 0, facts.begin, x), "y": y}
    if voices.contexts:
        columns["context"] = np.full(len(y), voices.contexts.index(context))
    return Population.build(columns, ["you"] * len(y), about=about)


class People:
    """The people of this machine who have a model under one run."""

    def __init__(self, voices: Voices, folder: Path) -> None:
        digest = hashlib.blake2b(digest_size=8)
        for name, leaf in sorted(flatten(voices.models.server).items()):
            digest.update(name.encode() + leaf.contiguous().numpy().tobytes())
        self.voices, self.folder = voices, folder / digest.hexdigest()  # a model serves the run that made it alone

    def all(self) -> list[Person]:
        """Everyone whose folder is whole."""
        found = [self._read(path) for path in sorted(self.folder.glob("*/voice.json"))]
        return sorted((person for person in found if person is not None), key=lambda person: person.name)

    def add(self, name: str, sentences: Sequence[str], context: str = "") -> Person:
        """Learn a person's model by the method's own way for new users, and keep it."""
        name, kept = " ".join(name.split()), [text for text in map(str.strip, sentences) if text]
        if not name or len(name) > LONGEST_NAME or not name.isprintable():
            raise UserError(f"a name of 1 to {LONGEST_NAME} printable characters is needed, not {name[:80]!r}")
        if any(person.name.casefold() == name.casefold() for person in self.all()):
            raise UserError(f"there is a {name!r} already; delete it first, or choose another name")
        if not 1 <= len(kept) <= MOST:
            raise UserError(f"1 to {MOST} sentences are needed, one a line; there are {len(kept)}")
        context = self.voices.context(context) if self.voices.contexts else ""
        personal = self.voices.models.newcomer(rows_of(self.voices, kept, context))
        person = Person(secrets.token_hex(8), name, context, len(kept))
        place = self.folder / person.id
        place.mkdir(parents=True, mode=0o700)
        write_arrays(place / "voice.safetensors", flatten(personal))
        write_text(place / "voice.json", json.dumps({"format": VOICE_FORMAT, **asdict(person)}, indent=1))
        return person

    def delete(self, id: str) -> None:
        """Delete everything of a person."""
        shutil.rmtree(self._place(id))

    def voice(self, id: str, context: str = "") -> Voice:
        """A person's voice; `context` is that of the sentences if none is named."""
        person, model = self._read(self._place(id) / "voice.json"), self.model(id)
        assert person is not None
        return self.voices.voice("person", person.name, context or person.context, model)

    def model(self, id: str) -> Tree:
        return unflatten(open_arrays(self._place(id) / "voice.safetensors")[0])

    def _place(self, id: str) -> Path:
        place = self.folder / id
        if not re.fullmatch(r"[0-9a-f]{16}", id) or self._read(place / "voice.json") is None:
            raise UserError(f"there is no person {id[:40]!r} on this machine; was it deleted?")
        return place

    def _read(self, path: Path) -> Person | None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("format") != VOICE_FORMAT or found["id"] != path.parent.name:
                return None
            return Person(**found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # half deleted, or not ours
