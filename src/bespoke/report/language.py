"""The page's section on texts: words typical of groups, and test sentences with each method's perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

from bespoke.errors import UserError
from bespoke.plain import JsonObject
from bespoke.statistics.folders import FinishedRun, RunSet


class Example(TypedDict):
    """A test sentence."""

    client: str
    row: int
    group: str
    text: str
    loss: float
    tokens: int
    perplexity: dict[str, float]  # by label


class TextParts(TypedDict, total=False):
    """What language.html.jinja tells of texts."""

    typical: list[tuple[str, list[str]]]  # words by group
    examples: list[Example]
    seed: int


LONGEST = 400  # characters of a sentence that are shown


def text_parts(study: RunSet) -> TextParts:
    """What language.html.jinja tells of texts; empty under privacy, and of runs that left none."""
    if study.private or not study.runs:
        return {}
    first = [run for run in study.runs if run.seed == study.runs[0].seed]
    return {"typical": _typical(first[0]), "examples": _examples(first), "seed": study.runs[0].seed}


def _typical(run: FinishedRun) -> list[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for row in _read(run.folder / "typical.parquet"):
        groups.setdefault(row["group"], []).append(row["word"])
    return list(groups.items())


def _examples(runs: Sequence[FinishedRun]) -> list[Example]:
    """One entry a sentence, with its perplexity by label."""
    found: dict[tuple[str, int], Example] = {}
    for run in runs:
        for row in _read(run.folder / "examples.parquet"):
            key = row["client"], row["row"]
            shown = row["text"] if len(row["text"]) <= LONGEST else row["text"][: LONGEST - 1] + "…"
            empty: dict[str, float] = {}
            entry = found.setdefault(key, cast(Example, {**row, "text": shown, "perplexity": empty}))
            with np.errstate(over="ignore"):
                entry["perplexity"][run.label] = float(np.exp(row["loss"] / row["tokens"]))
    return sorted(found.values(), key=lambda entry: entry["group"])


def _read(path: Path) -> list[JsonObject]:
    """The rows of a table that a run may have left."""
    if not path.exists():
        return []
    from pyarrow import ArrowException, parquet

    try:
        rows: list[JsonObject] = parquet.read_table(path).to_pylist()
        return rows
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); the folder is damaged: run the experiment again") from None
