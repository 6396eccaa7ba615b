"""Builds an Experiment from a configuration: loads and prepares rows, makes the task and methods, checks all of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from bespoke.data.about import About
from bespoke.data.periods import FOREVER, Period
from bespoke.data.population import Population
from bespoke.errors import unknown
from bespoke.experiment.config import AUTO, ExperimentConfig, TransformConfig
from bespoke.experiment.experiment import Experiment, Stage, engine_choice
from bespoke.experiment.fits import (
    check_buffers,
    check_changes,
    check_fit,
    check_groups,
    check_stages_fit,
    group_sizes,
)
from bespoke.experiment.loading import load_population
from bespoke.experiment.prepare import Prepared, cohort_size, few_rows, moved, prepare, split_key
from bespoke.experiment.stage import stages_of
from bespoke.federation.engine import Choice as EngineChoice
from bespoke.messages.clip import Clip
from bespoke.messages.compress import Compress
from bespoke.messages.robust.attack import attacked, attackers, message_attack
from bespoke.messages.robust.settings import check_methods
from bespoke.messages.secure.settings import check_cohorts, check_each
from bespoke.messages.transform import Transform
from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.models import build_task
from bespoke.models.own_metric import METRICS
from bespoke.models.task import BaseTask
from bespoke.plain import TomlTable
from bespoke.privacy.release import RELEASE
from bespoke.privacy.settings import PrivacyConfig, check_fields

MOST_ROUNDS = 300  # of a stage with rounds = "auto"
AUTO_EVERY = 5  # rounds between two checks of convergence
SHARED = 2**28  # bytes of standardized rows kept for runs of the same split
KEPT = 64  # experiments kept for runs of the same configuration


def build(
    config: ExperimentConfig, population: Population | None = None, prepared: Prepared | None = None,
    folder: Path | None = None,
) -> Experiment:  # fmt: skip
    """Builds a complete experiment; `population` (as loaded, or prepared, see Bench) may be given.

    `folder` is that of the run; it keeps the noised statistics of the data under privacy.
    """
    if prepared is None:
        raw = population if population is not None else load_population(config)
        prepared = prepare(config, raw, folder / RELEASE if folder else None)
    bad = _attackers(config, prepared)
    if config.attack is not None:
        kind = config.attack.kind
        parts = [*prepared.earlier, Period(FOREVER, prepared.population, prepared.split)]
        *earlier, last = (attacked(period, bad, kind, moved) for period in parts)
        prepared = replace(prepared, population=last.population, split=last.split, earlier=tuple(earlier))
    population, split = prepared.population, prepared.split
    options = dict(config.model.model_extra or {})
    rows = partial(few_rows, split.train)
    task = build_task(population.about, config.model.name, config.safe_steps, rows, config.model.loss, **options)
    task, metric = _scored(task, config, population.about)
    stages = []
    for place, asked in enumerate(stages_of(config)):
        auto = asked.rounds == AUTO
        method = METHODS.find(asked.method, f"stage {place}")(task, **asked.knobs)
        bounded = asked.aggregator.transform(method) if asked.aggregator else None
        stages.append(Stage(method, MOST_ROUNDS if auto else int(asked.rounds), asked.accept, auto, bounded))
        check_fit(stages[-1].method, task, population, f"stage {place}")
    check_buffers(config, task, stages)
    check_stages_fit([stage.method for stage in stages])
    check_groups(population, stages)
    check_changes(config, prepared.earlier, sum(stage.rounds for stage in stages))
    trained = len(split.train.clients)
    most = max(stage.rounds for stage in stages)
    every = AUTO_EVERY if any(stage.auto for stage in stages) else max(most // 10, 1)
    sampling = config.cohort.model_dump(exclude={"size"})
    transforms = transforms_of(config.transform)
    for stage in stages:
        also = (stage.aggregator,) if stage.aggregator else ()
        for transform in (*also, *transforms) if stage.method.trains else ():
            transform.check(stage.method)
    if config.privacy is not None:
        check_fields(config.privacy, [stage.method for stage in stages if stage.rounds])
    cohort = cohort_size(config, trained)
    if config.robust is not None:
        check_methods(config.robust, [stage.method for stage in stages if stage.rounds], cohort)
    secure = config.secure if config.secure is not None and config.secure.sums else None
    if secure is not None:
        check_each([s.method for s in stages if s.rounds], [s.aggregator for s in stages if s.aggregator])
        grouped = any(s.rounds and type(s.method).groups is not Method.groups for s in stages)
        groups = group_sizes(population, split.train.clients) if grouped else {}
        everyone = any(s.rounds and s.method.needs.everyone for s in stages)
        contacted = min(trained, round(cohort * config.cohort.over_select))
        check_cohorts(secure, cohort, trained if everyone else contacted, groups)
    keys = frozenset(population.keys[bad].tolist())
    return Experiment(
        label=config.label or stages[-1].method.card.name,
        population=population,
        split=split,
        task=task,
        stages=tuple(stages),
        metric=metric,
        seed=config.seed,
        cohort=cohort,
        sampling=sampling,
        transforms=(*(message_attack(config.attack, keys) if config.attack else ()), *transforms),
        robust=config.robust if config.privacy is None else None,  # else privacy.clip bounds
        attack=config.attack,
        secure=secure,
        attackers=tuple(bad.tolist()),
        privacy=config.privacy,
        evaluate_every=config.evaluate_every or every,
        watched=config.watched,
        engine=config.engine.model_dump(exclude={"backend", "address"}, exclude_none=True),
        config=resolved(config),
        earlier=prepared.earlier,
    )


class Bench:
    """Builds many experiments on one population. Experiments with the same split share their preparation.

    Nothing is built twice: a trial and the run with the same configuration share an experiment.
    `folder` keeps the noised statistics of the data under privacy, for all of them.
    """

    def __init__(self, population: Population, folder: Path | None = None) -> None:
        self.population, self.folder = population, folder  # as loaded
        self.made: dict[str, Prepared] = {}
        self.built: dict[str, tuple[Prepared, Experiment]] = {}  # by configuration
        self.engines: dict[str, EngineChoice] = {}

    def prepared(self, config: ExperimentConfig, privacy: PrivacyConfig | None = None) -> Prepared:
        """The prepared rows for a configuration; `privacy` is that of the other runs, if this one has none."""
        privacy = privacy or config.privacy
        key = split_key(config, privacy)
        if key not in self.made:
            room = SHARED // max(sum(c.nbytes for c in self.population.columns.values()), 1)
            while len(self.made) >= max(room, 1):  # remove the oldest, because seeds come in turn
                gone = self.made.pop(next(iter(self.made)))
                self.built = {key: pair for key, pair in self.built.items() if pair[0] is not gone}
            name = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
            kept = privacy or "pieces" in self.population.columns  # noised statistics, or a vocabulary
            store = self.folder / "statistics" / f"{name}.json" if self.folder and kept else None
            self.made[key] = prepare(config, self.population, store, privacy)
        return self.made[key]

    def build(self, config: ExperimentConfig, privacy: PrivacyConfig | None = None) -> Experiment:
        prepared = self.prepared(config, privacy)
        key = json.dumps(resolved(config), default=repr)
        before, experiment = self.built.get(key, (None, None))
        if experiment is None or before is not prepared:
            experiment = build(config, prepared=prepared)
            while len(self.built) >= KEPT:
                del self.built[next(iter(self.built))]
            if experiment.population is prepared.population:  # rows that an attack changed would stay in memory
                self.built[key] = prepared, experiment
        return experiment

    def engine_choice(self, experiment: Experiment) -> EngineChoice:
        """How the experiment's clients are executed, chosen once for a model and its methods, whatever their knobs."""
        config = experiment.config
        tables = [config.get(name) for name in ("model", "cohort", "engine", "privacy", "transform", "safe_steps")]
        key = json.dumps([*tables, [stage["method"] for stage in config["stage"]]], default=repr)
        if key not in self.engines:
            self.engines[key] = engine_choice(experiment)
        return self.engines[key]


