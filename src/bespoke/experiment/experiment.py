"""An experiment: its stages, and what each stage hands on to the next."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from bespoke.data.periods import FOREVER, Period
from bespoke.data.population import Population
from bespoke.data.splits import Split, Train
from bespoke.declarations import PerGroup
from bespoke.errors import UserError
from bespoke.experiment.choosing import Acceptance
from bespoke.federation.choice import choose
from bespoke.federation.cohorts import Sampler, SideBySide
from bespoke.federation.engine import Choice as EngineChoice
from bespoke.federation.held import Collusion
from bespoke.federation.work import ClientWork, Described
from bespoke.imported import bound_to_this_process, only_here
from bespoke.messages.robust.attack import Attack
from bespoke.messages.robust.exchange import Rule
from bespoke.messages.robust.settings import AttackConfig, RobustConfig
from bespoke.messages.secure.settings import SecureConfig
from bespoke.messages.transform import Transform
from bespoke.method import Method, Setting
from bespoke.plain import Knobs, TomlTable
from bespoke.privacy.settings import PrivacyConfig, calibrated
from bespoke.randomness import mix
from bespoke.task import Task
from bespoke.tensors import Params, Tree

Cohorts = Sampler | SideBySide
PATIENCE = 4  # training has converged if so many points of the curve are no better than earlier ones
IMPROVEMENT = 1e-3  # the relative change of the metric that counts as better


@dataclass(frozen=True)
class Stage:
    """A method and its number of rounds. It starts from the parameters of the stage before."""

    method: Method
    rounds: int  # an upper limit, if `auto`
    accept: Acceptance | None = None  # when a client takes its personal model
    auto: bool = False  # ends when validation stops improving, or when the server's state is `settled`
    aggregator: Transform | None = None  # bounds changes before their mean, in this stage


@dataclass(frozen=True)
class Experiment:
    """Everything that determines a result."""

    label: str
    population: Population
    split: Split
    task: Task
    stages: tuple[Stage, ...]
    metric: str
    seed: int = 0
    cohort: int = 100
    sampling: Knobs = field(default_factory=dict)  # further arguments of Sampler
    transforms: tuple[Transform, ...] = ()
    privacy: PrivacyConfig | None = None  # clipping and noise on messages, and the budget
    robust: RobustConfig | None = None  # the rule that aggregates changes, if not their mean
    attack: AttackConfig | None = None
    secure: SecureConfig | None = None  # the server sees only sums of masked messages
    attackers: tuple[int, ...] = ()  # attacking clients, which are neither validated nor tested
    evaluate_every: int = 0  # rounds between two points of the learning curve; 0: first and last only
    watched: int = 200  # at most so many validation clients for the learning curve; the final choice uses all
    engine: Knobs = field(default_factory=dict)  # kind, chunk, workers
    config: TomlTable = field(default_factory=dict)  # the content of config.toml; it names the stages in the cache
    earlier: tuple[Period, ...] = ()  # if rows change: the periods before the last, which is `population` and `split`

    @property
    def lower_is_better(self) -> bool:
        return self.metric in self.task.lower_is_better

    def work(
        self, method: Method, train: Train, transforms: tuple[Transform, ...], setting: Setting | None = None,
        place: int | None = None,
    ) -> ClientWork:  # fmt: skip
        """The clients' work in a stage (of number `place`), with the transforms of their messages."""
        collusion = None
        if self.attack is not None and self.attack.kind == "little-is-enough":
            keys = frozenset(self.population.keys[list(self.attackers)].tolist())
            collusion = Collusion(keys, self.attack.factor)
        rule = Rule.of(self.robust) if self.robust else None
        described = None if place is None else Described(self.config, place)
        return ClientWork(method, train, transforms, setting, rule, collusion, self.secure, described)

    def acting(self, place: int) -> tuple[Transform, ...]:
        """The transforms of a stage's messages: attacks, then the stage's aggregator, then those of all stages."""
        aggregator = self.stages[place].aggregator
        if aggregator is None:
            return self.transforms
        attacks = tuple(transform for transform in self.transforms if isinstance(transform, Attack))
        return (*attacks, aggregator, *(transform for transform in self.transforms if transform not in attacks))

    def setting(self, place: int, start: Tree | None = None) -> Setting:
        """The server's knowledge before the first round of a stage; `start`: the result of the stage before."""
        seed = int(mix("stage", self.seed, place)) & 0x7FFFFFFF
        groups, given = (start or {}).get("groups"), self.population.group_numbers()
        if groups is None and given is not None:
            groups = torch.from_numpy(given)
        return Setting(seed, len(self.population), len(self.split.train.clients), groups)

    def sampler(self, place: int, secret: int = 0, train: Train | None = None) -> Sampler:
        """Draws cohorts of all clients; `secret` is a further key besides the seed."""
        seed = int(mix("secret cohorts", secret, place)) if secret else self.seed + 7919 * place
        return Sampler(train or self.split.train, seed, self.cohort, secret=bool(secret), **self.sampling)

    def cohorts(self, place: int, groups: Tensor | None, secret: int = 0, train: Train | None = None) -> Cohorts:
        """The sampler of a stage: one cohort of all clients, one cohort per group, or all clients."""
        sampler = self.sampler(place, secret, train)
        if self.stages[place].method.needs.everyone:
            return replace(sampler, size=len(sampler.clients), sampling="full")
        return sampler if groups is None else sampler.by_group(groups.numpy())

    def foreseen(self, place: int) -> Cohorts:
        """The sampler before training. If groups are still to be found, any client may take part in any round."""
        before = [stage.method for stage in self.stages[:place]]
        if any(method.needs.everyone and method.handoff.gives == PerGroup() for method in before):
            sampler = self.sampler(place)
            return replace(sampler, size=len(sampler.clients), sampling="full")
        given = type(self.stages[place].method).groups is not Method.groups
        return self.cohorts(place, self.setting(place).groups if given else None)

    @cached_property
    def periods(self) -> tuple[Period, ...]:
        return (*self.earlier, Period(FOREVER, self.population, self.split))

    def period(self, place: int, number: int) -> int:
        """The period that a round of a stage belongs to."""
        done = sum(stage.rounds for stage in self.stages[:place])
        return next(i for i, period in enumerate(self.periods) if done + number <= period.until)


