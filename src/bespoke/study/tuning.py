"""Chooses hyper-parameters on validation data: `bespoke tune`, its trials on disk, and the best of them.

A trial is a setting of knobs, run with one or several seeds in separate folders. A tuning run never reads query rows.
The value of a trial is the mean over seeds of the mean validation metric per client. The trial with the best value
wins; of equal ones the earlier. A trial without a finite value (it diverged) loses.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bespoke.callbacks.callback import Callback
from bespoke.errors import UserError
from bespoke.experiment.build import resolved, to_toml
from bespoke.experiment.callbacks import separated
from bespoke.experiment.checks import check_tune, checked
from bespoke.experiment.config import ExperimentConfig, TuneConfig
from bespoke.experiment.loading import load_population
from bespoke.experiment.presets import OWN, Preset, joined
from bespoke.experiment.reading import read_experiment, read_toml
from bespoke.experiment.search_space import (
    TUNABLE,
    KnobValues,
    Space,
    applied,
    called,
    check_space,
    grid,
    merged,
    read_space,
    space_json,
    stage_place,
    text,
)  # fmt: skip
from bespoke.methods import METHODS
from bespoke.plain import ByMethod, Named, TomlTable
from bespoke.privacy.combined import together
from bespoke.records import RESULT_FORMAT, PrivacyCost, TrialRecord, TuneRecord
from bespoke.runs.events import Progress, Silent
from bespoke.runs.folder import RunFolder
from bespoke.runs.forgotten import without_forgotten
from bespoke.storage import write_text
from bespoke.study.job import Job
from bespoke.study.ray_runs import on_cluster
from bespoke.study.scheduler import Jobs


@dataclass
class Trial:
    """A setting and its outcome."""

    number: int
    setting: KnobValues
    jobs: list[Job]  # one per seed
    values: list[float | None] = field(default_factory=list)  # one per seed; None: not finite
    pruned: bool = False

    @property
    def validation(self) -> float | None:
        """The mean over seeds; None if one of them diverged, or is missing."""
        found = [value for value in self.values if value is not None]
        return sum(found) / len(found) if len(found) == len(self.jobs) else None

    @property
    def state(self) -> str:
        if self.pruned:
            return "pruned"
        return "diverged" if self.validation is None else "finished"


def folder_name(*words: str, **knobs: Any) -> str:
    """The name of a trial's folder, with its setting: `fedavg-lr0.1`. Odd or long names get a digest."""
    plain = "-".join([*words, *(f"{knob}{value}" for knob, value in knobs.items())])
    name = re.sub(r"[^\w.+= -]+", "_", plain)
    if name == plain and len(name) <= 100:
        return name
    return f"{name[:80]}-{hashlib.blake2b(plain.encode(), digest_size=4).hexdigest()}"


def settled(trials: Iterable[Trial], jobs: Jobs) -> None:
    """Runs the trials, all seeds at the same time, and records their values."""
    trials = list(trials)
    found = iter(jobs.all([job for trial in trials for job in trial.jobs]))
    for trial in trials:
        trial.values = [next(found).get("validation") for _ in trial.jobs]


def best(trials: Iterable[Trial], lower_is_better: bool, what: str) -> Trial:
    """The trial with the best mean validation metric; of equal ones the earlier."""
    trials = list(trials)
    usable = [trial for trial in trials if trial.validation is not None]
    if not usable:
        raise UserError(
            f"{what}: no setting of {len(trials)} tried has a finite score on validation data. If there are too few "
            "clients or rows to choose on, use --no-tune; if training diverged: are there huge numbers?"
        )
    sign = 1 if lower_is_better else -1
    return min(usable, key=lambda trial: sign * (trial.validation or 0.0))


