"""The only training loop there is: stages of rounds with checkpoints, then the personal models and their scores."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.data.arrays import write_text
from bespoke.data.changes import FOREVER, Period
from bespoke.data.population import Population
from bespoke.data.splits import Query, Split, Support, Train, Validation
from bespoke.engines.engine import Choice as EngineChoice
from bespoke.engines.engine import Engine, RoundResult, broadcast_bytes, choose
from bespoke.engines.host import ClientWork, Scores
from bespoke.errors import UserError
from bespoke.method import Method, Setting
from bespoke.privacy.budget import Account
from bespoke.privacy.ledger import Ledger
from bespoke.privacy.settings import PrivacyConfig
from bespoke.privacy.tally import Plan
from bespoke.privacy.transform import State, Transform
from bespoke.randomness import generator, mix
from bespoke.runfolder import Checkpoint, RunFolder
from bespoke.sampling import Draw, Sampler, SideBySide
from bespoke.selection import Acceptance, Choice, QueryScores, SupportScores, ValidationScores, accepted
from bespoke.selection import choose as choose_candidate
from bespoke.tensors import Params, Tree, count

Ints = NDArray[np.int64]
AnyScores = ValidationScores | SupportScores | QueryScores
Scored = Support | Validation | Query
Lines = dict[str, dict[str, Any]]  # what is to be written, by log
Point = dict[str, dict[str, float | None]]  # of the learning curve
SCORES: dict[str, type[AnyScores]] = {"support": SupportScores, "validation": ValidationScores, "query": QueryScores}


class Interrupted(Exception):
    """The user asked to stop; the run can be resumed."""


class Pruned(Exception):
    """The learning curve is so much worse than others' that the run is not worth its end."""


class Progress(Protocol):
    """Told of what goes on; the command line draws bars of it."""

    def begin(self, what: str, total: int, done: int = 0) -> None: ...
    def advance(self, steps: int = 1, note: str = "") -> None: ...
    def note(self, text: str) -> None: ...


class Silent:
    def begin(self, what: str, total: int, done: int = 0) -> None: ...
    def advance(self, steps: int = 1, note: str = "") -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class Stage:
    """A method and how many rounds it trains; it starts from the parameters of the stage before."""

    method: Method
    rounds: int
    accept: Acceptance | None = None  # when a client takes its personal model


@dataclass(frozen=True)
class Experiment:
    """Everything a result is a function of."""

    label: str
    population: Population
    split: Split
    task: Any
    stages: tuple[Stage, ...]
    metric: str
    seed: int = 0
    cohort: int = 100
    sampling: dict[str, Any] = field(default_factory=dict)  # further arguments of Sampler
    transforms: tuple[Transform, ...] = ()
    privacy: PrivacyConfig | None = None  # what else acts on messages, and how much of it may be spent
    evaluate_every: int = 0  # rounds between two points of the learning curve; 0: first and last only
    watched: int = 200  # validation clients scored for the learning curve, at most; the final choice uses all
    engine: dict[str, Any] = field(default_factory=dict)  # kind, chunk, workers
    config: dict[str, Any] = field(default_factory=dict)  # what config.toml says; names the stages in the cache
    earlier: tuple[Period, ...] = ()  # where rows come and go: before `population` and `split`, which are the last

    @property
    def lower_is_better(self) -> bool:
        return self.metric in self.task.lower_is_better

    def setting(self, place: int, start: Tree | None = None) -> Setting:
        """What the server knows before the first round of a stage; `start`: what the stage before it handed on."""
        seed = int(mix("stage", self.seed, place)) & 0x7FFFFFFF
        groups, given = (start or {}).get("groups"), self.population.group_numbers()
        if groups is None and given is not None:
            groups = torch.from_numpy(given)
        return Setting(seed, len(self.population), len(self.split.train.clients), groups)

    def sampler(self, place: int, secret: int = 0, train: Train | None = None) -> Sampler:
        """Who comes to the rounds of a stage; `secret` makes it more than a function of the seed."""
        seed = int(mix("secret cohorts", secret, place)) if secret else self.seed + 7919 * place
        return Sampler(train or self.split.train, seed, self.cohort, **self.sampling)

    @cached_property
    def periods(self) -> tuple[Period, ...]:
        return (*self.earlier, Period(FOREVER, self.population, self.split))

    def period(self, place: int, number: int) -> int:
        """In which of them a round of a stage falls."""
        done = sum(stage.rounds for stage in self.stages[:place])
        return next(i for i, period in enumerate(self.periods) if done + number <= period.until)