def engine_choice(experiment: Experiment, params: Params | None = None) -> EngineChoice:
    """Chooses how to execute an experiment's clients, by its first stage that trains."""
    stages = experiment.stages
    place = next((place for place, s in enumerate(stages) if s.method.trains and s.rounds), len(stages) - 1)
    work = experiment.work(stages[place].method, experiment.split.train, experiment.acting(place))
    start = experiment.task.init(0) if params is None else params
    engine = experiment.engine
    if bound := bound_to_this_process(experiment.config):
        if engine.get("workers"):
            raise UserError(f"engine.workers = {engine['workers']}: {only_here(bound[0])}")
        engine = {**engine, "workers": 0}
    methods = tuple(stage.method for stage in stages)
    return choose(experiment.population, work, start, experiment.cohort, stages=methods, **engine)


def stage_key(config: TomlTable, place: int) -> str:
    """The name of a trained stage: a digest of everything that it depends on. `config` is the resolved experiment.

    Noise that is calibrated to a budget also depends on the stages after it.
    """
    rest = {k: v for k, v in config.items() if k not in ("label", "metric", "metrics", "stage")}
    stages = config.get("stage", [])
    key_of = [rest, stages[: place + 1]]
    if config.get("privacy") and calibrated(config["privacy"]):
        key_of.append([[stage["method"], stage["rounds"]] for stage in stages if stage.get("rounds")])
    return hashlib.blake2b(json.dumps(key_of, sort_keys=True).encode(), digest_size=12).hexdigest()


def handed_on(method: Method, server: Tree, start: Tree) -> Tree:
    """The start of the next stage: the model or models, and groups if this or an earlier stage found any."""
    groups = method.groups(server)
    found = {"groups": groups} if groups is not None else {k: v for k, v in start.items() if k == "groups"}
    return {"params": method.params(server), **found}


def settled(server: Tree) -> bool:
    """Whether the server's state says that training has converged."""
    return bool(server.get("settled", False))


def flat(curve: list[float | None], lower_is_better: bool) -> bool:
    """Whether the last points of a learning curve are no better than those before; true if it diverged."""
    if curve and curve[-1] is None:
        return True
    values = [value if lower_is_better else -value for value in curve if value is not None]
    if len(values) <= PATIENCE:
        return False
    before, lately = min(values[:-PATIENCE]), min(values[-PATIENCE:])
    return lately > before - IMPROVEMENT * abs(before)


def restore_empty(template: Tree, loaded: Tree) -> Tree:
    """Restores empty dicts, which files do not store, from the initial state."""
    return {
        name: restore_empty(value, loaded.get(name, {})) if isinstance(value, dict) else loaded[name]
        for name, value in template.items()
    }
