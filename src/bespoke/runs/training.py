"""The only training loop: stages of rounds, with checkpoints."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bespoke.callbacks.callback import Callback
from bespoke.data.population import Population
from bespoke.data.splits import Train
from bespoke.errors import RemoteLost
from bespoke.experiment.experiment import (
    Cohorts,
    Experiment,
    Stage,
    flat,
    handed_on,
    restore_empty,
    settled,
    stage_key,
)
from bespoke.federation.cohorts import Draw
from bespoke.federation.engine import Choice as EngineChoice
from bespoke.federation.engine import Engine, RoundResult, broadcast_bytes
from bespoke.federation.traffic import Ledger
from bespoke.messages.transform import State
from bespoke.method import Method
from bespoke.privacy.account import Account
from bespoke.randomness import mix
from bespoke.records import RunRecord
from bespoke.runs.beginning import account_of, check_fits, execution, keep_release
from bespoke.runs.evaluation import Point, Scoring
from bespoke.runs.events import Interrupted, Progress, Silent
from bespoke.runs.folder import LOGS, Checkpoint, RunFolder
from bespoke.runs.losses import Losses
from bespoke.runs.results import Results
from bespoke.runs.round_lines import Lines, RoundLines
from bespoke.runs.run_callbacks import RunCallbacks
from bespoke.runs.shared_stages import look_up, share
from bespoke.tensors import Params, Tree

SAVING = 10  # times as long as a checkpoint takes, a run goes on before the next


@dataclass
class Run:
    """The run of an experiment in a folder."""

    experiment: Experiment
    folder: RunFolder
    progress: Progress = field(default_factory=Silent)
    cache: Path | None = None  # trained stages that several runs share
    title: str = ""  # what the progress bar calls this run
    begin_with: Params | None = None  # initial parameters instead of the task's
    select_only: bool = False  # for tuning: score validation rows, never read query rows
    how: EngineChoice | None = None  # how to execute, if already known
    stop: Callable[[], bool] = lambda: False
    checkpoint_seconds: float = 5.0
    after_round: Callable[[int, int], None] = lambda stage, round: None  # for tests and studies
    after_point: Callable[[int, float], None] | None = None  # a point of the learning curve: may raise Pruned
    callbacks: Sequence[Callback] | None = None  # observers; None: those of the experiment, which alone end stages
    name: str = ""  # what callbacks call this run
    engine_of: Callable[[Population, EngineChoice], Engine] = Engine  # where clients live; default: a simulation
    scoring_of: Callable[..., Any] = Scoring  # makes and scores personal models; where scores stay with the clients,
    results_of: Callable[..., Any] = Results  # another, and what is written of it
    losses: int = 0  # how often in a row places may be lost: `engine_of` is asked for new ones

    def __post_init__(self) -> None:
        (self.folder.path / "private").mkdir(exist_ok=True)
        self.ledger = Ledger(self.experiment.robust, self.experiment.secure)
        self.lines = RoundLines(self.experiment, self.ledger, self.progress.note)

    def _anew(self) -> None:
        """Nothing is known but what lies in the folder."""
        self.segments: list[str] = []
        self.excluded: Counter[str] = Counter()
        self.state: State = {}  # of the transforms, on the server: for the next round
        self.used: State = {}  # the same in the last round
        self.account: Account | None = None
        self.now = self.experiment.periods[0]  # the current rows
        self.curve: list[float | None] = []  # the stage's points of the validation metric

    # -- the whole -----------------------------------------------------------------------------------------------------
    def run(self) -> RunRecord:
        """Trains all stages from the last checkpoint, then makes and scores the personal models."""
        done = self.folder.result()
        if done is not None:
            return done
        self.run_callbacks = RunCallbacks(self.experiment, self.folder, self.name, self.callbacks)
        keep_release(self.experiment.population, self.folder.path)
        losses = Losses(self.losses, self.progress.note)
        while True:
            found = self.folder.latest()
            try:
                return self._from(found)
            except RemoteLost as lost:
                losses.bear(lost, found and (found.stage, found.round))

    def _from(self, found: Checkpoint | None) -> RunRecord:
        """Run to the end from a checkpoint, or from the beginning, with places that know nothing yet."""
        self._anew()
        experiment = self.experiment
        if found:
            self._go_on(found)
        params = self.begin_with or experiment.task.init(int(mix("init", experiment.seed)) & 0x7FFFFFFF)
        if found:
            check_fits(self.folder, params, found.stage)
        start: Tree = {"params": params}
        self.account = account_of(experiment, self.folder.path, self.progress.note)
        how = execution(experiment, params, self.folder.path, self.how, self.progress.note)
        with self.engine_of(self.now.population, how) as engine:
            self.engine = engine  # studies look at clients' private state after a round
            self.scoring = self.scoring_of(experiment, engine, self.progress, self.stop)
            server: Tree = {}
            for place, stage in enumerate(experiment.stages):
                if found and found.stage > place:
                    continue
                if found and found.stage == place and place:
                    # the initial parameters of the stage, from which clients without private state start
                    begun = self.folder.beginning(place).server
                    start = {**begun, "params": restore_empty(params, begun["params"])}
                server = self._stage(engine, place, stage, start, found if found and found.stage == place else None)
                start = handed_on(stage.method, server, start)
                found = None
            return self._finish(engine, server, start["params"])

    def _go_on(self, found: Checkpoint) -> None:
        """Goes back to a checkpoint, and reports skipped ones."""
        for problem in found.passed_over:
            self.progress.note(f"{problem}; going on from round {max(found.round, 0)} of stage {found.stage + 1}")
        if not found.verified:
            self.progress.note(
                f"{self.folder.path} was started by a version without digests of logs and private state: damage to "
                "them would not be detected"
            )
        self.folder.go_back(found)

    # -- one stage -----------------------------------------------------------------------------------------------------
    def _stage(self, engine: Engine, place: int, stage: Stage, start: Tree, found: Checkpoint | None) -> Tree:
        experiment, method, params = self.experiment, stage.method, start["params"]
        setting = experiment.setting(place, start)
        engine.open(experiment.work(method, self.now.split.train, experiment.acting(place), setting, place), params)
        rounds = stage.rounds
        server, begin = method.init_server(params, setting), 0
        if self.account:
            self.account.resume(place, found.round if found else 0)
        if self.account and rounds:
            self.account.register(place, engine.template(), self._cohorts(place, server, self.now.split.train))
            rounds = self.account.rounds(place)
            acting = self.account.transforms_of(place)
            engine.open(experiment.work(method, self.now.split.train, acting, setting, place), params)
        self.state, self.used, self.curve = engine.start(), {}, []
        if found is None or found.round < 0:
            # a stage starts with a checkpoint, so that a resumed run knows the state before it
            self.segments = engine.kept_layers(f"{place:03d}-begin")
            if found is None:
                if place == 0:
                    self.folder.rewind({})
                    floats = int(experiment.population.about.get("statistics_floats", 0))
                    self.folder.append(
                        "ledger.jsonl", self.ledger.statistics(floats, len(experiment.split.train.clients))
                    )
                self._save(engine, place, -1, start)
            else:
                self.folder.rewind(found.logs)
                self.excluded = Counter(found.about.get("excluded", {}))
                self.segments = list(found.segments)  # clients' own layers from the stage before
                self._load_private(engine, f"{place:03d}-begin")
            self.run_callbacks.enter(place)
            shared = None
            # personal models of a last stage with private state need that state, which only its own run has
            alone = engine.layered or (engine.stateful and place == len(experiment.stages) - 1)
            if self.cache and stage.rounds and not alone:
                path = self.cache / stage_key(experiment.config, place)
                shared = look_up(path, place, self.account, self.progress.note)
            if shared is not None:
                return self._adopt(engine, place, server, *shared)
        else:
            begin, self.segments = found.round, list(found.segments)
            server = restore_empty(server, found.server)
            self.excluded = Counter(found.about.get("excluded", {}))
            self.state = found.about.get("state", self.state)
            self.curve = list(found.about.get("curve", []))
            self.folder.rewind(found.logs)
            self.run_callbacks.enter(place)
            if "lines" in found.about:
                self._append(found.about["lines"])
                self.run_callbacks.line(found.about["lines"]["rounds.jsonl"])
            self._load_private(engine, saved_as(place, begin))
        self._enter(engine, place, max(begin, 1))
        if not stage.rounds:
            return server
        self.progress.begin(f"{self.title or experiment.label}: {method.card.name}", rounds, begin)
        account = self.account
        samplers = [self._cohorts(place, server, period.split.train) for period in experiment.periods]
        if begin == 0:
            self._log(engine, place, method, 0, None, None, server)
        saved, wait = time.monotonic(), self.checkpoint_seconds
        next_draw = samplers[experiment.period(place, begin + 1)].draw(begin + 1)
        for number in range(begin + 1, rounds + 1):
            if self._enough(stage, server):
                break
            began = time.monotonic()
            draw, next_draw = next_draw, samplers[experiment.period(place, number + 1)].draw(number + 1)
            change = self.scoring.point(self.now.split, server) if self._enter(engine, place, number) else None
            outcome = None
            if account:
                account.attempt(place, number, "begun")
            if len(draw.reported) or account:
                key = int(mix("round", experiment.seed, place, number))
                self.used = self.state
                outcome = engine.round(
                    server, draw.reported, key, next_draw.reported, self.state, number, draw.contacted
                )
                if outcome.cohort.clients or (account and account.covers(place)):
                    seen = account.seen(place, outcome.cohort) if account else outcome.cohort
                    server, self.state = method.server_round(server, seen), outcome.state
                    engine.commit()
                else:
                    engine.abandon()
            last = number == rounds or (stage.auto and settled(server))
            note = self._log(engine, place, method, number, draw, outcome, server, last, change)
            self.folder.append("timing.jsonl", {"stage": place, "round": number, "seconds": time.monotonic() - began})
            self.progress.advance(1, note)
            self.after_round(place, number)
            begin, stopping = number, self.stop()
            ended = last or self._enough(stage, server)
            if stopping or (time.monotonic() - saved > wait and not ended):
                writing = time.monotonic()
                self._save(engine, place, number, server)
                self.run_callbacks.saved(number)
                saved = time.monotonic()
                # heads of many clients are gigabytes: saving takes a tenth of the time at most
                wait = max(self.checkpoint_seconds, SAVING * (saved - writing)) if self.checkpoint_seconds else 0.0
            if stopping:
                raise Interrupted(f"stopped after round {number} of {rounds}")
            if ended:
                break
        # always a last checkpoint, in the same form, so that the files of a finished run do not depend on the clock
        self._save(engine, place, begin, server, ended=True)
        self.run_callbacks.saved(begin)
        self._share(place, begin, server)
        return server

    def _enough(self, stage: Stage, server: Tree) -> bool:
        """Whether a stage ends before its last round. It depends on its checkpoint and its log alone."""
        return (stage.auto and self._converged(server)) or self.run_callbacks.stops

    def _converged(self, server: Tree) -> bool:
        """Whether a stage with rounds = "auto" has converged. It depends on its checkpoint alone."""
        if "settled" in server:  # the method's own criterion is better than a curve over some clients
            return settled(server)
        return flat(self.curve, self.experiment.lower_is_better)

    def _enter(self, engine: Engine, place: int, number: int) -> bool:
        """Moves to the rows of a round; returns whether they differ from those before."""
        period = self.experiment.periods[self.experiment.period(place, number)]
        changes = period is not self.now
        if changes:
            self.now = period
            engine.move(period.split.train)
        return changes

    def _cohorts(self, place: int, server: Tree, train: Train) -> Cohorts:
        groups = self.experiment.stages[place].method.groups(server)
        return self.experiment.cohorts(place, groups, self.account.cohort_key if self.account else 0, train)

    def _save(
        self, engine: Engine, place: int, number: int, server: Tree, lines: Lines | None = None, ended: bool = False
    ) -> None:
        """Writes a checkpoint. `lines`: log lines of its last round, not yet written; `ended`: the stage is done."""
        final = ended and place == len(self.experiment.stages) - 1
        if number > 0:
            folder = self.folder
            name = saved_as(place, number)
            self.segments = engine.save_private(folder.path / "private", name, not final, folder.run)
        about = {
            "excluded": dict(self.excluded), **({"state": self.state} if self.state else {}),
            **({"curve": self.curve} if self.curve else {}),
            **({"lines": lines} if lines else {}),
        }  # fmt: skip
        made = Checkpoint(place, number, server, self.folder.marks(), self.segments, about)
        self.folder.save(made, keep=1 if final else 2)

    def _load_private(self, engine: Engine, point: str) -> None:
        engine.load_private([self.folder.path / "private" / name for name in self.segments], point)

    def _log(
        self, engine: Engine, place: int, method: Method, number: int, draw: Draw | None, outcome: RoundResult | None,
        server: Tree, last: bool = False, change: Point | None = None,
    ) -> str:  # fmt: skip
        """Writes the round into rounds.jsonl and ledger.jsonl; returns a note for the progress bar.

        change: the scores before the round on rows that are new in it.
        """
        experiment, account = self.experiment, self.account
        every = experiment.evaluate_every
        seen: Point = {}
        if number == 0 or last or (every and number % every == 0):
            seen = self.scoring.point(self.now.split, server)
        validation = seen.get("validation")
        point = validation[experiment.metric] if validation else None
        if validation:
            self.curve.append(point)
        spent = account.line(place, number, self.used) if account else None
        noise = account.noise(place, self.used) if account and outcome else None
        lines = self.lines.of(place, number, draw, outcome, server, engine.work.transforms, seen, change, noise, spent)
        self.excluded.update(lines["rounds.jsonl"]["excluded"])
        if account and account.secret and number:
            # secret noise cannot be drawn again, so the round is on disk before anything of it is visible
            self._save(engine, place, number, server, lines)
            account.attempt(place, number, "done")
            self.run_callbacks.saved(number)
        self._append(lines)
        self.run_callbacks.line(lines["rounds.jsonl"])
        if self.after_point and number and point is not None:
            self.after_point(sum(stage.rounds for stage in experiment.stages[:place]) + number, point)
        notes = [f"{experiment.metric} {point:.4g}"] if point is not None else []
        return " · ".join([*notes, account.note(spent)] if account and spent else notes)

    def _append(self, lines: Lines) -> None:
        self.folder.append("ledger.jsonl", lines["ledger.jsonl"])
        self.folder.append("rounds.jsonl", lines["rounds.jsonl"])

    # -- the end -------------------------------------------------------------------------------------------------------
    def _finish(self, engine: Engine, server: Tree, params: Params) -> RunRecord:
        """Makes and scores the personal models; for tuning, scores validation rows only."""
        experiment, scoring = self.experiment, self.scoring
        privacy, stopped = self.account.statement() if self.account else None, self.run_callbacks.stopped()
        self._enter(engine, len(experiment.stages), 1)  # an adopted stage did not move to its last rows
        if self.select_only:
            value, candidate, clients, each = scoring.selection(server)
            self.folder.write_table("selection.parquet", {
                "client": [experiment.population.ids[c] for c in clients], "value": each})  # fmt: skip
            record: RunRecord = {
                "label": experiment.label, "seed": experiment.seed, "validation": value, "candidate": candidate,
            }  # fmt: skip
            if stopped:
                record["stopped"] = stopped
            if privacy is not None:
                record["privacy"] = privacy
            self.run_callbacks.ended(record, {})
            return self.folder.write_result(record)
        final = scoring.final(server, self.title or experiment.label)
        method, support = experiment.stages[-1].method, experiment.split.test.support.sizes()
        sent = broadcast_bytes(method, server)
        self.folder.append("ledger.jsonl", self.ledger.personalization(method, engine.choice, sent, support))
        results = self.results_of(experiment, self.folder, final)
        record = results.write(server, params, self.excluded, privacy)
        if stopped:
            record["stopped"] = stopped
        # before result.json: after a failing callback or a kill the run is unfinished, and callbacks get its end again
        self.run_callbacks.ended(record, results.means())
        return self.folder.write_result(record)

    def _adopt(self, engine: Engine, place: int, template: Tree, shared: RunFolder, found: Checkpoint) -> Tree:
        """Adopts a stage that another run has trained: its parameters and its lines in the logs."""
        for log in LOGS:
            for entry in shared.log_lines(log):
                self.folder.append(log, entry)
        for line in shared.read_log("rounds.jsonl"):
            self.run_callbacks.line(line)
        self.excluded = Counter(found.about.get("excluded", {}))
        self.curve = list(found.about.get("curve", []))
        if self.account:
            self.account.adopt(shared.path, place)
        server = restore_empty(template, found.server)
        self._save(engine, place, found.round, server, ended=True)
        return server

    def _share(self, place: int, number: int, server: Tree) -> None:
        """Stores a trained stage for other runs."""
        if self.cache is not None:
            about = {"excluded": dict(self.excluded), "curve": self.curve}
            share(self.cache / stage_key(self.experiment.config, place), place, self.folder, self.account,
                  lambda entry: Checkpoint(place, number, server, entry.marks(), [], about))  # fmt: skip


def saved_as(place: int, number: int) -> str:
    """The name under which hosts save the private state of a round."""
    return f"{place:03d}-{number:07d}"
