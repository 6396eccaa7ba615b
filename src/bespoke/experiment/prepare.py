"""Prepares loaded rows for training: encodes them, standardizes them by the training rows, and splits them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bespoke.data.about import Standardized
from bespoke.data.periods import Period, periods
from bespoke.data.population import Population
from bespoke.data.sources.formats.topics import grouped
from bespoke.data.splits import Reporting, Rows, Selection, Split, Train, cross_device, cross_silo
from bespoke.data.standardize import Scope, standardize
from bespoke.data.tables.schema import Statistics
from bespoke.errors import UserError
from bespoke.experiment.config import ExperimentConfig
from bespoke.experiment.encoding import EncodingRules, encoded
from bespoke.federation.batches import columns_of
from bespoke.privacy.accountant import Participation
from bespoke.privacy.settings import PrivacyConfig
from bespoke.randomness import uniform
from bespoke.tensors import Params

FEW = 4  # rows for the trial of a user's own model
FULL_UP_TO = 200  # with at most so many clients, all take part in every round


@dataclass(frozen=True)
class Prepared:
    """Rows ready for training: encoded, standardized, and split."""

    population: Population
    split: Split
    plain: Population  # encoded, not standardized
    scales: tuple[Scope, Statistics]  # the kind of standardization, and the given means and deviations
    earlier: tuple[Period, ...] = ()


def prepare(
    config: ExperimentConfig, raw: Population, store: Path | None = None, privacy: PrivacyConfig | None = None
) -> Prepared:
    """Splits the rows, encodes them and standardizes them by the training rows.

    `store` is the file of noised statistics under privacy. An existing file is used, and nothing is released again.
    """
    privacy = privacy or config.privacy
    *earlier, last = periods(raw, lambda rows: make_split(rows, config))
    for period in (*earlier, last):
        _check_split(period.population, period.split, config)
    advice = raw.about.get("standardize", Standardized(features="none", target=False))
    how = config.data.standardize or advice["features"]
    if earlier and (how != "none" or advice["target"]):
        raise UserError(
            f"data.standardize = {how!r}: the rows of {raw.about['name']} come and go, and means of rows that are not "
            "there yet are not known; use 'none'"
        )
    train = last.split.train
    kind = _kind(config, privacy, len(train.clients)) if privacy else "known"
    raw = grouped(last.population, last.split)
    key, model = split_key(config, privacy), config.model.pretrained
    found = encoded(raw, train, EncodingRules(how, advice["target"], privacy, kind, key, store, model))
    population = standardize(found.population, train, how, advice["target"], found.given)
    return Prepared(population, moved(last.split, population), found.population, (how, found.given), tuple(earlier))


def split_key(config: ExperimentConfig, privacy: PrivacyConfig | None) -> str:
    """A key of everything, except the data, on which split, encoding and standardization depend."""
    seed = config.seed if config.split.seed is None else config.split.seed
    released = [privacy.model_dump(), config.cohort.model_dump()] if privacy and privacy.share else bool(privacy)
    return json.dumps([config.split.model_dump(), seed, config.data.standardize, released, config.model.pretrained])


def few_rows(train: Train) -> Params:
    """A few training rows, on which a user's own model is tried."""
    population, found = train.population, np.zeros(0, np.int64)
    for client in train.clients:
        found = np.concatenate([found, train.of(np.array([client]))[0]])[:FEW]
        if len(found) == FEW:
            break
    return {name: population.columns[name][found] for name in columns_of(population)}


def _kind(config: ExperimentConfig, privacy: PrivacyConfig, trained: int) -> Participation:
    """The kind of participation, before stages are known. A stage with more participants costs no more."""
    cohort, asked = config.cohort, config.cohort.sampling
    everyone = asked not in ("poisson", "uniform") or cohort_size(config, trained) >= trained
    if everyone or privacy.local_noise is not None or cohort.over_select > 1:
        return "known"
    return "poisson" if asked == "poisson" else "fixed"


def cohort_size(config: ExperimentConfig, trained: int) -> int:
    return min(config.cohort.size or (trained if trained <= FULL_UP_TO else 100), max(trained, 1))


def make_split(population: Population, config: ExperimentConfig) -> Split:
    options = config.split
    if options.order == "time" and "time" not in population.columns:
        name = population.about.get("name", "this data")
        raise UserError(
            f"split.order = 'time': {name} has no time column; a table's is named by --time COLUMN, or by time "
            "in [data]"
        )
    seed = config.seed if options.seed is None else options.seed
    if options.protocol == "cross-silo":
        return cross_silo(population, options.fractions, seed, options.order)
    role = None
    if "role" in population.columns:  # the source declares held-out clients
        role = population.columns["role"].numpy()[population.offsets[:-1]].astype("int64")
        if not (role == 1).any():  # without validation clients of its own, take them from the training clients
            chosen = uniform("validation clients", seed, population.keys) < options.held_out[0]
            role[(role == 0) & chosen] = 1
    return cross_device(
        population, options.held_out, options.adapt, seed, options.order, options.own_validation, role
    )  # fmt: skip


def _check_split(population: Population, split: Split, config: ExperimentConfig) -> None:
    """Refuses a split without training clients or without test clients."""
    training, testing = len(split.train.clients), len(split.test.query.clients)
    if training and testing:
        return
    missing = "trained on" if not training else "tested on"
    if split.kind == "cross-device":
        validation, test = config.split.held_out
        raise UserError(
            f"cross-device: of {len(population)} clients {training} train and {testing} are tested (fractions "
            f"held_out = {validation:g} for validation, {test:g} for test; a test client needs two rows), so "
            f"nothing can be {missing}; use more clients, other fractions or --protocol cross-silo"
        )
    sizes = population.sizes()
    raise UserError(
        f"nothing can be {missing}: the {len(population)} clients have at most {sizes.max()} rows each, too few for "
        f"split.fractions = {config.split.fractions}"
    )


def moved(split: Split, population: Population) -> Split:
    """The same split of a population with the same clients and rows but transformed columns."""

    def move(rows: Any) -> Any:
        assert isinstance(rows, Rows)
        there = replace(rows, population=population)
        known = split.train.__dict__.get("_all")  # the cached training rows stay valid, because no row has moved
        if known is not None and rows.part == split.train.part:
            there.__dict__["_all"] = known
        return there

    selection = Selection(move(split.selection.support), move(split.selection.validation))
    test = Reporting(move(split.test.support), move(split.test.validation), move(split.test.query))
    return Split(move(split.train), selection, test, split.kind)
