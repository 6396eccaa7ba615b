"""Loads the rows that [data] names: a source, a table, texts, or a population on disk."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from bespoke.data.about import TextRule
from bespoke.data.population import Population
from bespoke.experiment.config import FEATURES, TEXT, DataConfig, ExperimentConfig
from bespoke.plain import JsonObject


def load_population(config: ExperimentConfig) -> Population:
    """Loads the rows as their source gives them."""
    data = config.data
    if data.population is not None:
        from bespoke.data.arrays import open_population

        return open_population(Path(data.population))
    if data.table is not None:
        from bespoke.data.tables.schema import Schema
        from bespoke.data.tables.table import open_table

        if data.target is None:
            return _texts(data, config.model.pretrained)
        if Path(data.table).is_dir():
            from bespoke.data.tables.pictures import FOLDER, open_pictures

            return open_pictures(
                data.table, data.client or FOLDER, data.target, task=data.task, size=data.size, colour=data.colour
            )
        assert data.client
        return open_table(
            Path(data.table), data.client, data.target,
            group=data.group, features=data.features, time=data.time, task=data.task,
            schema=Schema.read(Path(data.schema_file)) if data.schema_file else None, text=data.text,
            how=cast(TextRule, {name: value for name in FEATURES if (value := getattr(data, name)) is not None}),
        )  # fmt: skip
    from bespoke.data.sources.registry import load_source, source_options

    assert data.source is not None
    given = _own_tokens(config.model.pretrained) if "pretrained" in source_options(data.source) else {}
    return load_source(data.source, **{**given, **data.options})


def _own_tokens(pretrained: str) -> JsonObject:
    """The default tokenizer of texts for a pretrained model: its own, without an end token."""
    return {"tokenizer": "model", "pretrained": pretrained, "end": False} if pretrained else {}


def _texts(data: DataConfig, pretrained: str) -> Population:
    """Texts for next-word prediction."""
    from bespoke.data.tables.documents import Segmenting, open_texts
    from bespoke.data.tables.schema import read_words

    given = _own_tokens(pretrained)
    given |= {name: getattr(data, name) for name in TEXT if name != "context" and getattr(data, name) is not None}
    return open_texts(
        str(data.table), data.client, data.text, group=data.group, context=data.context, time=data.time,
        how=Segmenting(**given),
        words=read_words(Path(data.schema_file)) if data.schema_file else None,
    )  # fmt: skip
