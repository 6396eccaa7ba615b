"""From a configuration to an Experiment: config -> population, split, task, methods."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from bespoke.config import AUTO, FEATURES, TEXT, DataConfig, ExperimentConfig, TransformConfig, check_stage
from bespoke.data.changes import FOREVER, Period, periods
from bespoke.data.population import Population
from bespoke.data.schema import Statistics
from bespoke.data.splits import Reporting, Rows, Selection, Split, cross_device, cross_silo
from bespoke.data.standardize import How, standardize
from bespoke.data.topics import grouped
from bespoke.encoding import Wanted, encoded
from bespoke.errors import UserError, unknown
from bespoke.method import Method
from bespoke.models import build_task
from bespoke.privacy.accounting import Kind
from bespoke.privacy.clip import Clip
from bespoke.privacy.compress import Compress
from bespoke.privacy.release import RELEASE
from bespoke.privacy.settings import PrivacyConfig, check_fields
from bespoke.privacy.transform import Transform
from bespoke.robust.attack import attacked, attackers, message_attack
from bespoke.robust.settings import check_methods
from bespoke.stages import Experiment, Stage
from bespoke.tensors import count

FULL_UP_TO = 200  # clients: with at most so many, everyone takes part in every round
MOST_ROUNDS = 300  # of a stage whose rounds are "auto"
AUTO_EVERY = 5  # rounds between two looks at whether it has converged
SHARED = 2**28  # bytes of standardized rows kept for runs of the same split


def load_population(config: ExperimentConfig) -> Population:
    """The rows as their source gives them."""
    data = config.data
    if data.table is not None:
        from bespoke.data.schema import Schema
        from bespoke.data.table import open_table

        if data.target is None:
            return _texts(data, config.model.pretrained)
        assert data.client
        return open_table(
            Path(data.table), data.client, data.target,
            group=data.group, features=data.features, time=data.time, task=data.task,
            schema=Schema.read(Path(data.schema_file)) if data.schema_file else None, text=data.text,
            how={name: getattr(data, name) for name in FEATURES if getattr(data, name) is not None},
        )  # fmt: skip
    from bespoke.data.sources import load_source, source_options

    assert data.source is not None
    given = _own_tokens(config.model.pretrained) if "pretrained" in source_options(data.source) else {}
    return load_source(data.source, **{**given, **data.options})


def _own_tokens(pretrained: str) -> dict[str, Any]:
    """How texts are read where nobody says: by a pretrained model in tokens of its own, and no end."""
    return {"tokenizer": "model", "pretrained": pretrained, "end": False} if pretrained else {}


def _texts(data: DataConfig, pretrained: str) -> Population:
    """Texts of which the next word is to be predicted."""
    from bespoke.data.documents import Segmenting, open_texts
    from bespoke.data.schema import read_words

    given = _own_tokens(pretrained)
    given |= {name: getattr(data, name) for name in TEXT if name != "context" and getattr(data, name) is not None}
    return open_texts(
        str(data.table), data.client, data.text, group=data.group, context=data.context, time=data.time,
        how=Segmenting(**given),
        words=read_words(Path(data.schema_file)) if data.schema_file else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """Rows ready for training: encoded, standardized, and split."""

    population: Population
    split: Split
    plain: Population  # encoded, not standardized
    scales: tuple[How, Statistics]  # how it was standardized, and by which means and deviations that were given
    earlier: tuple[Period, ...] = ()


class Bench:
    """Builds many experiments of one population; what those of one split have in common is made once.

    `folder` keeps what is released of the data under privacy, for all of them.
    """

    def __init__(self, population: Population, folder: Path | None = None) -> None:
        self.population, self.folder = population, folder  # as loaded
        self.made: dict[str, Prepared] = {}

    def prepared(self, config: ExperimentConfig, privacy: PrivacyConfig | None = None) -> Prepared:
        """The rows for a configuration; `privacy`: that of the runs beside it, if it has none itself."""
        privacy = privacy or config.privacy
        key = _key(config, privacy)
        if key not in self.made:
            room = SHARED // max(sum(c.nbytes for c in self.population.columns.values()), 1)
            while len(self.made) >= max(room, 1):  # the oldest goes: seeds come in turn
                del self.made[next(iter(self.made))]
            name = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
            kept = privacy or "pieces" in self.population.columns  # what is released, or a vocabulary
            store = self.folder / "statistics" / f"{name}.json" if self.folder and kept else None
            self.made[key] = prepare(config, self.population, store, privacy)
        return self.made[key]

    def build(self, config: ExperimentConfig, privacy: PrivacyConfig | None = None) -> Experiment:
        return build(config, prepared=self.prepared(config, privacy))


def _key(config: ExperimentConfig, privacy: PrivacyConfig | None) -> str:
    """Names all that rows, split, encoded and standardized, depend on beside the data."""
    seed = config.seed if config.split.seed is None else config.split.seed
    released = [privacy.model_dump(), config.cohort.model_dump()] if privacy and privacy.share else bool(privacy)
    return json.dumps([config.split.model_dump(), seed, config.data.standardize, released, config.model.pretrained])


def prepare(
    config: ExperimentConfig, raw: Population, store: Path | None = None, privacy: PrivacyConfig | None = None
) -> Prepared:
    """Split the rows, encode them and standardize them by the training rows.

    `store` is the file of what is released of them under privacy: what lies there is used, and not released again.
    """
    privacy = privacy or config.privacy
    *earlier, last = periods(raw, lambda rows: make_split(rows, config))
    for period in (*earlier, last):
        _check_split(period.population, period.split, config)
    advice = raw.about.get("standardize", {"features": "none", "target": False})
    how = config.data.standardize or advice["features"]
    if earlier and (how != "none" or advice["target"]):
        raise UserError(
            f"data.standardize = {how!r}: the rows of {raw.about['name']} come and go, and means of rows that are not "
            "there yet are not known; use 'none'"
        )
    train = last.split.train
    kind = _kind(config, privacy, len(train.clients)) if privacy else "known"
    raw = grouped(last.population, last.split)
    key, model = _key(config, privacy), config.model.pretrained
    found = encoded(raw, train, Wanted(how, advice["target"], privacy, kind, key, store, model))
    population = standardize(found.population, train, how, advice["target"], found.given)
    return Prepared(population, _moved(last.split, population), found.population, (how, found.given), tuple(earlier))


def _kind(config: ExperimentConfig, privacy: PrivacyConfig, trained: int) -> Kind:
    """How clients come to rounds, before any stage is known: a stage that more clients come to costs no more."""
    cohort, asked = config.cohort, config.cohort.sampling
    everyone = asked not in ("poisson", "uniform") or cohort_size(config, trained) >= trained
    if everyone or privacy.local_noise is not None or cohort.over_select > 1:
        return "known"
    return "poisson" if asked == "poisson" else "fixed"


def cohort_size(config: ExperimentConfig, trained: int) -> int:
    return min(config.cohort.size or (trained if trained <= FULL_UP_TO else 100), max(trained, 1))


def build(
    config: ExperimentConfig, population: Population | None = None, prepared: Prepared | None = None,
    folder: Path | None = None,
) -> Experiment:  # fmt: skip
    """Everything resolved; `population` (as loaded) may be given, or what has been made of it (see Bench).

    `folder` is that of the run, where what is released of the data under privacy is kept.
    """
    if prepared is None:
        raw = population if population is not None else load_population(config)
        prepared = prepare(config, raw, folder / RELEASE if folder else None)
    bad = _attackers(config, prepared)
    if config.attack is not None:
        kind = config.attack.kind
        parts = [*prepared.earlier, Period(FOREVER, prepared.population, prepared.split)]
        *earlier, last = (attacked(period, bad, kind, _moved) for period in parts)
        prepared = replace(prepared, population=last.population, split=last.split, earlier=tuple(earlier))
    population, split = prepared.population, prepared.split
    options = dict(config.model.model_extra or {})
    task = build_task(population.about, config.model.name, config.safe_steps, **options)
    metric = config.metric or population.about.get("metric") or task.metrics[0]
    if metric not in task.metrics:
        raise unknown("metric", metric, task.metrics, "the experiment")
    stages = []
    for place, entry in enumerate(config.stage):
        name, rounds, accept, aggregator, knobs = check_stage(entry, f"stage {place}")
        from bespoke.methods import METHODS

        auto = rounds == AUTO
        method = METHODS[name](task, **knobs)
        bounded = aggregator.transform(method) if aggregator else None
        stages.append(Stage(method, MOST_ROUNDS if auto else int(rounds), accept, auto, bounded))
        _check_fit(stages[-1].method, task, population, f"stage {place}")
    check_stages_fit([stage.method for stage in stages])
    _check_groups(population, stages)
    _check_changes(config, prepared.earlier, sum(stage.rounds for stage in stages))
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
    keys = frozenset(population.keys[bad].tolist())
    return Experiment(
        label=config.label or stages[-1].method.name,
        population=population,
        split=split,
        task=task,
        stages=tuple(stages),
        metric=metric,
        seed=config.seed,
        cohort=cohort,
        sampling=sampling,
        transforms=(*(message_attack(config.attack, keys) if config.attack else ()), *transforms),
        robust=config.robust if config.privacy is None else None,  # else privacy.clip is the bound: see check_robust
        attack=config.attack,
        attackers=tuple(bad.tolist()),
        privacy=config.privacy,
        evaluate_every=config.evaluate_every or every,
        watched=config.watched,
        engine={k: v for k, v in config.engine.model_dump().items() if v is not None},
        config=resolved(config),
        earlier=prepared.earlier,
    )


def _attackers(config: ExperimentConfig, prepared: Prepared) -> Any:
    """The clients that attack; nobody if there is no attack."""
    if config.attack is None:
        return np.zeros(0, np.int64)
    return attackers(prepared.population, prepared.split.train.clients, config.attack, config.seed)


def transforms_of(config: TransformConfig) -> tuple[Transform, ...]:
    """What acts on messages besides privacy. Clipping comes last: it scales a compressed message, and bounds it."""
    clip = (Clip(config.clip),) if config.clip else ()
    if config.top_k is None and config.quantize is None:
        return clip
    return (Compress(config.top_k, config.quantize), *clip)


def check_stages_fit(methods: Sequence[Method]) -> None:
    """A stage begins with what the one before it hands on: one model, or several."""
    for place, (before, after) in enumerate(pairwise(methods), start=1):
        if before.hands_on not in after.starts_from:
            wanted = " or ".join(map(_models, after.starts_from))
            raise UserError(
                f"stage {place}: {after.name} starts from {wanted}, and {before.name} before it hands on "
                f"{_models(before.hands_on)}; leave one of the two out, or, where k is how many, give both the same k"
            )


def _models(number: int) -> str:
    return {-1: "no model of its kind", 0: "a model for each group", 1: "one model"}.get(number, f"{number} models")


def _check_groups(population: Population, stages: Sequence[Stage]) -> None:
    """Group fine-tuning needs groups: those of the data, or found by the stage before it."""
    from bespoke.methods import METHODS, GroupFL

    for place, stage in enumerate(stages):
        found = place > 0 and stages[place - 1].method.hands_on == 0
        if isinstance(stage.method, GroupFL) and population.group is None and not found:
            finders = [name for name, kind in METHODS.items() if kind.hands_on == 0 and kind is not GroupFL]
            raise UserError(
                f"stage {place}: {stage.method.name} needs groups of clients, and {population.about.get('name')} has "
                "none; name a table's group column (--group COLUMN, or group in [data]), or put a stage before it "
                f"that finds groups: {', '.join(finders)}"
            )


def _check_changes(config: ExperimentConfig, earlier: Sequence[Period], rounds: int) -> None:
    """Rows that come and go: the last of them have to be trained on, and how much noise hides them is not known."""
    if earlier and earlier[-1].until >= rounds:
        raise UserError(
            f"the rows of {config.data.source} change after round {earlier[-1].until}, and there are {rounds} rounds "
            "in all; train longer, or change them earlier (data.options)"
        )
    auto = any(stage.get("rounds") == AUTO for stage in config.stage)
    if auto and (earlier or config.privacy is not None):
        why = "rows that come and go" if earlier else "[privacy], which is calibrated to it"
        raise UserError(f"rounds = {AUTO!r} and {why}: how many rounds there are has to be known; give a number")
    if earlier and config.privacy is not None:
        raise UserError(
            f"[privacy] accounts for clients that may come in every round, and those of {config.data.source} come and "
            "go; leave one of the two out"
        )


def _check_fit(method: Method, task: Any, population: Population, where: str) -> None:
    """Some methods are for some models only, for few clients, or for clients in groups."""
    clients = len(population)
    if getattr(method, "needs_groups", False) and population.group is None:
        raise UserError(
            f"{where}: {method.name} as it is set needs clients in groups, and "
            f"{population.about.get('name', 'this data')} has none: name a column (--group COLUMN), or set clusters = "
            "'uncertainty'"
        )
    if getattr(method, "smooth_only", False) and getattr(task, "hinge", False):
        raise UserError(
            f"{where}: {method.name} needs a loss with a second derivative, and that of 'svm' has none; use [model] "
            "name = 'logistic', or another method"
        )
    most = getattr(method, "most_coefficients", 0)
    head = task.linear() if most or getattr(method, "heads_only", False) or hasattr(method, "solver") else None
    if getattr(method, "heads_only", False) and head is None:
        raise UserError(
            f"{where}: {method.name} needs a model with one linear last layer for regression or classes; "
            f"{type(task.network).__name__} has none here"
        )
    if getattr(method, "heads_only", False) and not task.network.is_linear and where == "stage 0":
        raise UserError(
            f"{where}: {method.name} fits the last layer alone, and the layers below are still as they were drawn; put "
            "a stage before it that trains them, such as fedavg"
        )
    if getattr(method, "solver", "sgd") == "exact" and head is None:
        raise UserError(
            f"{where}: {method.name} with solver = 'exact' needs a model with one linear last layer for regression or "
            f"classes; {type(task.network).__name__} has none here; use solver = 'sgd'"
        )
    sizes = head.coefficients(task.init(0)).shape if most and head else (1, 0)
    coefficients = max(sizes[0] - 1, 1) * sizes[1]
    if most and coefficients > most:
        raise UserError(
            f"{where}: {method.name} estimates how {coefficients:,} coefficients vary, and takes at most {most}; name "
            "fewer features (--features), or use another method, such as finetune"
        )
    widest = getattr(method, "widest", 0)
    if widest and not task.word_width:
        raise UserError(
            f"{where}: {method.name} reads the words of a frozen language model, or the rows of a table; "
            f"{type(task.network).__name__} has neither here; use [model] name = 'frozen', or another method, such as "
            "finetune"
        )
    size = count(task.init(0)) if widest else 0
    if size > widest:
        raise UserError(
            f"{where}: {method.name} generates all {size:,} parameters of a model, and takes at most {widest:,}; use a "
            "smaller model, or another method, such as finetune"
        )
    if method.linear_only and not task.network.is_linear:
        found = type(task.network).__name__.lower()
        raise UserError(
            f"{where}: {method.name} is for linear models, and the model is {found!r}; use [model] name = 'linear', or "
            "a method that takes any model, such as ditto"
        )
    if method.most_clients and clients > method.most_clients:
        raise UserError(
            f"{where}: {method.name} relates every client to every other and takes at most {method.most_clients:,} "
            f"clients; there are {clients:,}; use another method, such as ditto"
        )


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
    if "role" in population.columns:  # the source says who is held out
        role = population.columns["role"].numpy()[population.offsets[:-1]].astype("int64")
        if not (role == 1).any():  # and where it names no validation clients, they come from its training clients
            from bespoke.randomness import uniform

            chosen = uniform("validation clients", seed, population.keys) < options.held_out[0]
            role[(role == 0) & chosen] = 1
    return cross_device(
        population, options.held_out, options.adapt, seed, options.order, options.own_validation, role
    )  # fmt: skip


def _check_split(population: Population, split: Split, config: ExperimentConfig) -> None:
    """Somebody has to train and somebody has to be tested."""
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


def _moved(split: Split, population: Population) -> Split:
    """The same split of a population with the same clients and rows, whose columns were transformed."""

    def move(rows: Any) -> Any:
        assert isinstance(rows, Rows)
        moved = replace(rows, population=population)
        known = split.train.__dict__.get("_all")  # to standardize, the training rows were looked up: nobody has moved
        if known is not None and rows.part == split.train.part:
            moved.__dict__["_all"] = known
        return moved

    selection = Selection(move(split.selection.support), move(split.selection.validation))
    test = Reporting(move(split.test.support), move(split.test.validation), move(split.test.query))
    return Split(move(split.train), selection, test, split.kind)


def resolved(config: ExperimentConfig) -> dict[str, Any]:
    """The configuration with its defaults written out, as it lies in config.toml."""
    return config.model_dump(exclude_none=True, mode="json", by_alias=True)


def to_toml(config: ExperimentConfig) -> str:
    return tomli_w.dumps(resolved(config))