# -- bespoke tune ------------------------------------------------------------------------------------------------------
@dataclass
class Tuning:
    """Tries settings of one experiment on validation data; `base` is the experiment as in its file."""

    base: TomlTable
    folder: Path
    space: Space
    seeds: tuple[int, ...]
    optuna: bool = False
    trials: int = 20
    pruner: str = "median"
    jobs: int | None = 1
    name: str = "experiment"
    command: str = ""
    progress: Progress = field(default_factory=Silent)
    stop: Callable[[], bool] = lambda: False
    callbacks: Sequence[Callback] = ()  # observers of every run; those that end stages are in `base` too

    @classmethod
    def of(cls, raw: TomlTable, asked: TuneConfig, folder: Path, where: str, **rest: Any) -> Tuning:
        """From an experiment and its [tune] table: the given space, the preset's grid, or the methods' own values."""
        base = {key: value for key, value in raw.items() if key != "tune"}
        space = read_space(asked.space, f"{where}: [tune] space")
        if not isinstance(base.get("stage"), list):
            checked(base, where)  # refuses an experiment without stages
        if asked.preset:
            preset = Preset.read(asked.preset)
            base = preset.below(base)
            base["stage"] = [_with_preset(stage, preset) for stage in base["stage"]]
            space = space or read_space(
                {m: preset.grid[m] for m in (called(s.get("method")) for s in base["stage"]) if m in preset.grid},
                f"preset {preset.name}",
            )
        config = checked(base, where)
        cards = [METHODS[stage["method"]].card for stage in config.stage]
        methods = [card.name for card in cards]
        advised = {card.name: {k: list(v) for k, v in card.tunes.items()} for card in cards if card.tunes}
        space = space or read_space(advised, "what the methods advise")
        if not space:
            raise UserError(
                f"{where}: what is to be tried? {', '.join(methods)}: nothing is advised"
                f"{f' by the preset {asked.preset}' if asked.preset else ''}; give a [tune.space] table, as in "
                f"[tune.space.{methods[-1]}]"
            )
        check_space(base, space, where)
        if not asked.optuna:
            grid(space, f"{where}: [tune] space")
        seeds = range(config.seed, config.seed + asked.seeds) if isinstance(asked.seeds, int) else asked.seeds
        return cls(base, folder, space, tuple(seeds), asked.optuna, asked.trials, asked.pruner, **rest)

    def run(self) -> TuneRecord:
        """Tries the settings and writes tune.json, trials.parquet and best.toml; returns the content of tune.json."""
        self.base, self.callbacks = separated(self.base, self.callbacks, f"{self.name}: callbacks")
        self.base, cluster = on_cluster(self.base)
        config = checked(self.base, self.name)
        self._claim(config)
        with RunFolder(self.folder).locked():
            population = without_forgotten(load_population(config), self.folder)
            count = self.trials if self.optuna else len(grid(self.space))
            expected = count * len(self.seeds)
            with Jobs(
                population,
                self.folder,
                self.jobs,
                expected,
                self.progress,
                self.stop,
                callbacks=self.callbacks,
                cluster=cluster,
            ) as jobs:
                experiment = jobs.bench.build(config)
                for note in experiment.population.about.get("notes", []):
                    self.progress.note(note)
                lower = experiment.lower_is_better
                tried = self._searched(jobs, lower) if self.optuna else self._grid(jobs)
                engine = jobs.text()
            winner = best(tried, lower, self.name)
            chosen = winner.jobs[0].config.model_copy(update={"seed": config.seed})
            about: TuneRecord = {
                "format": RESULT_FORMAT, "title": config.label or self.name, "metric": experiment.metric,
                "lower_is_better": lower, "seeds": list(self.seeds), "space": space_json(self.space),
                "search": {"optuna": True, "trials": self.trials, "pruner": self.pruner} if self.optuna else "grid",
                "trials": [self._entry(trial) for trial in tried], "best": self._entry(winner),
                "experiment": self.base, "engine": engine, "command": self.command,
            }  # fmt: skip
            if (spent := self._spent(tried)) is not None:
                about["privacy"] = spent
            packages = ("bespoke-fl", "torch", "numpy", *(["optuna"] if self.optuna else []))
            about["versions"] = {"python": platform.python_version(), **{p: version(p) for p in packages}}
            RunFolder(self.folder).write_table("trials.parquet", _columns(tried, self.seeds))
            said = f"# Chosen on validation data among {len(tried)} settings: {text(winner.setting)}\n"
            write_text(self.folder / "best.toml", said + to_toml(chosen))
            write_text(self.folder / "tune.json", json.dumps(about, indent=1))
        return about

    def _spent(self, tried: list[Trial]) -> PrivacyCost | None:
        """Under privacy: the combined cost of all trials; a pruned one counts in full."""
        paths = [job.path for trial in tried for job in trial.jobs]
        ended = [path for path in paths if (path / "result.json").exists()]
        if not (self.base.get("privacy") and ended):
            return None
        return together([path if path in ended else ended[0] for path in paths])

    def _claim(self, config: ExperimentConfig) -> None:
        """Claims the folder for this search; refuses a folder that belongs to another search."""
        asked = json.dumps(
            {
                "experiment": resolved(config), "space": space_json(self.space),
                "seeds": list(self.seeds), "optuna": self.pruner if self.optuna else False,
            },
            indent=1,
        )  # fmt: skip
        path = self.folder / "search.json"
        if path.exists() and path.read_bytes() != asked.encode():
            raise UserError(
                f"{path} holds another experiment, space or seeds than asked for now, or was changed; resume with the "
                "same ones (only --trials and --jobs may differ), or choose another folder with --out"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(path, asked)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"{self.folder} cannot be made a folder: a file of that name is in the way") from None

    def trial(self, number: int, setting: KnobValues, name: str) -> Trial:
        """A setting as runs, one for each seed."""
        own = any(key.startswith("model.") for key in setting)
        jobs = []
        for place, seed in enumerate(self.seeds):
            config = checked({**applied(self.base, setting), "seed": seed}, self.name)
            path = self.folder / "tuning" / f"{name}{f'-seed{seed}' if place else ''}"
            jobs.append(Job(path, config, select_only=True, own_engine=own, judged=self.optuna))
        return Trial(number, setting, jobs)

    def _grid(self, jobs: Jobs) -> list[Trial]:
        trials = [self.trial(n, setting, folder_name(**setting)) for n, setting in enumerate(grid(self.space))]
        settled(trials, jobs)
        return trials

    def _searched(self, jobs: Jobs, lower: bool) -> list[Trial]:
        from bespoke.study.optuna_search import Search

        def made(number: int, setting: KnobValues) -> Trial:
            return self.trial(number, setting, f"trial-{number:04d}")

        rounds = sum(stage.get("rounds", 0) for stage in self.base["stage"])
        seed = int(self.base.get("seed", 0))
        study = Search(self.folder, self.space, seed, lower, self.pruner, rounds, made)
        return study.search(self.trials, jobs, len(self.seeds))

    def _entry(self, trial: Trial) -> TrialRecord:
        folders = [str(job.path.relative_to(self.folder)) for job in trial.jobs]
        return {
            "number": trial.number, "setting": trial.setting, "validation": trial.validation, "values": trial.values,
            "state": trial.state, "folders": folders,
        }  # fmt: skip


