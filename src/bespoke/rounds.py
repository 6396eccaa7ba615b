"""The only training loop there is: stages of rounds with checkpoints."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bespoke.data.arrays import write_text
from bespoke.data.splits import Train
from bespoke.digests import read_json, sealed
from bespoke.engines.engine import Choice as EngineChoice
from bespoke.engines.engine import Engine, RoundResult, broadcast_bytes
from bespoke.errors import UserError
from bespoke.method import Method
from bespoke.privacy.budget import Account
from bespoke.privacy.ledger import Ledger
from bespoke.privacy.release import RELEASE, Learned, Release, keep_words, words_file
from bespoke.privacy.tally import Plan
from bespoke.privacy.transform import State
from bespoke.randomness import mix
from bespoke.results import Results
from bespoke.robust.outliers import outliers, warning
from bespoke.runfolder import LOGS, Checkpoint, RunFolder
from bespoke.sampling import Draw
from bespoke.scoring import Point, Scoring
from bespoke.shared_stages import look_up, put
from bespoke.stages import Cohorts, Experiment, Stage, engine_choice, flat, handed_on, restore_empty, settled, stage_key
from bespoke.tensors import Params, Tree, flatten
from bespoke.watcher import Interrupted, Progress, Silent

Lines = dict[str, dict[str, Any]]  # what is to be written, by log


@dataclass
class Run:
    """An experiment being run in a folder."""

    experiment: Experiment
    folder: RunFolder
    progress: Progress = field(default_factory=Silent)
    cache: Path | None = None  # trained stages that several runs share
    title: str = ""  # what the progress bar calls this run
    begin_with: Params | None = None  # parameters in place of the task's own start
    select_only: bool = False  # for tuning: score validation rows, never look at query rows
    how: EngineChoice | None = None  # how to execute, if already known
    stop: Callable[[], bool] = lambda: False
    checkpoint_seconds: float = 5.0
    after_round: Callable[[int, int], None] = lambda stage, round: None  # tests kill the process, studies look closer
    after_point: Callable[[int, float], None] | None = None  # a point of the learning curve: may raise Pruned

    def __post_init__(self) -> None:
        (self.folder.path / "private").mkdir(exist_ok=True)
        self.ledger = Ledger(self.experiment.robust)
        self.warned: set[int] = set()  # clients whose changes are far larger than others'
        self.segments: list[str] = []
        self.excluded: Counter[str] = Counter()
        self.state: State = {}  # of the transforms, on the server: for the next round, and
        self.used: State = {}  # in the last one
        self.account: Account | None = None
        self.now = self.experiment.periods[0]  # the rows there are
        self.curve: list[float | None] = []  # the stage's points of the validation metric

    # -- the whole -----------------------------------------------------------------------------------------------------
    def run(self) -> dict[str, Any]:
        """Train all stages from where the folder stands, then make and score the personal models."""
        done = self.folder.result()
        if done is not None:
            return done
        experiment = self.experiment
        self._keep_release()
        found = self.folder.latest()
        if found:
            self._go_on(found)
        params = self.begin_with or experiment.task.init(int(mix("init", experiment.seed)) & 0x7FFFFFFF)
        if found:
            self._check_fits(params, found.stage)
        start: Tree = {"params": params}
        self.account = self._accounted()
        with Engine(self.now.population, self._choice(params)) as engine:
            self.engine = engine  # studies look at clients' private state after a round
            self.scoring = Scoring(experiment, engine, self.progress, self.stop)
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

    def _keep_release(self) -> None:
        """What was released of the data lies in the run's own folder; noise cannot be drawn twice for one run.

        So does the vocabulary of texts, on which depends what the model's tokens mean.
        """
        about, path = self.experiment.population.about, self.folder.path / RELEASE
        if "text" in about and "words" in about and not words_file(path).exists():
            keep_words(words_file(path), about["words"])
        made = about.get("release")
        if not made:
            return
        if not path.exists():
            Release(**made).write(path)
        elif Release.read(path).id != made["id"]:
            raise UserError(f"{path} is not what this run began with; restore it, or begin anew in another folder")

    def _go_on(self, found: Checkpoint) -> None:
        """Say from where, if that is not simply where the run was stopped."""
        for problem in found.passed_over:
            self.progress.note(f"{problem}; going on from round {max(found.round, 0)} of stage {found.stage + 1}")
        if not found.verified:
            self.progress.note(
                f"{self.folder.path} was begun by a version that kept no digests of logs and private state: damage to "
                "them would not be noticed"
            )
        self.folder.go_back(found)

    def _check_fits(self, params: Params, stage: int) -> None:
        """Refuse to go on with data of another width: a category may have gone with the only client that had it."""
        try:
            begun = flatten(self.folder.beginning(stage).server["params"])
        except UserError:  # fallen back to a stage whose beginning is not kept any more; nothing else needs it
            return
        for name, leaf in flatten(params).items():
            if leaf.dim() and name in begun and begun[name].shape[-leaf.dim() :] != leaf.shape:
                raise UserError(
                    f"{self.folder.path} was begun with {name} of shape {tuple(begun[name].shape)}, and the data now "
                    f"need {tuple(leaf.shape)}: they were changed, or the only client with a category was forgotten; "
                    "run the experiment again in another folder"
                )

    def _accounted(self) -> Account | None:
        """The privacy account, if there is one to keep."""
        experiment = self.experiment
        if experiment.privacy is None:
            return None
        plans = tuple(Plan(s.method, s.rounds, experiment.foreseen(place)) for place, s in enumerate(experiment.stages))
        learned = Learned.of(experiment.population.about, experiment.privacy.public_statistics)
        base = experiment.sampler(0)
        account = Account(experiment.privacy, base, plans, experiment.transforms, self.folder.path, learned)
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
                return EngineChoice(**read_json(path, "remove it and resume the run"))
            except TypeError as error:
                raise UserError(f"{path} is damaged ({error}); remove it and resume the run") from None
        chosen = self.how
        if chosen is None:
            chosen = engine_choice(self.experiment, params)
            self.progress.note(f"engine: {chosen.text()}")
        write_text(path, json.dumps(sealed(chosen.to_json()), indent=1))
        return chosen

    # -- one stage -----------------------------------------------------------------------------------------------------
    def _stage(self, engine: Engine, place: int, stage: Stage, start: Tree, found: Checkpoint | None) -> Tree:
        experiment, method, params = self.experiment, stage.method, start["params"]
        setting = experiment.setting(place, start)
        engine.open(experiment.work(method, self.now.split.train, experiment.acting(place), setting), params)
        rounds = stage.rounds
        server, begin = method.init_server(params, setting), 0
        if self.account:
            self.account.resume(place, found.round if found else 0)
        if self.account and rounds:
            self.account.look(place, engine.template(), self._cohorts(place, server, self.now.split.train))
            rounds = self.account.rounds(place)
            engine.open(experiment.work(method, self.now.split.train, self.account.around(place), setting), params)
        self.state, self.used, self.curve = engine.start(), {}, []
        if found is None or found.round < 0:
            # a stage starts with a checkpoint of its own, so that resuming never has to guess what came before it
            self.segments = []
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
            shared = self._cached(place, engine.stateful)
            if shared is not None:
                return self._adopt(engine, place, server, *shared)
        else:
            begin, self.segments = found.round, list(found.segments)
            server = restore_empty(server, found.server)
            self.excluded = Counter(found.about.get("excluded", {}))
            self.state = found.about.get("state", self.state)
            self.curve = list(found.about.get("curve", []))
            self.folder.rewind(found.logs)
            self._append(found.about.get("lines", {}))
            engine.load_private([self.folder.path / "private" / name for name in self.segments])
        self._enter(engine, place, max(begin, 1))
        if not stage.rounds:
            return server
        self.progress.begin(f"{self.title or experiment.label}: {method.name}", rounds, begin)
        account = self.account
        samplers = [self._cohorts(place, server, period.split.train) for period in experiment.periods]
        if begin == 0:
            self._log(engine, place, method, 0, None, None, server)
        saved = time.monotonic()
        coming = samplers[experiment.period(place, begin + 1)].draw(begin + 1)
        for number in range(begin + 1, rounds + 1):
            if stage.auto and self._converged(server):
                break
            began = time.monotonic()
            draw, coming = coming, samplers[experiment.period(place, number + 1)].draw(number + 1)
            change = self.scoring.point(self.now.split, server) if self._enter(engine, place, number) else None
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
            last = number == rounds or (stage.auto and settled(server))
            note = self._log(engine, place, method, number, draw, outcome, server, last, change)
            self.folder.append("timing.jsonl", {"stage": place, "round": number, "seconds": time.monotonic() - began})
            self.progress.advance(1, note)
            self.after_round(place, number)
            begin, stopping = number, self.stop()
            ended = last or (stage.auto and self._converged(server))
            if stopping or (time.monotonic() - saved > self.checkpoint_seconds and not ended):
                self._save(engine, place, number, server)
                saved = time.monotonic()
            if stopping:
                raise Interrupted(f"stopped after round {number} of {rounds}")
            if ended:
                break
        # the last one always and in the same form, so that what a finished run leaves does not depend on the clock
        self._save(engine, place, begin, server, ended=True)
        self._share(place, begin, server)
        return server

    def _converged(self, server: Tree) -> bool:
        """Whether a stage of as many rounds as it takes has had enough; a function of what its checkpoint holds."""
        if "settled" in server:  # the method knows better than a curve over some clients
            return settled(server)
        return flat(self.curve, self.experiment.lower_is_better)

    def _enter(self, engine: Engine, place: int, number: int) -> bool:
        """Come to the rows of a round; whether they are others than before."""
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
        """A checkpoint; `lines`: what the logs will yet say of its last round; `ended`: no round is left."""
        final = ended and place == len(self.experiment.stages) - 1
        if number > 0:
            name, folder = f"{place:03d}-{number:07d}", self.folder
            self.segments = engine.save_private(folder.path / "private", name, not final, folder.run)
        about = {
            "excluded": dict(self.excluded), **({"state": self.state} if self.state else {}),
            **({"curve": self.curve} if self.curve else {}),
            **({"lines": lines} if lines else {}),
        }  # fmt: skip
        made = Checkpoint(place, number, server, self.folder.marks(), self.segments, about)
        self.folder.save(made, keep=1 if final else 2)

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
            seen = self.scoring.point(self.now.split, server)
        validation = seen.get("validation")
        if validation:
            self.curve.append(validation[experiment.metric])
        added = {name: kind for transform in engine.work.transforms for name, kind in transform.reveals.items()}
        entry = self.ledger.round(place, number, method, draw, outcome, added)
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
            **({"aggregator": outcome.observed} if outcome and outcome.observed else {}),
            **({"privacy": spent} if spent else {}), **self._watched(outcome),
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

    def _watched(self, outcome: RoundResult | None) -> dict[str, Any]:
        """For the log of a round: what a robust rule did, or, without one, whose change is far larger than others'."""
        experiment, ids = self.experiment, self.experiment.population.ids
        if outcome is None:
            return {}
        if outcome.ruled is not None:
            ruled = outcome.ruled
            named = {"left_out": [ids[c] for c in ruled.left_out], "cut": [ids[c] for c in ruled.cut]}
            return {"robust": {**named, **({"bound": ruled.bounds} if ruled.bounds else {})}}
        found = outliers(outcome.norms)
        new = [client for client in found if client not in self.warned]
        self.warned.update(new)
        for client in new:
            who = "a client" if experiment.privacy else f"client {ids[client]!r}"
            self.progress.note(warning(who, outcome.norms, client))
        return {"outliers": [ids[c] for c in found]} if found and not experiment.privacy else {}

    def _append(self, lines: Lines) -> None:
        for log, entry in lines.items():
            self.folder.append(log, entry)

    # -- the end -------------------------------------------------------------------------------------------------------
    def _finish(self, engine: Engine, server: Tree, params: Params) -> dict[str, Any]:
        """Make and score the personal models; for tuning, score validation rows only."""
        experiment, scoring = self.experiment, self.scoring
        privacy = {"privacy": self.account.statement()} if self.account else {}
        self._enter(engine, len(experiment.stages), 1)  # a stage that was taken over did not come to its last rows
        if self.select_only:
            value, candidate, clients, each = scoring.selection(server)
            self.folder.write_table("selection.parquet", {
                "client": [experiment.population.ids[c] for c in clients], "value": each})  # fmt: skip
            label = {"label": experiment.label, "seed": experiment.seed}
            self.folder.write_result({**label, "validation": value, "candidate": candidate, **privacy})
            return self.folder.result() or {}
        final = scoring.final(server, self.title or experiment.label)
        method, support = experiment.stages[-1].method, experiment.split.test.support.sizes()
        sent = broadcast_bytes(method, server)
        self.folder.append("ledger.jsonl", self.ledger.personalization(method, engine.choice, sent, support))
        return Results(experiment, self.folder, final).write(server, params, self.excluded, privacy)

    # -- stages that several runs share -----------------------------------------------------------------------
    def _stage_key(self, place: int) -> str:
        return stage_key(self.experiment.config, place)

    def _cached(self, place: int, stateful: bool) -> tuple[RunFolder, Checkpoint] | None:
        stages = self.experiment.stages
        if self.cache is None or not stages[place].rounds:
            return None
        if stateful and place == len(stages) - 1:  # its personal models need private state, which stays in its run
            return None
        path = self.cache / self._stage_key(place)
        if not (path / "whole").exists():
            return None
        try:
            shared = look_up(path)
            return shared if self.account is None or self.account.fits(path, place) else None
        except UserError as problem:
            self.progress.note(f"{problem}; the stage is trained again")
            return None

    def _adopt(self, engine: Engine, place: int, template: Tree, shared: RunFolder, found: Checkpoint) -> Tree:
        """Take over a stage that another run has trained: its parameters and its lines in the logs."""
        for log in LOGS:
            for entry in shared.read_log(log):
                self.folder.append(log, entry)
        self.excluded = Counter(found.about.get("excluded", {}))
        self.curve = list(found.about.get("curve", []))
        if self.account:
            self.account.adopt(shared.path, place)
        server = restore_empty(template, found.server)
        self._save(engine, place, found.round, server, ended=True)
        return server

    def _share(self, place: int, number: int, server: Tree) -> None:
        """Put a trained stage where other runs find it."""
        if self.cache is None:
            return
        path = self.cache / self._stage_key(place)
        if (path / "whole").exists():
            return

        def fill(entry: RunFolder) -> None:
            for log in LOGS:
                lines = [json.dumps(line) for line in self.folder.read_log(log) if line["stage"] == place]
                write_text(entry.path / log, "".join(f"{line}\n" for line in lines))
            if self.account:
                self.account.share(entry.path, place)
            about = {"excluded": dict(self.excluded), "curve": self.curve}
            entry.save(Checkpoint(place, number, server, entry.marks(), [], about))

        put(path, fill)
