"""Learns the encoding of the data before training: from training rows only, from a declared schema, or with noise.

Categories, class names, missing values, first dates, means and deviations are learned from clients, and an observer of
a model sees them. Under [privacy] each of them is declared public, or released with noise that the account counts (see
privacy/release.py), or named as the reason why there is no guarantee.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.splits import Train
from bespoke.data.standardize import Scope, is_table, pools
from bespoke.data.tables.features import encode, learned
from bespoke.data.tables.schema import Column, Schema, Statistics, Target
from bespoke.data.texts import vocabulary as texts
from bespoke.digests import read_json
from bespoke.privacy.accountant import Participation, Spent, calibrated
from bespoke.privacy.noise import keyed_normal, secret_normal
from bespoke.privacy.release import Learner, Release, keep_words, words_file
from bespoke.privacy.settings import PrivacyConfig

Floats = NDArray[np.float64]
MONTH = (0.0, math.sqrt(0.5))  # mean and deviation of a month's sine and cosine, if all are equally frequent
SCHEMA = (
    "categories, class names and missing values are learned from clients without noise (declare them: --schema FILE or "
    "data.schema; or say privacy.public_schema = true if they are public; with a budget on released models they are "
    "paid for: privacy.statistics)"
)
WORDS = (
    "which words are known is learned from clients without noise (declare them: --schema FILE or data.schema; or say "
    "privacy.public_schema = true if they are public; with a budget on released models they are paid for: "
    "privacy.statistics)"
)


@dataclass(frozen=True)
class EncodingRules:
    """What an experiment must learn from the data."""

    how: Scope
    target: bool  # the target is standardized
    privacy: PrivacyConfig | None = None
    kind: Participation = "known"  # the kind of participation, which defines neighbours
    key: str = ""  # identifies this split of these data
    store: Path | None = None  # the file of a release
    pretrained: str = ""  # the model whose tokens are used


@dataclass(frozen=True)
class Encoded:
    """Rows as features and target, with the means and deviations that are already known."""

    population: Population
    given: Statistics


def encoded(raw: Population, train: Train, wanted: EncodingRules) -> Encoded:
    """Encodes rows by the training rows, by a declared schema, or by statistics released with noise."""
    if wanted.pretrained and "pieces" in raw.columns:
        return Encoded(texts.encode_pretrained(raw, wanted.pretrained), {})
    privacy, declared = wanted.privacy, _declared(raw)
    release = Release.read(wanted.store) if wanted.store and wanted.store.exists() else None
    if release is None and privacy is not None and privacy.share:
        release = _released(raw, train, wanted, declared)
    unpaid = []
    population, notes = raw, []
    if "cells" in raw.columns:
        schema = declared
        if release is not None and release.schema is not None:
            schema, notes = Schema.of(release.schema, "the released schema"), release.notes
            population = replace(raw, about={**raw.about, "notes": []})  # the notes count rows and values
            if "pieces" in raw.columns:
                remaining = raw.about["text"]["column"]
                notes = [*notes, f"Left out: no words of {remaining} are released; declare them: --schema FILE."]
        elif schema is None:
            rows, _ = train.of(train.clients)
            schema = learned(raw, rows, notes)
            unpaid = [SCHEMA] if privacy and not privacy.public_schema else []
        population = encode(population, schema, notes)
    elif "pieces" in raw.columns:
        rows, _ = train.of(train.clients)
        if release is not None and release.schema is not None:
            words, notes = release.schema["words"], release.notes
            population = replace(raw, about={**raw.about, "notes": []})  # the notes count rows and texts
        elif (words := _known_words(raw, privacy)) is None:
            words = _kept_words(raw, rows, wanted.store)
            unpaid = [WORDS] if privacy and not privacy.public_schema else []
            notes = [texts.said(raw, words, rows)]
        population = texts.encode(population, words, rows, notes)
    elif release is not None:
        population = replace(raw, about={**raw.about, "notes": [*raw.about.get("notes", []), *release.notes]})
    if privacy and raw.about.get("learned") and not privacy.public_schema:
        unpaid.append(f"{raw.about['learned']} (say privacy.public_schema = true if that is public)")
    given = {**(declared.ranges() if declared and privacy else {}), **(declared.statistics if declared else {})}
    about = population.about.copy()
    if unpaid:
        about["unpaid"] = unpaid
    if release:
        about["release"] = asdict(release)
    return Encoded(replace(population, about=about), {**given, **(release.statistics if release else {})})


def _known_words(raw: Population, privacy: PrivacyConfig | None) -> list[str] | None:
    """A vocabulary that is known without the data: declared, or under privacy all pieces of a public tokenizer."""
    public = raw.about.get("public") if privacy and not privacy.public_schema else None
    return raw.about.get("declared") or public


def _kept_words(raw: Population, rows: NDArray[np.int64], store: Path | None) -> tuple[str, ...]:
    """The vocabulary of the training rows, or the one with which the models of the folder were begun.

    A forgotten client changes the counts of words, but must not change the meaning of tokens.
    """
    path = words_file(store) if store else None
    if path is not None and path.exists():
        return tuple(read_json(path, "begin in another folder")["words"])
    words = texts.learned(raw, rows)
    if path is not None:
        keep_words(path, words)
    return words


def _declared(raw: Population) -> Schema | None:
    return Schema.of(raw.about["schema"], "the schema") if "schema" in raw.about else None


def _released(raw: Population, train: Train, wanted: EncodingRules, declared: Schema | None) -> Release | None:
    """Learns with noise everything that is neither declared nor public, and stores it; None if there is nothing."""
    privacy, table = wanted.privacy, "cells" in raw.columns
    assert privacy is not None
    spoken = "pieces" in raw.columns and _known_words(raw, privacy) is None and not privacy.public_schema
    hidden = table and declared is None and not privacy.public_schema
    values, names = _numbers(raw, train, wanted, declared)
    if not hidden and not names and not spoken:
        return None
    kinds = [entry["kind"] for entry in raw.about["columns"]] if hidden else []
    open_ended = spoken or "category" in kinds or (hidden and raw.about.get("levels") is not None)
    delta = privacy.delta or max(len(train.clients), 2) ** -1.1
    lost = privacy.share * delta if open_ended else 0.0
    assert privacy.epsilon is not None

    def cost(noise: float) -> float:
        return Spent(wanted.kind, releases={"": (noise, lost)}).epsilon(delta, privacy.accountant)

    noise = calibrated(cost, privacy.share * privacy.epsilon, "privacy.statistics")
    rounds = 3 if names else 1
    digest = hashlib.blake2b(wanted.key.encode(), digest_size=8).hexdigest()
    name = digest if privacy.reproducible else secrets.token_hex(8)

    def draw(shape: tuple[int, ...], purpose: str) -> Floats:
        return keyed_normal(shape, "statistics", name, purpose) if privacy.reproducible else secret_normal(shape)

    learner = Learner(train, noise * math.sqrt(rounds), lost, draw)
    if spoken:
        words, notes = learner.words(raw)
        made = Release(name, noise, lost, {}, {"words": words}, notes, learner.floats)
        return made.kept(wanted.store) if wanted.store else made
    schema, magnitudes, notes = learner.items(raw if hidden else None, values, names)
    statistics = learner.scales(values, names, magnitudes) if names else {}
    if names:
        statistics |= dict.fromkeys(_months(raw), MONTH)
    made = Release(name, noise, lost, statistics, schema.to_json() if schema else None, notes, learner.floats)
    return made.kept(wanted.store) if wanted.store else made


def _numbers(raw: Population, train: Train, wanted: EncodingRules, declared: Schema | None) -> tuple[Floats, list[str]]:
    """The numbers of the training rows whose means and deviations are learned, and their names."""
    rows, _ = train.of(train.clients)
    privacy, columns, names = wanted.privacy, list[Floats](), list[str]()
    known = {*_months(raw), *(declared.ranges() if declared else ()), *(declared.statistics if declared else ())}
    if privacy is None or privacy.public_statistics:
        return np.zeros((len(rows), 0)), []
    plain = _plain(raw, declared)
    if plain is not None and pools(plain, train, wanted.how):
        x, about = plain.columns["x"].numpy(), plain.about
        for place in np.flatnonzero(about.get("numeric", [])).tolist():
            name = about["features"][place]
            if name not in known:
                columns.append(x[rows, place].astype(np.float64))
                names.append(name)
    target = raw.about.get("target", "")
    if wanted.target and target not in known:
        columns.append(raw.columns["y"].numpy()[rows].astype(np.float64))
        names.append(target)
    return np.column_stack(columns) if columns else np.zeros((len(rows), 0)), names


def _months(raw: Population) -> list[str]:
    """The features of a table whose range is known without data."""
    dates = [entry["name"] for entry in raw.about.get("columns", ()) if entry["kind"] == "date"]
    return [f"{name} {part}" for name in dates for part in ("month sin", "month cos")]


def _plain(raw: Population, declared: Schema | None) -> Population | None:
    """The numeric features of a source or a table; None if there are none."""
    if "cells" not in raw.columns:
        return raw if "x" in raw.columns and is_table(raw) else None
    listed = declared.columns if declared else tuple(Column(c["name"], c["kind"]) for c in raw.about["columns"])
    numbers = tuple(column for column in listed if column.kind in ("number", "date"))
    return encode(raw, Schema(numbers, Target(raw.about["target"]))) if numbers else None