def read_tuning(
    path: Path, overrides: list[str] | None, space: Path | None, preset: str | None, optuna: bool, trials: int | None
) -> tuple[TomlTable, TuneConfig]:
    """Reads an experiment file and its search: the [tune] table or the file `space`, and the options."""
    raw = read_experiment(path, overrides)
    table, where = raw.get("tune", {}), str(path)
    if space is not None:
        table, where = read_toml(space), str(space)
        table = table.get("tune", table)
    if not isinstance(table, dict):
        raise UserError(f"{where}: tune = {table!r}: it has to be a table, [tune]")
    if trials is not None and not (optuna or table.get("optuna")):
        raise UserError(f"--trials {trials}: a grid tries every combination; a search of so many is --optuna")
    given = {"preset": preset, "optuna": optuna or None, "trials": trials}
    table = {**table, **{key: value for key, value in given.items() if value is not None}}
    if preset is not None and space is None:
        table.pop("space", None)  # the requested preset replaces the file's list
    return raw, check_tune(table, where)


def freeze_into(name: str, raw: TomlTable) -> Path:
    """The path for a preset. A path that cannot be written is refused before the work."""
    methods = [called(stage.get("method")) for stage in raw["stage"]]
    if len(set(methods)) < len(methods):
        raise UserError(f"--freeze: a preset has one entry for each method, and one comes twice: {', '.join(methods)}")
    target = Path(name) if name.endswith(".toml") or "/" in name else OWN / f"{name}.toml"
    if not re.fullmatch(r"[\w.-]+", target.stem):
        raise UserError(f"--freeze {name!r}: a name of letters, digits, - and _, or a path that ends in .toml")
    if target.exists():
        raise UserError(f"--freeze {name}: {target} exists already; freeze under another name, or remove it first")
    return target


