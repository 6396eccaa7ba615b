"""Checks of experiments, comparisons and tunings; messages say what is wrong, where, and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bespoke.errors import UserError, unknown
from bespoke.experiment.callbacks import check_callbacks
from bespoke.experiment.config import (
    AUTO,
    FEATURES,
    MOST_PIXELS,
    MOST_SEEDS,
    TEXT,
    CompareConfig,
    DataConfig,
    EngineConfig,
    ExperimentConfig,
    SplitConfig,
    TuneConfig,
)
from bespoke.experiment.recorded import recorded
from bespoke.experiment.stage import check_acceptance, stages_of
from bespoke.experiment.typed import check_numbers, explain
from bespoke.experiment.variants import check_entries, labelled
from bespoke.messages.robust.settings import check_attack, check_robust, equal_weights
from bespoke.messages.secure.settings import check_secure
from bespoke.methods import METHODS
from bespoke.plain import TomlTable
from bespoke.privacy.settings import check_privacy, check_robust_rule, uniform_weights


def checked(raw: TomlTable, where: str) -> ExperimentConfig:
    """Validates an experiment; errors say what is wrong, where, and what is allowed."""
    check_numbers(raw, where)
    raw = recorded(_given(raw), where)
    if raw.get("privacy") is not None and isinstance(raw.get("stage"), list):
        stages = [uniform_weights(stage, METHODS) if isinstance(stage, dict) else stage for stage in raw["stage"]]
        raw = {**raw, "stage": stages}
    if raw.get("robust") is not None and isinstance(raw.get("stage"), list):
        stages = [equal_weights(s, METHODS, where) if isinstance(s, dict) else s for s in raw["stage"]]
        raw = {**raw, "stage": stages}
    try:
        config = ExperimentConfig.model_validate(raw)
    except ValidationError as error:
        raise explain(error, ExperimentConfig, where) from None
    check_numbers(config.data.options, where, "data.options", finite=True)
    check_numbers(config.model.model_dump(), where, "model", finite=True)
    _check_data(config.data, where)
    _check_split(config.split, where)
    check_engine(config.engine, where)
    if config.privacy is not None:
        check_privacy(config.privacy, where, clip=config.transform.clip, keep=config.transform.top_k)
    if config.robust is not None:
        check_robust(config.robust, where)
        if config.privacy is not None:
            check_robust_rule(config.robust, config.privacy, where)
    if config.attack is not None:
        check_attack(config.attack, where)
    if config.callbacks is not None:
        check_callbacks(config.callbacks, where)
    if config.secure is not None:
        check_secure(
            config.secure, where, robust=config.robust if config.privacy is None else None, attack=config.attack,
            compresses=[name for name in ("top_k", "quantize") if getattr(config.transform, name) is not None],
            dropout=config.cohort.dropout, over_select=config.cohort.over_select, sampling=config.cohort.sampling,
            private=config.privacy is not None,
        )  # fmt: skip
    for place, stage in enumerate(stages_of(config, where)):
        if stage.aggregator is not None and stage.aggregator.name != "mean":
            _check_alone(config, f"{where}: stage {place}: aggregator = {stage.aggregator.name!r}")
    return config


def _given(value: Any) -> Any:
    """The same without None values, which TOML cannot express."""
    if isinstance(value, dict):
        return {name: _given(entry) for name, entry in value.items() if entry is not None}
    return [_given(entry) for entry in value] if isinstance(value, list) else value


def check_compare(table: Any, where: str) -> CompareConfig:
    """Validates a [compare] table."""
    check_numbers(table, f"{where}: [compare]")
    try:
        found = CompareConfig.model_validate(labelled(table, where) if isinstance(table, dict) else table)
    except ValidationError as error:
        raise explain(error, CompareConfig, f"{where}: [compare]") from None
    _check_seeds(found.seeds, f"{where}: [compare]")
    if found.rounds != AUTO and int(found.rounds) < 1:
        raise UserError(f"{where}: [compare] rounds = {found.rounds}: it has to be one or more, or {AUTO!r}")
    check_entries(found.entries, where)
    known = {**METHODS, **found.entries}
    for key, names in (("methods", found.methods or []), ("knobs", found.knobs), ("grid", found.grid)):
        for name in names:
            if name not in known:
                raise unknown("method", name, known, f"{where}: [compare] {key}")
    if found.accept:
        check_acceptance(found.accept, f"{where}: [compare] accept")
    given = [found.tune_seeds] if type(found.tune_seeds) is int else found.tune_seeds
    if given != "all" and not (isinstance(given, list) and given and all(type(seed) is int for seed in given)):
        raise UserError(f"{where}: [compare] tune_seeds = {found.tune_seeds!r}: how many, a list of them, or 'all'")
    if type(found.tune_seeds) is int and found.tune_seeds < 1:
        raise UserError(f"{where}: [compare] tune_seeds = {found.tune_seeds}: one or more")
    return found


def check_tune(table: Any, where: str) -> TuneConfig:
    """Validates a [tune] table."""
    check_numbers(table, f"{where}: [tune]")
    try:
        found = TuneConfig.model_validate(table)
    except ValidationError as error:
        raise explain(error, TuneConfig, f"{where}: [tune]") from None
    _check_seeds(found.seeds, f"{where}: [tune]")
    return found


def _check_seeds(seeds: Any, where: str) -> None:
    listed = list(range(min(seeds, MOST_SEEDS + 1))) if type(seeds) is int else seeds
    if isinstance(listed, list) and len(listed) > MOST_SEEDS:
        raise UserError(f"{where} seeds = {seeds!r}: at most {MOST_SEEDS:,}")
    if not isinstance(listed, list) or not listed or any(type(seed) is not int for seed in listed):
        raise UserError(f"{where} seeds = {seeds!r}: how many, one or more, or a list of them")


def _check_alone(config: ExperimentConfig, where: str) -> None:
    """Refuses options that cannot be combined with an aggregator that bounds changes."""
    if config.privacy is not None:
        raise UserError(
            f"{where} beside [privacy]: the server would learn without noise how many clients were zeroed and clipped, "
            "which the privacy account does not hold; leave it out (aggregator = 'mean' where a preset names it) and "
            "use privacy.clip, with privacy.adaptive = true to follow a quantile"
        )
    if config.robust is not None:
        raise UserError(
            f"{where} beside robust.rule = {config.robust.rule!r}: both say how changes become one; leave one of the "
            "two out (aggregator = 'mean' where a preset names it)"
        )


def _check_data(data: DataConfig, where: str) -> None:
    if (data.source is None) + (data.table is None) + (data.population is None) != 2:
        raise UserError(f"{where}: [data] needs one of source, table and population")
    folder = data.table is not None and Path(data.table).is_dir()
    if folder and data.target is not None:
        _check_pictures(data, where)
        return
    if given := [name for name in ("size", "colour") if getattr(data, name) is not None]:
        raise UserError(f"{where}: [data] {', '.join(given)} describe pictures: a folder as table, and a target")
    if data.table is not None and not folder and not (data.client and (data.target or data.text)):
        raise UserError(
            f"{where}: [data] with a table needs client and target, the names of two of its columns (or client and "
            "text, to model texts)"
        )
    if data.text is None and not folder and (given := [name for name in TEXT if getattr(data, name) is not None]):
        raise UserError(f"{where}: [data] {', '.join(given)} describe texts; name their column as text")
    if data.target is None and (given := [name for name in ("features", "task") if getattr(data, name)]):
        raise UserError(f"{where}: [data] {', '.join(given)} need a target; without one the next word is predicted")
    asked = [name for name in TEXT if name not in FEATURES and getattr(data, name) is not None]
    if data.target is not None and asked:
        raise UserError(f"{where}: [data] {', '.join(asked)} are for predicting the next word, and there is a target")
    if data.source is None and data.options:
        what = "table" if data.table is not None else "population"
        raise UserError(f"{where}: data.options are those of a source, and this is a {what}: {sorted(data.options)}")
    named = {**data.model_dump(), "schema": data.schema_file}
    columns = [n for n in ("client", "target", "group", "time", "text", "features", "task", "schema") if named[n]]
    if data.table is None and columns:
        other = f"{data.source!r} is a source" if data.source else f"{data.population!r} is a population"
        raise UserError(f"{where}: [data] {', '.join(columns)} describe a table, and {other}")
    if data.features is not None and not data.features:
        raise UserError(f"{where}: data.features is empty; leave it out to use all other columns")


def _check_pictures(data: DataConfig, where: str) -> None:
    """A folder of pictures has clients and a target, folders or columns of its table of labels."""
    named = {**data.model_dump(), "schema": data.schema_file}
    others = ("group", "time", "text", "features", "schema", "options", *TEXT)
    if given := [name for name in others if named[name]]:
        raise UserError(
            f"{where}: [data] {', '.join(given)}: {data.table} is a folder, and with a target one of pictures, of "
            "which client, target, task, size and colour are said"
        )
    sides = [data.size] * 2 if isinstance(data.size, int) else data.size
    if sides is not None and (len(sides) != 2 or not all(1 <= side <= MOST_PIXELS for side in sides)):
        raise UserError(
            f"{where}: data.size = {data.size!r}: lines and columns of 1 to {MOST_PIXELS}, as in [24, 32], or one "
            "number for both"
        )


def check_engine(engine: EngineConfig, where: str) -> None:
    """Refuses what does not go together with clients on a Ray cluster."""
    address = engine.address
    if address is not None and engine.backend == "processes":
        raise UserError(
            f"{where}: engine.address = {address!r} is that of a Ray cluster, and engine.backend = 'processes' is this "
            "machine; leave one of the two out"
        )
    if address is not None and not re.fullmatch(r"auto|[\w.-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", address):
        other = (
            " (a client outside of the cluster cannot: run the command on one of its nodes)" if "://" in address else ""
        )
        raise UserError(f"{where}: engine.address = {address!r}: 'auto', or host:port of the cluster's head{other}")
    if engine.on_ray and engine.device not in ("auto", "cpu", "cuda"):
        raise UserError(
            f"{where}: engine.device = {engine.device!r} on Ray: each actor is given a GPU by the cluster; use 'cuda', "
            "or 'cpu'"
        )
    if engine.on_ray and engine.workers == 0:
        raise UserError(
            f"{where}: engine.workers = 0 is this process, and engine.backend = 'ray' are actors of a cluster; leave "
            "workers out, or ask for one or more"
        )


def _check_split(split: SplitConfig, where: str) -> None:
    train, _, query = split.fractions
    if abs(sum(split.fractions) - 1) > 1e-6 or min(split.fractions) < 0:
        raise UserError(f"{where}: split.fractions must be three numbers that sum to one, not {split.fractions}")
    if not (train and query):
        raise UserError(
            f"{where}: split.fractions = {split.fractions} leaves no rows to {'be tested' if train else 'train'} on; "
            "only the second, validation, may be zero"
        )
    if min(split.held_out) < 0 or sum(split.held_out) >= 1 or not split.held_out[1]:
        raise UserError(
            f"{where}: split.held_out = {split.held_out}: two fractions, of validation and of test clients; the second "
            "above zero, both together below one, for the rest of the clients train"
        )
    if split.own_validation >= split.adapt:
        raise UserError(
            f"{where}: split.own_validation = {split.own_validation} is taken from the rows a client adapts on: it has "
            f"to be less than split.adapt = {split.adapt}"
        )
    if split.order == "motley" and split.protocol == "cross-device":
        raise UserError(f"{where}: split.order = 'motley' is that of Motley's cross-silo code; use 'random' or 'time'")
