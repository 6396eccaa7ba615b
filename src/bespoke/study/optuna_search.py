"""Searches with Optuna: TPE suggests settings, a pruner stops bad trials, the study is stored in SQLite.

Akiba et al., Optuna, KDD 2019. Only this process talks to Optuna. The runs execute elsewhere (scheduler.py) and send
their learning curves here. TPE's suggestion for a trial is a function of (seed, number of the trial, trials before it).
So an interrupted search can continue; with one run at a time it tries the same settings. Needs the extra `tune`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bespoke.errors import UserError, needs_extra, unknown
from bespoke.experiment.search_space import KnobValues, Range, Space
from bespoke.plain import Knobs
from bespoke.randomness import mix
from bespoke.records import RunRecord
from bespoke.study.job import Job
from bespoke.study.scheduler import Jobs

if TYPE_CHECKING:
    from bespoke.study.tuning import Trial

PRUNERS = ("median", "hyperband", "none")


class Search:
    """Trials of one study; `made` turns a number and a setting into the runs of a trial."""

    def __init__(
        self, folder: Path, space: Space, seed: int, lower_is_better: bool, pruner: str, rounds: int,
        made: Callable[[int, KnobValues], Trial],
    ) -> None:  # fmt: skip
        try:
            import optuna
        except ImportError:
            raise needs_extra("optuna", "tune", "a search with Optuna") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna: Any = optuna
        self.space, self.seed, self.made = space, seed, made
        path = self.path = folder / "study.db"
        try:
            storage = optuna.storages.RDBStorage(
                "sqlite:///study.db",  # only the dialect: characters of a path could have a meaning in a URL
                engine_kwargs={"creator": lambda: sqlite3.connect(path, timeout=60, check_same_thread=False)},
            )
            self.study = optuna.create_study(
                storage=storage, study_name="bespoke", direction="minimize" if lower_is_better else "maximize",
                load_if_exists=True, pruner=_pruner(optuna, pruner, rounds),
            )  # fmt: skip
        except Exception as error:  # from sqlalchemy or optuna, depending on the damage
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{path} is damaged, or of another version of Optuna ({reason}); remove it and resume"
            ) from None
        self.running: dict[int, Any] = {}  # optuna's running trials
        self.trials: dict[int, Trial] = {}
        self.owner: dict[Path, int] = {}
        self.started: set[Path] = set()

    def search(self, count: int, jobs: Jobs, seeds: int = 1) -> list[Trial]:
        """Tries this many settings in total, earlier ones included."""
        states = self.optuna.trial.TrialState
        for old in self.study.get_trials(deepcopy=False):
            if old.state == states.RUNNING and set(old.params) != set(self.space):  # killed during a suggestion
                self.study.tell(old.number, state=states.FAIL)
            if old.state == states.FAIL or set(old.params) != set(self.space):
                continue
            trial = self._enter(old.number, old.params)
            if old.state == states.RUNNING:  # interrupted: continues from its folders
                self.running[old.number] = self.optuna.trial.Trial(self.study, old._trial_id)
            else:
                trial.values = old.user_attrs.get("values", [])
                trial.pruned = old.user_attrs.get("pruned", False)
                self._check(trial)

        def source() -> Job | None:
            for number in self.running:
                job = self._next_seed(number)
                if job:
                    return job
            return None if len(self.trials) >= count else self._next_seed(self._ask())

        remaining = max(count - len(self.trials), 0) + len(self.running)
        jobs.run(source, self._done, remaining * seeds, self._judge)
        return [self.trials[number] for number in sorted(self.trials)]

    def _check(self, trial: Trial) -> None:
        """Compares the study's entry of a trial with the verified results of its runs."""
        for job, value in zip(trial.jobs, trial.values):
            result = job.finished()
            said = result.get("validation") if result else None
            if value is not None and said != value:
                raise UserError(
                    f"{self.path} says that trial {trial.number} has the validation metric {value}, "
                    f"{job.path / 'result.json'} says {said}: one of them is damaged or missing. Remove "
                    f"{self.path.name} and resume: finished runs are not repeated"
                )

    def _enter(self, number: int, params: Knobs) -> Trial:
        trial = self.made(number, self._setting(params))
        self.trials[number] = trial
        self.owner |= {job.path: number for job in trial.jobs}
        return trial

    # -- asking --------------------------------------------------------------------------------------------------------
    def _ask(self) -> int:
        number = len(self.study.get_trials(deepcopy=False))
        seed = int(mix("tune", self.seed, number)) & 0x7FFFFFFF
        self.study.sampler = self.optuna.samplers.TPESampler(seed=seed)
        asked = self.study.ask({key: self._distribution(entry) for key, entry in self.space.items()})
        self.running[asked.number] = asked
        self._enter(asked.number, asked.params)
        return int(asked.number)

    def _distribution(self, entry: list[Any] | Range) -> Any:
        made = self.optuna.distributions
        if isinstance(entry, Range):
            kind = made.IntDistribution if entry.whole else made.FloatDistribution
            return kind(entry.low, entry.high, log=entry.log)
        return made.CategoricalDistribution([_as_choice(value) for value in entry])

    def _setting(self, params: Knobs) -> KnobValues:
        """The setting of a trial; lists and tables are stored as text in the study."""
        setting: KnobValues = {}
        for key, entry in self.space.items():
            found = params[key]
            setting[key] = found if isinstance(entry, Range) else next(v for v in entry if _as_choice(v) == found)
        return setting

    # -- runs ----------------------------------------------------------------------------------------------------------
    def _next_seed(self, number: int) -> Job | None:
        """The next run of a trial, if the trial has not ended and none of its runs is running."""
        trial = self.trials[number]
        if number not in self.running or len(trial.values) == len(trial.jobs):
            return None
        job = trial.jobs[len(trial.values)]
        if job.path in self.started:
            return None
        self.started.add(job.path)
        return job

    def _judge(self, job: Job, rounds: int, value: float) -> bool:
        """Decides whether a run should continue. Runs of further seeds are compared with runs of the same seed."""
        number = self.owner[job.path]
        trial, running = self.trials[number], self.running[number]
        whole = sum(stage.get("rounds", 0) for stage in job.config.stage)
        step = trial.jobs.index(job) * whole + rounds
        if step not in self.study.get_trials(deepcopy=False)[number].intermediate_values:  # else reported before
            running.report(value, step)
        return rounds == whole or not running.should_prune()  # never at the last point, where the run is complete

    def _done(self, job: Job, result: RunRecord | None) -> None:
        number = self.owner[job.path]
        trial = self.trials[number]
        trial.pruned = result is None
        trial.values.append(None if result is None else result.get("validation"))
        diverged = trial.values[-1] is None
        if len(trial.values) < len(trial.jobs) and not diverged:
            return
        running = self.running.pop(number)
        running.set_user_attr("values", trial.values)
        running.set_user_attr("pruned", trial.pruned)
        if trial.validation is None:
            # diverged trials count as pruned: TPE ignores failed trials and would try the same region again
            self.study.tell(running, state=self.optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(running, trial.validation)


def _pruner(optuna: Any, name: str, rounds: int) -> Any:
    if name not in PRUNERS:
        raise unknown("pruner", name, PRUNERS)
    if name == "none":
        return optuna.pruners.NopPruner()
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=max(rounds // 9, 1), max_resource=max(rounds, 1))
    return optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=rounds // 4)


def _as_choice(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else json.dumps(value)
