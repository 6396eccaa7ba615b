"""Reads hypothesis lists (n-best lists) of a speech recogniser: one utterance per line of JSON (docs/rescoring.md)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bespoke.errors import UserError, unknown
from bespoke.plain import JsonObject
from bespoke.randomness import text_key, uniform

SPLITS = ("validation", "test")
VALIDATION = 1 / 3  # of the utterances whose line does not name a split
FIELDS = ("id", "client", "group", "split", "reference", "hypotheses")


@dataclass(frozen=True)
class Hypotheses:
    """A recogniser's hypotheses for one utterance, best first, with their log-probabilities."""

    id: str
    client: str
    texts: tuple[str, ...]
    scores: tuple[float, ...]
    reference: str | None = None
    split: str = ""  # "": not given
    group: str | None = None

    def split_by_id(self) -> str:
        """The split that the line names, or else one drawn by a hash of the id."""
        drawn = float(uniform("rescoring", text_key(self.id)))
        return self.split or ("validation" if drawn < VALIDATION else "test")

    def to_json(self) -> JsonObject:
        given = {"client": self.client, "group": self.group, "split": self.split, "reference": self.reference}
        hypotheses = [{"text": text, "score": score} for text, score in zip(self.texts, self.scores)]
        return {"id": self.id, **{k: v for k, v in given.items() if v}, "hypotheses": hypotheses}


def read_nbest(path: Path, client: str | None = None) -> list[Hypotheses]:
    """The utterances of a file; `client` is whose they are where a line does not say."""
    if not path.is_file():
        raise UserError(f"there is no file {path}; it must hold one JSON object per line, see docs/rescoring.md")
    found: dict[str, Hypotheses] = {}
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    utterance = _utterance(_parsed(line, where), where, client)
                    if utterance.id in found:
                        raise UserError(f"{where}: the id {utterance.id!r} is also on an earlier line; ids must differ")
                    found[utterance.id] = utterance
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text ({error})") from None
    if not found:
        raise UserError(f"{path} holds no utterance")
    return list(found.values())


def _parsed(line: str, where: str) -> JsonObject:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: no JSON ({error})") from None
    if not isinstance(entry, dict):
        raise UserError(f"{where}: {_short(entry)} is not a JSON object with the fields {', '.join(FIELDS)}")
    return entry


def _utterance(entry: JsonObject, where: str, client: str | None) -> Hypotheses:
    for name in entry:
        if name not in FIELDS:
            raise unknown("field", name, FIELDS, where)
    values = {name: _text(entry.get(name), name, where) for name in ("id", "client", "group", "split", "reference")}
    if not values["id"]:
        raise UserError(f"{where}: the field 'id' is missing: the name of the utterance")
    owner = values["client"] or client
    if not owner:
        raise UserError(f"{where}: the field 'client' is missing; name the client there, or with --client ID")
    split = values["split"] or ""
    if split and split not in SPLITS:
        raise unknown("split", split, SPLITS, where)
    hypotheses = entry.get("hypotheses")
    if not isinstance(hypotheses, list) or not hypotheses:
        raise UserError(
            f"{where}: the field 'hypotheses' is {'missing' if hypotheses is None else _short(hypotheses)}; it has to "
            'be a list of one or more {"text": ..., "score": ...}, the recogniser\'s best first'
        )
    texts, scores = zip(*(_hypothesis(h, f"{where}, hypothesis {i}") for i, h in enumerate(hypotheses, start=1)))
    return Hypotheses(values["id"], owner, texts, scores, values["reference"], split, values["group"])


def _text(value: Any, name: str, where: str) -> str | None:
    """A field that is a text; a number is an id as good as any."""
    if isinstance(value, int) and not isinstance(value, bool) and name != "reference":
        return str(value)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: {name} = {_short(value)}: it has to be a text")
    return value


def _hypothesis(entry: Any, where: str) -> tuple[str, float]:
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise UserError(f'{where}: {_short(entry)} has no field "text" that is a text')
    score = entry.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise UserError(
            f"{where}: score = {_short(score)}: it has to be a finite number, the recogniser's log-probability"
        )
    return entry["text"], float(score)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