def frozen(about: TuneRecord, name: str) -> Preset:
    """A finished tuning as a preset: fixed values, tried values, best values."""
    experiment = about["experiment"]
    methods = [called(stage["method"]) for stage in experiment["stage"]]
    tables = {key: experiment[key] for key in ("metric", "split", *TUNABLE) if experiment.get(key)}
    others = [{k: v for k, v in s.items() if k not in ("method", "rounds")} for s in experiment["stage"]]
    knobs = dict(zip(methods, others))
    tried: ByMethod = {}
    chosen: ByMethod = {}
    for key, values in about["space"].items():
        head, _, rest = key.partition(".")
        value = about["best"]["setting"][key]
        if head in TUNABLE:
            tables[head] = merged(tables.get(head, {}), {rest: value})
            continue
        method = methods[stage_place(experiment, head)]
        tried[method] = merged(tried.get(method, {}), {rest: values})
        chosen[method] = merged(chosen.get(method, {}), {rest: value})
    rounds = {stage.get("rounds") for stage in experiment["stage"] if stage.get("rounds")}
    value, metric = about["best"]["validation"], about["metric"]
    return Preset(
        name, f"{about['title']}: tuned, validation {metric} {value:.5g}", about["command"],
        rounds=rounds.pop() if len(rounds) == 1 else None, experiment=tables,
        knobs={method: entry for method, entry in knobs.items() if entry}, grid=tried, best=chosen,
    )  # fmt: skip


def _with_preset(stage: Any, preset: Preset) -> Any:
    """A stage with the preset's fixed knobs and rounds, unless the stage has its own."""
    if not isinstance(stage, dict) or not isinstance(stage.get("method"), str):
        return stage
    name = stage["method"]
    trains = METHODS.knows(name) and METHODS[name].trains
    rounds = {"rounds": preset.rounds} if preset.rounds and trains else {}
    return joined({**rounds, **preset.knobs.get(called(name), {})}, stage)


def _columns(trials: list[Trial], seeds: tuple[int, ...]) -> TomlTable:
    """The trials as columns; a knob whose values are not all numbers, or not all texts, is written as JSON."""
    table: Named = {
        "number": [trial.number for trial in trials],
        "state": [trial.state for trial in trials],
        "validation": [trial.validation for trial in trials],
    }
    for knob in trials[0].setting:
        values = [trial.setting[knob] for trial in trials]
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        texts = all(isinstance(v, str) for v in values)
        table[knob] = [float(v) for v in values] if numbers else values if texts else [json.dumps(v) for v in values]
    for place, seed in enumerate(seeds):
        table[f"seed {seed}"] = [t.values[place] if place < len(t.values) else None for t in trials]
    return table