def _scored(task: BaseTask, config: ExperimentConfig, about: About) -> tuple[BaseTask, str]:
    """The task with the metrics of the experiment, and the metric for choices."""
    asked = config.metric or about.get("metric") or task.metrics[0]
    named = dict.fromkeys([asked, *(config.metrics or [])])
    own = {}
    for name in named:
        if name not in task.metrics:
            if not METRICS.knows(name):
                raise unknown("metric", name, [*task.metrics, *METRICS.origins()], "the experiment")
            own[name] = METRICS.find(name, "the experiment's metric")
    task = task.with_metrics(tuple(own.values()), float(about.get("centre", 0.0)))
    return task, own[asked].name if asked in own else asked


def _attackers(config: ExperimentConfig, prepared: Prepared) -> Any:
    """The attacking clients; empty without an attack."""
    if config.attack is None:
        return np.zeros(0, np.int64)
    return attackers(prepared.population, prepared.split.train.clients, config.attack, config.seed)


def transforms_of(config: TransformConfig) -> tuple[Transform, ...]:
    """All transforms besides privacy. Clipping comes last: it bounds the compressed message."""
    clip = (Clip(config.clip),) if config.clip else ()
    if config.top_k is None and config.quantize is None:
        return clip
    return (Compress(config.top_k, config.quantize), *clip)


def resolved(config: ExperimentConfig) -> TomlTable:
    """The configuration with its defaults written out, as in config.toml."""
    return config.model_dump(exclude_none=True, mode="json", by_alias=True)


def to_toml(config: ExperimentConfig) -> str:
    return tomli_w.dumps(resolved(config))