@dataclass
class Run:
    """An experiment being run in a folder."""

    experiment: Experiment
    folder: RunFolder
    progress: Progress = field(default_factory=Silent)
    cache: Path | None = None  # trained stages that several runs share
    title: str = ""  # what the progress bar calls this run
    select_only: bool = False  # for tuning: score validation rows, never look at query rows
    how: EngineChoice | None = None  # how to execute, if already known
    stop: Callable[[], bool] = lambda: False
    checkpoint_seconds: float = 5.0
    after_round: Callable[[int, int], None] = lambda stage, round: None  # tests kill the process, studies look closer
    after_point: Callable[[int, float], None] | None = None  # a point of the learning curve: may raise Pruned

    def __post_init__(self) -> None:
        (self.folder.path / "private").mkdir(exist_ok=True)
        self.ledger = Ledger()
        self.segments: list[str] = []
        self.excluded: Counter[str] = Counter()
        self.state: State = {}  # of the transforms, on the server: for the next round, and
        self.used: State = {}  # in the last one
        self.account: Account | None = None
        self.now = self.experiment.periods[0]  # the rows there are

    # -- the whole -----------------------------------------------------------------------------------------------------
    def run(self) -> dict[str, Any]:
        """Train all stages from where the folder stands, then make and score the personal models."""
        done = self.folder.result()
        if done is not None:
            return done
        experiment = self.experiment
        found = self.folder.latest()
        if found:
            self.folder.prune(found.stage)  # killed while it did so
        params = experiment.task.init(int(mix("init", experiment.seed)) & 0x7FFFFFFF)
        start: Tree = {"params": params}
        self.account = self._accounted()
        with Engine(self.now.population, self._choice(params)) as engine:
            self.engine = engine  # studies look at clients' private state after a round
            server: Tree = {}
            for place, stage in enumerate(experiment.stages):
                if found and found.stage > place:
                    continue
                if found and found.stage == place and place:
                    # what the stage began with: of it the private state of clients not yet seen is made
                    begun = self.folder.beginning(place).server
                    start = {**begun, "params": restore_empty(params, begun["params"])}
                server = self._stage(engine, place, stage, start, found if found and found.stage == place else None)
                start = handed_on(stage.method, server, start)
                found = None
            return self._finish(engine, server, start["params"])

    def _accounted(self) -> Account | None:
        """The privacy account, if there is one to keep."""
        experiment = self.experiment
        if experiment.privacy is None:
            return None
        plans = tuple(Plan(s.method, s.rounds, experiment.sampler(place)) for place, s in enumerate(experiment.stages))
        statistics = bool(experiment.population.about.get("statistics_floats"))
        account = Account(experiment.privacy, plans, experiment.transforms, self.folder.path, statistics)
        if not account.secret:
            self.progress.note(
                "privacy.reproducible: the noise follows from the seed, so this run is NOT private; epsilon is what a "
                "run with secret noise would spend"
            )
        return account

    def _choice(self, params: Params) -> EngineChoice:
        """How to execute; a run that is resumed is executed as it began, or its bits would differ."""
        path = self.folder.path / "engine.json"
        if path.exists():
            try:
                return EngineChoice(**json.loads(path.read_text()))
            except (ValueError, TypeError) as error:
                raise UserError(f"{path} is damaged ({error}); remove it and resume the run") from None
        chosen = self.how
        if chosen is None:
            chosen = engine_choice(self.experiment, params)
            self.progress.note(f"engine: {chosen.text()}")
        write_text(path, json.dumps(chosen.to_json(), indent=1))
        return chosen

    # -- one stage -----------------------------------------------------------------------------------------------------
    def _stage(self, engine: Engine, place: int, stage: Stage, start: Tree, found: Checkpoint | None) -> Tree:
        experiment, method, params = self.experiment, stage.method, start["params"]
        engine.open(ClientWork(method, self.now.split.train, experiment.transforms), params)
        rounds = stage.rounds
        if self.account:
            self.account.resume(place, found.round if found else 0)
        if self.account and rounds:
            self.account.look(place, engine.template())
            rounds = self.account.rounds(place)
            engine.open(ClientWork(method, self.now.split.train, self.account.around(place)), params)
        self.state, self.used = engine.start(), {}
        server, begin = method.init_server(params, experiment.setting(place, start)), 0
        if found is None or found.round < 0:
            # a stage starts with a checkpoint of its own, so that resuming never has to guess what came before it
            self.segments = []
            if found is None:
                if place == 0:
                    self.folder.truncate_logs({})
                    floats = int(experiment.population.about.get("statistics_floats", 0))
                    self.folder.append(
                        "ledger.jsonl", self.ledger.statistics(floats, len(experiment.split.train.clients))
                    )
                self._save(engine, place, -1, start)
            else:
                self.folder.truncate_logs(found.logs)
                self.excluded = Counter(found.about.get("excluded", {}))
            self._clear_private()  # after the checkpoint: the one before it names these files
            shared = self._cached(place, engine.stateful)
            if shared is not None:
                return self._adopt(engine, place, stage, server, shared)
        else:
            begin, self.segments = found.round, list(found.segments)
            server = restore_empty(server, found.server)
            self.excluded = Counter(found.about.get("excluded", {}))
            self.state = found.about.get("state", self.state)
            self.folder.truncate_logs(found.logs)
            self._append(found.about.get("lines", {}))
            self._clear_private()  # segments of a checkpoint that was never finished
            if begin < stage.rounds or stage is experiment.stages[-1]:  # else nobody asks for it any more
                engine.load_private([self.folder.path / "private" / name for name in self.segments])
        self._enter(engine, place, max(begin, 1))
        if not stage.rounds:
            return server
        self.progress.begin(f"{self.title or experiment.label}: {method.name}", rounds, begin)
        account = self.account
        samplers = [self._sampler(place, method, server, period.split.train) for period in experiment.periods]
        if begin == 0:
            self._log(engine, place, method, 0, None, None, server)
        saved = time.monotonic()
        coming = samplers[experiment.period(place, begin + 1)].draw(begin + 1)
        for number in range(begin + 1, rounds + 1):
            began = time.monotonic()
            draw, coming = coming, samplers[experiment.period(place, number + 1)].draw(number + 1)
            change = self._watch(engine, method, server) if self._enter(engine, place, number) else None
            outcome = None
            if account:
                account.attempt(place, number, "begun")
            if len(draw.reported) or account:
                key = int(mix("round", experiment.seed, place, number))
                self.used = self.state
                outcome = engine.round(server, draw.reported, key, coming.reported, self.state)
                if outcome.cohort.clients or (account and account.covers(place)):
                    seen = account.seen(place, outcome.cohort) if account else outcome.cohort
                    server, self.state = method.server_round(server, seen), outcome.state
            note = self._log(engine, place, method, number, draw, outcome, server, number == rounds, change)
            self.folder.append("timing.jsonl", {"stage": place, "round": number, "seconds": time.monotonic() - began})
            self.progress.advance(1, note)
            self.after_round(place, number)
            stopping = self.stop()
            if stopping or number == rounds or time.monotonic() - saved > self.checkpoint_seconds:
                self._save(engine, place, number, server)
                saved = time.monotonic()
            if stopping:
                raise Interrupted(f"stopped after round {number} of {rounds}")
        self._share(place, stage, server)
        return server

    def _enter(self, engine: Engine, place: int, number: int) -> bool:
        """Come to the rows of a round; whether they are others than before."""
        period = self.experiment.periods[self.experiment.period(place, number)]
        changes = period is not self.now
        if changes:
            self.now = period
            engine.move(period.split.train)
        return changes

    def _sampler(self, place: int, method: Method, server: Tree, train: Train) -> Sampler | SideBySide:
        """Who takes part: a cohort of all clients, or a cohort of each group."""
        groups = method.groups(server)
        sampler = self.experiment.sampler(place, self.account.cohort_key if self.account else 0, train)
        if method.everyone:
            sampler = replace(sampler, size=len(train.clients), sampling="full")
        return sampler if groups is None or method.everyone else sampler.by_group(groups.numpy())

    def _save(self, engine: Engine, place: int, number: int, server: Tree, lines: Lines | None = None) -> None:
        """A checkpoint; `lines`: what the logs will say of its last round, if they do not yet."""
        if number > 0:
            self.segments += engine.save_private(self.folder.path / "private", f"{place:03d}-{number:07d}")
        about = {
            "excluded": dict(self.excluded), **({"state": self.state} if self.state else {}),
            **({"lines": lines} if lines else {}),
        }  # fmt: skip
        self.folder.save(Checkpoint(place, number, server, self.folder.log_lengths(), self.segments, about))

    def _clear_private(self) -> None:
        """Remove private state that the run does not stand on."""
        for path in (self.folder.path / "private").glob("*.safetensors"):
            if path.name not in self.segments:
                path.unlink()

    def _log(
        self, engine: Engine, place: int, method: Method, number: int, draw: Draw | None, outcome: RoundResult | None,
        server: Tree, last: bool = False, change: Point | None = None,
    ) -> str:  # fmt: skip
        """Write the round into rounds.jsonl and ledger.jsonl; returns a note for the progress bar.

        change: the scores before the round on rows that are new in it.
        """
        experiment = self.experiment
        every = experiment.evaluate_every
        seen: Point = {}
        if number == 0 or last or (every and number % every == 0):
            seen = self._watch(engine, method, server)
        validation = seen.get("validation")
        entry = self.ledger.round(place, number, method, draw, outcome)
        if self.account and outcome:
            entry["noise"] = self.account.noise(place, self.used)
        ids = experiment.population.ids
        excluded = [ids[c] for c in outcome.cohort.excluded] if outcome else []
        self.excluded.update(excluded)
        spent = self.account.line(place, number, self.used) if self.account else None
        lines: Lines = {"ledger.jsonl": entry, "rounds.jsonl": {
            "stage": place, "method": method.name, "round": number,
            "clients": len(outcome.cohort.clients) if outcome else 0, "excluded": excluded,
            "dropped": len(draw.contacted) - len(draw.reported) if draw else 0,
            **{name: entry[name] for name in ("bytes_down", "bytes_up", "steps")},
            "examples": outcome.examples if outcome else 0, "validation": None, **seen,
            **({"change": change} if change else {}),
            **({"observed": method.observe(server, outcome.cohort)} if outcome and outcome.cohort.clients else {}),
            **({"privacy": spent} if spent else {}),
        }}  # fmt: skip
        if self.account and self.account.secret and number:
            # secret noise cannot be drawn again: the round is on disk before anything of it can be seen
            self._save(engine, place, number, server, lines)
            self.account.attempt(place, number, "done")
        self._append(lines)
        point = validation[experiment.metric] if validation else None
        if self.after_point and number and point is not None:
            self.after_point(sum(stage.rounds for stage in experiment.stages[:place]) + number, point)
        notes = [f"{experiment.metric} {point:.4g}"] if point is not None else []
        return " · ".join([*notes, self.account.note(spent)] if self.account and spent else notes)

    def _append(self, lines: Lines) -> None:
        for log, entry in lines.items():
            self.folder.append(log, entry)

    @cached_property
    def _watched(self) -> Ints:
        """Whom the learning curve is of: the same clients in all periods, as far as they are there."""
        there = [period.split.selection.validation.clients for period in self.experiment.periods]
        clients = np.unique(np.concatenate(there))
        if len(clients) <= self.experiment.watched:
            return clients
        random = generator("watched", self.experiment.seed)
        return np.sort(random.choice(clients, self.experiment.watched, replace=False))

    def _watch(self, engine: Engine, method: Method, server: Tree) -> Point:
        """A point of the learning curve: means over some validation clients, and the score weighted by their rows.

        Where rows come and go it has each of these clients' scores besides: whom a change hits is the question then.
        """
        selection = self.now.split.selection
        clients = np.intersect1d(self._watched, selection.validation.clients, assume_unique=True)
        if not len(clients):
            return {}
        scores = self._examine(engine, server, clients, {"validation": selection.validation})
        validation = scores["validation"]
        assert isinstance(validation, ValidationScores)
        picked = self._pick(method, scores)
        means = {m: float(np.nanmean(validation.at(picked, m))) for m in self.experiment.task.metrics}
        metric, rows = self.experiment.metric, selection.validation.sizes(clients)
        values = validation.at(picked, metric)
        means[f"weighted_{metric}"] = float(np.nansum(values * rows) / rows[~np.isnan(values)].sum())
        point: Point = {"validation": {m: _number(value) for m, value in means.items()}}
        if self.experiment.earlier:
            ids = self.experiment.population.ids
            point["watched"] = {ids[client]: _number(value) for client, value in zip(clients, values)}
        return point

    # -- personal models -----------------------------------------------------------------------------------------------
    def _examine(
        self, engine: Engine, server: Tree, clients: Ints, parts: dict[str, Scored], tell: bool = False
    ) -> dict[str, AnyScores]:
        """Scores of every candidate of these clients; `tell` moves the progress bar by a client each."""
        split = self.now.split
        key = int(mix("personalize", self.experiment.seed))
        support = split.selection.support if "query" not in parts else split.test.support
        if engine.work.method.choose == "support":
            parts = {**parts, "support": support}
        # heavy models take long: some clients at a time, so that the bar moves and Ctrl-C is heard
        step = max(len(clients), 1) if engine.choice.vectorized else 16
        pieces = []
        for begin in range(0, max(len(clients), 1), step):
            some = clients[begin : begin + step]
            pieces.append((len(some), engine.examine(server, some, support, parts, key)))
            if tell:
                self.progress.advance(len(some))
                if self.stop():
                    raise Interrupted("stopped while making personal models")
        raw = pieces[0][1] if len(pieces) == 1 else joined(pieces)
        return {part: SCORES[part](clients, sums) for part, sums in raw.items()}

    def _clients_examined(self) -> int:
        split = self.experiment.split
        held_out = len(split.selection.validation.clients) if split.kind == "cross-device" else 0
        return len(split.test.query.clients) + held_out

    def _pick(self, method: Method, scores: dict[str, AnyScores]) -> Choice:
        """Which candidate each of these clients uses, by the method's rule of who chooses on what."""
        who: Any = method.choose
        lower, metric = self.experiment.lower_is_better, self.experiment.metric
        allowed = None if method.keep_shared else list(range(1, len(method.candidates())))
        found: Any = scores.get("support" if who == "support" else "validation")
        if found is None:  # nobody can choose: the last candidate, which was trained longest
            return Choice(len(method.candidates()) - 1, {})
        if who == "support":
            lower, metric = True, "loss"
        return choose_candidate(found, metric, lower, who, allowed)

    def _accepted(self, picked: Choice, stage: Stage, scores: dict[str, AnyScores], clients: Ints) -> Choice:
        if stage.accept is None:
            return picked
        split = self.experiment.split
        support = split.test.support if "query" in scores else split.selection.support
        own: Any = scores.get("validation")
        return accepted(
            picked, stage.accept, own, support.sizes(clients), clients, self.experiment.metric,
            self.experiment.lower_is_better,
        )  # fmt: skip

    def _finish(self, engine: Engine, server: Tree, params: Params) -> dict[str, Any]:
        experiment = self.experiment
        split, method = experiment.split, experiment.stages[-1].method
        self._enter(engine, len(experiment.stages), 1)  # a stage that was taken over did not come to its last rows
        names = method.candidates()
        parts: dict[str, Scored] = {"validation": split.test.validation, "query": split.test.query}
        clients = split.test.query.clients
        if self.select_only:
            return self._finish_selection(engine, server, method)
        if not len(clients):
            raise UserError("no client has rows to be tested on: every client has too few examples for this split")
        self.progress.begin(f"{self.title or experiment.label}: personal models", self._clients_examined())
        scores = self._examine(engine, server, clients, parts, tell=True)
        query = scores["query"]
        assert isinstance(query, QueryScores)
        held_out = scores
        if split.kind == "cross-device":
            selection = split.selection
            watched: dict[str, Scored] = {"validation": selection.validation}
            held_out = self._examine(engine, server, selection.validation.clients, watched, tell=True)
        picked = self._pick(method, held_out)
        chosen_on = held_out.get("validation")
        if split.kind == "cross-device":  # what is common was chosen on the validation clients, the rest by each itself
            picked = Choice(picked.default, self._pick(method, scores).own)
        plain, picked = picked, self._accepted(picked, experiment.stages[-1], scores, clients)
        support = split.test.support.sizes()
        sent = broadcast_bytes(method, server)
        self.folder.append("ledger.jsonl", self.ledger.personalization(method, engine.choice, sent, support))
        self._write_clients(query, scores.get("validation"), picked, names, self._served(server))
        if split.kind == "cross-device" and isinstance(chosen_on, ValidationScores):
            self._write_selection(chosen_on, picked)
        acceptance = self._acceptance(query, plain, picked)
        return self._write_result(chosen_on, query, picked, names, params, acceptance)

    def _acceptance(self, query: QueryScores, plain: Choice, picked: Choice) -> dict[str, Any]:
        """What acceptance did, for result.json: who took the personal model, and the mean had everyone done so."""
        rule = self.experiment.stages[-1].accept
        if rule is None:
            return {}
        taken = int((picked.of(query.clients) == plain.of(query.clients)).sum())
        without = _number(np.nanmean(query.at(plain, self.experiment.metric)))
        return {"accept": {**asdict(rule), "accepted": taken, "query_without": without}}

    def _finish_selection(self, engine: Engine, server: Tree, method: Method) -> dict[str, Any]:
        validation = self.experiment.split.selection.validation
        value = None
        if len(validation.clients):
            scores = self._examine(engine, server, validation.clients, {"validation": validation})
            picked = self._pick(method, scores)
            value = _number(np.nanmean(scores["validation"].at(picked, self.experiment.metric)))
        self.folder.write_result({
            "label": self.experiment.label, "seed": self.experiment.seed, "validation": value, **self._privacy(),
        })  # fmt: skip
        return self.folder.result() or {}

    def _served(self, server: Tree) -> Ints | None:
        """The group whose model serves each client, where groups were found and not given."""
        groups, given = self.experiment.stages[-1].method.groups(server), self.experiment.setting(0).groups
        known = groups is None or (given is not None and torch.equal(groups, given))
        return None if known or groups is None else groups.numpy()

    def _write_clients(
        self, query: QueryScores, validation: Any, picked: Choice, names: tuple[str, ...], served: Ints | None
    ) -> None:
        split, population = self.experiment.split, self.experiment.population
        clients = query.clients
        table: dict[str, Any] = {
            "client": [population.ids[c] for c in clients],
            "group": [population.group_of(c) for c in clients],
            "train_examples": split.train.sizes(clients) if split.kind == "cross-silo" else np.zeros_like(clients),
            "support_examples": split.test.support.sizes(clients),
            "validation_examples": split.test.validation.sizes(clients),
            "query_examples": split.test.query.sizes(clients),
            "candidate": [names[k] for k in picked.of(clients)],
            **({} if served is None else {"served": [found_group(row) for row in served[clients]]}),
        }
        shared = Choice(0, {})
        for metric in self.experiment.task.metrics:
            table[f"query_{metric}"] = query.at(picked, metric)
            missing = np.full(len(clients), np.nan)
            table[f"validation_{metric}"] = validation.at(picked, metric) if validation is not None else missing
            table[f"baseline_{metric}"] = query.at(shared, metric)
        self.folder.write_table("clients.parquet", table)

    def _write_selection(self, scores: ValidationScores, picked: Choice) -> None:
        """The validation clients under what was chosen: common rules are made on these, never on query rows."""
        table: dict[str, Any] = {
            "client": [self.experiment.population.ids[c] for c in scores.clients],
            "support_examples": self.experiment.split.selection.support.sizes(scores.clients),
            "validation_examples": self.experiment.split.selection.validation.sizes(scores.clients),
        }
        for metric in self.experiment.task.metrics:
            table[f"validation_{metric}"] = scores.at(picked, metric)
        self.folder.write_table("selection.parquet", table)

    def _write_result(
        self, chosen_on: Any, query: QueryScores, picked: Choice, names: tuple[str, ...], params: Params,
        acceptance: dict[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        experiment = self.experiment
        task, metric = experiment.task, experiment.metric
        rounds = self.folder.read_log("rounds.jsonl")
        lines = self.folder.read_log("ledger.jsonl")
        curve = (
            {names[k]: float(v) for k, v in enumerate(np.nanmean(chosen_on.values(metric), axis=0))}
            if chosen_on
            else {}
        )
        common = names[picked.default]
        result = {
            "label": experiment.label, "seed": experiment.seed, "metric": metric,
            "lower_is_better": experiment.lower_is_better, "metrics": list(task.metrics),
            "lower": [m for m in task.metrics if m in task.lower_is_better], "protocol": experiment.split.kind,
            "clients": len(query.clients), "unevaluated": self._unevaluated(),
            "rounds": sum(entry["round"] > 0 for entry in rounds),
            **{name: sum(line[name] for line in lines) for name in ("bytes_down", "bytes_up", "steps")},
            "parameters": count(params), "excluded": dict(sorted(self.excluded.items())),
            "validation": _number(np.nanmean(chosen_on.at(picked, metric))) if chosen_on else None,
            "query": _number(np.nanmean(query.at(picked, metric))),
            "chosen": {"candidate": common, "by_client": bool(picked.own)} if len(names) > 1 else {},
            "candidates": {name: _number(value) for name, value in curve.items()} if len(names) > 1 else {},
            **acceptance, **self._privacy(), "notes": [],
        }  # fmt: skip
        own = {experiment.population.ids[client]: candidate for client, candidate in picked.own.items()}
        write_text(self.folder.path / "choices.json", json.dumps({"default": picked.default, "own": own}))
        self.folder.write_result(result)
        return self.folder.result() or {}

    def _privacy(self) -> dict[str, Any]:
        return {"privacy": self.account.statement()} if self.account else {}

    def _unevaluated(self) -> int:
        split = self.experiment.split
        if split.kind == "cross-silo":
            return len(self.experiment.population) - len(split.test.query.clients)
        return 0

    # -- stages that several runs share -----------------------------------------------------------------------
    def _stage_key(self, place: int) -> str:
        return stage_key(self.experiment.config, place)

    def _cached(self, place: int, stateful: bool) -> RunFolder | None:
        stages = self.experiment.stages
        if self.cache is None or not stages[place].rounds:
            return None
        if stateful and place == len(stages) - 1:  # its personal models need private state, which stays in its run
            return None
        path = self.cache / self._stage_key(place)
        return RunFolder(path) if (path / "whole").exists() else None

    def _adopt(self, engine: Engine, place: int, stage: Stage, template: Tree, shared: RunFolder) -> Tree:
        """Take over a stage that another run has trained: its parameters and its lines in the logs."""
        found = shared.latest()
        assert found is not None
        for log in ("rounds.jsonl", "ledger.jsonl"):
            for entry in shared.read_log(log):
                self.folder.append(log, entry)
        self.excluded = Counter(found.about.get("excluded", {}))
        if self.account:
            self.account.adopt(shared.path, place)
        server = restore_empty(template, found.server)
        self._save(engine, place, stage.rounds, server)
        return server

    def _share(self, place: int, stage: Stage, server: Tree) -> None:
        """Put a trained stage where other runs find it: all at once, for another process may be doing the same."""
        if self.cache is None:
            return
        path = self.cache / self._stage_key(place)
        if (path / "whole").exists():
            return
        making = self.cache / f".{path.name}.{os.getpid()}"
        shutil.rmtree(making, ignore_errors=True)
        (making / "checkpoints").mkdir(parents=True)
        entry = RunFolder(making)
        for log in ("rounds.jsonl", "ledger.jsonl"):
            lines = [json.dumps(line) for line in self.folder.read_log(log) if line["stage"] == place]
            write_text(making / log, "".join(f"{line}\n" for line in lines))
        if self.account:
            self.account.share(making, place)
        entry.save(Checkpoint(place, stage.rounds, server, {}, [], {"excluded": dict(self.excluded)}))
        (making / "whole").touch()
        try:
            os.rename(making, path)
        except OSError:
            shutil.rmtree(making, ignore_errors=True)
            if not (path / "whole").exists():  # else somebody was faster
                raise


def stage_key(config: dict[str, Any], place: int) -> str:
    """A name for a trained stage: a digest of all that it depends on. `config` is the resolved experiment."""
    rest = {k: v for k, v in config.items() if k not in ("label", "metric", "stage")}
    stages = config.get("stage", [])[: place + 1]
    return hashlib.blake2b(json.dumps([rest, stages], sort_keys=True).encode(), digest_size=12).hexdigest()


def handed_on(method: Method, server: Tree, start: Tree) -> Tree:
    """What the next stage starts from: the model or models, and groups if this stage or one before it found any."""
    groups = method.groups(server)
    found = {"groups": groups} if groups is not None else {k: v for k, v in start.items() if k == "groups"}
    return {"params": method.params(server), **found}


def found_group(row: int) -> str:
    """What a group that was found is called; the row 0 is for those whose group is not known."""
    return f"group {row}" if row else "none"


def engine_choice(experiment: Experiment, params: Params | None = None) -> EngineChoice:
    """How to execute an experiment's clients, by its first stage that trains."""
    stages = experiment.stages
    stage = next((s for s in stages if s.method.trains and s.rounds), stages[-1])
    work = ClientWork(stage.method, experiment.split.train, experiment.transforms)
    start = experiment.task.init(0) if params is None else params
    return choose(experiment.population, work, start, experiment.cohort, **experiment.engine)


def joined(pieces: list[tuple[int, Scores]]) -> Scores:
    """Scores of consecutive clients as one table; NaN where a piece has no rows in a part."""
    joined: Scores = {}
    for part in dict.fromkeys(name for _, scores in pieces for name in scores):
        example = next(scores[part] for _, scores in pieces if part in scores)
        for metric, table in example.items():
            blocks = [
                scores[part][metric] if part in scores else np.full((clients, table.shape[1]), np.nan)
                for clients, scores in pieces
            ]
            joined.setdefault(part, {})[metric] = np.concatenate(blocks)
    return joined


def _number(value: Any) -> float | None:
    """JSON has no NaN and no infinity."""
    return float(value) if np.isfinite(value) else None


def restore_empty(template: Tree, loaded: Tree) -> Tree:
    """Empty dicts do not survive on disk; the initial state tells where they were."""
    return {
        name: restore_empty(value, loaded.get(name, {})) if isinstance(value, dict) else loaded[name]
        for name, value in template.items()
    }
