"""`bespoke compare`: tunes and runs several methods with several seeds, and records them for the report.

Every method is tuned on validation data (with the first seed, or by the mean over several), then run with every seed.
Everything is on disk, tuning runs included, so an interrupted comparison continues where it stopped. With `automatic`,
the data decide what the user left open: see defaults.py. A file with a [compare] table is run as written.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from bespoke.callbacks.callback import Callback
from bespoke.data.tables.checks import check
from bespoke.digests import sealed
from bespoke.errors import UserError, unknown
from bespoke.experiment.build import Bench, resolved
from bespoke.experiment.callbacks import separated
from bespoke.experiment.checks import check_compare, checked
from bespoke.experiment.config import AUTO, ExperimentConfig
from bespoke.experiment.experiment import Experiment
from bespoke.experiment.loading import load_population
from bespoke.experiment.presets import Preset
from bespoke.experiment.reading import read_experiment
from bespoke.experiment.search_space import grid, merged, past_the_edge
from bespoke.experiment.stage import stages_of
from bespoke.experiment.variants import labelled
from bespoke.federation.engine import Choice as EngineChoice
from bespoke.imported import trust_named
from bespoke.methods import METHODS
from bespoke.plain import ByMethod, Knobs, TomlTable
from bespoke.privacy.combined import together, whole_folder
from bespoke.records import RESULT_FORMAT, AcceptanceRule, CompareRecord, MethodRecord, TrialOfMethod
from bespoke.runs.events import Progress, Silent
from bespoke.runs.forgotten import without_forgotten
from bespoke.runs.results import read_selection
from bespoke.statistics.harm import UNATTACKED
from bespoke.storage import write_text
from bespoke.study.defaults import Settled, settle
from bespoke.study.described import cautions, describe, described
from bespoke.study.job import Job
from bespoke.study.plan import ComparisonPlan, bare
from bespoke.study.ray_runs import on_cluster
from bespoke.study.references import REFERENCES, references_for
from bespoke.study.scheduler import Jobs
from bespoke.study.tuning import Trial, best, folder_name, settled

DEFAULT_METHODS = ("fedavg", "local", "finetune")  # for a file without a list of methods
GROUP_METHODS = (
    "group-fl",
    "group-perfl",
)  # besides, where groups are named: with fedavg and finetune the paper's four
EXTENSIONS = 3  # how often a grid is extended if its edge is best


@dataclass
class Comparison:
    """Methods times seeds on one dataset; `base` is an experiment without stages."""

    base: TomlTable
    folder: Path
    methods: tuple[str, ...] = DEFAULT_METHODS
    seeds: tuple[int, ...] = (0, 1, 2)
    rounds: int | Literal["auto"] = 60
    tune: bool = True
    knobs: ByMethod = field(default_factory=dict)  # fixed knobs by method
    grid: dict[str, dict[str, list[Any]]] = field(default_factory=dict)  # values to try, by method
    expected: ByMethod = field(default_factory=dict)  # published numbers by method, for the report
    accept: AcceptanceRule = field(default_factory=AcceptanceRule)  # the acceptance rule, which the report applies
    command: str = ""
    progress: Progress = field(default_factory=Silent)
    stop: Callable[[], bool] = lambda: False
    how: EngineChoice | None = None
    callbacks: Sequence[Callback] = ()  # observers of every run; those that end stages are in `base` too
    entries: ByMethod = field(default_factory=dict)  # methods in settings, by label: see variants.py
    notes: list[str] = field(default_factory=list)  # remarks on these methods with these data
    jobs: int | None = 1  # runs at a time; None: as many as cores, if runs are light
    tune_seeds: tuple[int, ...] = ()  # seeds of a trial; default: the first seed
    preset: str = ""
    automatic: bool = False  # the data decide what the user left open
    settled: Settled = field(default_factory=Settled)  # these decisions
    checks: list[dict[str, str]] = field(default_factory=list)  # findings in the data
    referred: list[str] = field(default_factory=list)  # references with runs
    given: tuple[ByMethod, ByMethod] = ({}, {})  # the user's knobs and grid
    _validated: dict[str, ExperimentConfig] = field(default_factory=dict, init=False, repr=False)

    @property
    def plan(self) -> ComparisonPlan:
        """The configurations of the methods as the comparison is set now."""
        return ComparisonPlan(
            self.base, self.methods, self.seeds, self.rounds, self.knobs, self.grid if self.tune else None,
            self.entries, self.settled.follows, self.tune_seeds, self._validated,
        )  # fmt: skip

    @classmethod
    def read(cls, path: Path, folder: Path, overrides: list[str] | None = None, **rest: Any) -> Comparison:
        """From a TOML file: an experiment without stages, and a [compare] table (see benchmarks/motley).

        overrides: KEY=VALUE, as `--set` gives them.
        """
        raw = read_experiment(path, overrides)
        table = raw.pop("compare", None)
        if table is None:
            raise UserError(f"{path} has no [compare] table (methods, seeds, rounds); a single experiment: bespoke run")
        expected = raw.pop("expected", {})
        named = table.get("preset") if isinstance(table, dict) else None  # the check below reports other mistakes
        preset = Preset.read(named) if isinstance(named, str) else None
        asked = check_compare(preset.entries_below(table) if preset else table, str(path))
        seeds = tuple(range(asked.seeds)) if isinstance(asked.seeds, int) else tuple(asked.seeds)
        methods = tuple(dict.fromkeys([*(asked.methods or default_methods(raw.get("data"))), *asked.entries]))
        knobs, grids, rounds = asked.knobs, asked.grid, asked.rounds
        if preset:
            raw = preset.below(raw)
            grids = {**preset.grid, **grids}
            knobs = preset.knobs_below(knobs, tuned=not asked.tune)
            rounds = asked.rounds if "rounds" in asked.model_fields_set else preset.rounds or asked.rounds
        return cls(
            raw, folder, methods, seeds, rounds, asked.tune, knobs, grids, expected,
            accept=cast(AcceptanceRule, asked.accept), entries=asked.entries,
            tune_seeds=tune_seeds(asked.tune_seeds, seeds), preset=asked.preset or "", **rest,
        )  # fmt: skip

    def run(self) -> Path:
        """Tunes, runs, and writes compare.json; returns the folder."""
        self.base, self.callbacks = separated(self.base, self.callbacks)
        self.base, cluster = on_cluster(self.base)
        if not ((self.methods or self.automatic) and self.seeds):
            raise UserError(f"nothing to compare: methods = {self.methods}, seeds = {self.seeds}")
        trust_named([self.base, self.methods, self.entries, self.knobs, self.grid])
        asked = {key: getattr(self, key) for key in ("methods", "entries", "knobs", "grid")}
        table = labelled(asked, "--methods")
        self.methods, self.entries = tuple(table["methods"]), table["entries"]
        self.knobs, self.grid = table["knobs"], table["grid"]
        for name in self.methods:
            if name not in METHODS.built_in and name not in self.entries:
                raise unknown("method", name, [*METHODS.origins(), *self.entries], "--methods")
        if not self.automatic:
            self.plan.check()
        base = checked({**self.base, "seed": self.seeds[0], "stage": [{"method": "fedavg", "rounds": 1}]}, "compare")
        for half_written in self.folder.glob(".*.partial"):  # leftovers of a killed process; runs remove their own
            half_written.unlink(missing_ok=True)
        population = without_forgotten(load_population(base), self.folder)
        bench = Bench(population, self.folder)
        prepared = bench.prepared(base)
        for note in prepared.plain.about.get("notes", []):
            self.progress.note(note)
        if self.automatic:
            self.given = self.knobs, self.grid
            self._adopt(settle(self.base, self.methods, prepared.plain, prepared.split))
            if self.rounds == AUTO:
                self.rounds = self.settled.rounds or AUTO
            self.plan.check()
        spaces = [space for name in self.plan.needed() if (space := self.plan.space(name))]
        trials = sum(len(grid(space)) for space in spaces) * len(self.tune_seeds or [0])
        with Jobs(
            population,
            self.folder,
            self.jobs,
            len(self.methods) * len(self.seeds) + trials,
            self.progress,
            self.stop,
            self.how,
            self.callbacks,
            meanwhile=_import_report,
            cluster=cluster,
        ) as jobs:
            jobs.bench = bench
            if self.automatic:
                self._choose_model(jobs)
            # built before any run, so that mistakes are refused and doubts reported at the start
            planned = [jobs.bench.build(self.plan.first(name)) for name in self.methods]
            self.notes = cautions(planned)
            for note in self.notes:
                self.progress.note(note)
            chosen, tuning = self._tuned(jobs)
            if self.automatic and self.tune and self.settled.widens:
                self._widen(chosen, jobs)
            runs = [
                Job(self.folder / "runs" / f"{name}-seed{seed}", self.plan.config(name, seed, chosen))
                for name, seed in itertools.product(self.methods, self.seeds)
            ]
            runs += self._unattacked(chosen)
            experiment = jobs.bench.build(runs[-1].config)
            runs += self._references(experiment)
            jobs.all(runs)
            plain = bench.prepared(runs[-1].config, experiment.privacy).plain
            self.checks = [found.to_json() for found in check(plain, experiment.split)]
            about = self._about(experiment, chosen, tuning, jobs.text())
            self._spent(about["methods"], chosen)
            about["spent"] = whole_folder(self.folder)
        write_text(self.folder / "compare.json", json.dumps(sealed(about), indent=1))
        return self.folder

    def _adopt(self, settled: Settled) -> None:
        """Applies the settled defaults. The user's values have priority, and nothing of an earlier model remains."""
        knobs, tried = self.given
        self.settled, self.base, self.methods = settled, settled.base, settled.methods
        self.knobs = {name: {**settled.knobs.get(name, {}), **knobs.get(name, {})} for name in {**METHODS, **knobs}}
        self.grid = {**settled.grid, **tried}

    def _choose_model(self, jobs: Jobs) -> None:
        """Chooses between a linear model and a small network, as shared models on validation rows."""
        rivals = self.settled.rivals
        if len(rivals) < 2:
            return
        tried: dict[str, Trial] = {}
        lower = True
        for name, rival in rivals.items():
            configs = [
                checked({**self.base, **rival.base, "label": name, "seed": self.seeds[0], "stage": [
                    {"method": rival.method, "rounds": self.rounds, **knobs}]}, f"model {name}")
                for knobs in rival.tried
            ]  # fmt: skip
            paths = [self.folder / "tuning" / folder_name(f"model {name}", **knobs) for knobs in rival.tried]
            made = [Job(path, config, True, own_engine=True) for path, config in zip(paths, configs)]
            trials = [Trial(n, knobs, [job]) for n, (knobs, job) in enumerate(zip(rival.tried, made))]
            settled(trials, jobs)
            lower = jobs.bench.build(configs[0]).lower_is_better
            usable = [trial for trial in trials if trial.validation is not None]
            if usable:
                tried[name] = best(usable, lower, f"model {name}")
        values = {name: read_selection(trial.jobs[0].path) for name, trial in tried.items()}
        self._adopt(self.settled.with_model(tried, values, lower))
        self.progress.note(self.settled.model_note)
        if self.settled.switched:
            jobs.how, jobs.engine_file = None, "engine-network.json"
            self.plan.check()  # the linear model's knobs and stages were checked before

    def _unattacked(self, chosen: ByMethod) -> list[Job]:
        """The same runs without the attack. The difference is the attack's cost to the honest clients."""
        attack = self.base.get("attack") or {}
        if attack.get("kind", "none") == "none":
            return []
        found = []
        for name, seed in itertools.product(self.methods, self.seeds):
            raw = {**self.base, "attack": {**attack, "kind": "none"}, "label": name, "seed": seed}
            raw["attack"].pop("factor", None)
            config = checked({**raw, "stage": self.plan.stages(name, chosen)}, f"compare: {name}")
            found.append(Job(self.folder / UNATTACKED / f"{name}-seed{seed}", config))
        return found

    def _references(self, experiment: Experiment) -> list[Job]:
        """Runs of the references, which are not federated."""
        self.referred = references_for(experiment)
        found = []
        for name, seed in itertools.product(self.referred, self.seeds):
            raw = {**self.base, "label": name, "seed": seed, "stage": [{"method": "fedavg", "rounds": 0}]}
            raw = {k: v for k, v in raw.items() if k not in ("privacy", "robust", "secure")}  # it is not federated
            if raw.get("attack"):
                raw["attack"] = {"clients": raw["attack"].get("clients", 0.2), "kind": "none"}
            path = self.folder / "runs" / f"{name}-seed{seed}"
            found.append(Job(path, checked(raw, name), begins_with=name, privacy=experiment.privacy))
        return found

    def _tuned(self, jobs: Jobs) -> tuple[ByMethod, dict[str, list[TrialOfMethod]]]:
        """The best knobs of every method on validation rows, and all trials.

        Methods that start from another's model are tuned after it, all others at the same time.
        """
        chosen: ByMethod = {name: {} for name in self.plan.needed()}
        tuning: dict[str, list[TrialOfMethod]] = {name: [] for name in chosen}
        seeds = self.tune_seeds or self.seeds[:1]
        for depth in range(1, 1 + max(len(self.plan.lineage(name)) for name in chosen)):
            names = [name for name in chosen if len(self.plan.lineage(name)) == depth and self.plan.space(name)]
            trials = {name: self._trials(name, seeds, chosen) for name in names}
            settled(itertools.chain.from_iterable(trials.values()), jobs)
            for name, tried in trials.items():
                lower = jobs.bench.build(tried[0].jobs[0].config).lower_is_better
                if self.automatic:
                    self._extend(name, tried, seeds, chosen, jobs, lower)
                chosen[name] = best(tried, lower, name).setting
                tuning[name] = [{"knobs": trial.setting, "validation": trial.validation} for trial in tried]
                if len(seeds) > 1:
                    for entry, trial in zip(tuning[name], tried):
                        entry["values"] = trial.values
        return chosen, tuning

    def _trials(self, name: str, seeds: tuple[int, ...], chosen: ByMethod) -> list[Trial]:
        settings = grid(self.plan.space(name), f"grid.{name}")
        return [self._trial(number, name, knobs, seeds, chosen) for number, knobs in enumerate(settings)]

    def _trial(self, number: int, name: str, knobs: Knobs, seeds: tuple[int, ...], chosen: ByMethod) -> Trial:
        jobs = []
        for place, seed in enumerate(seeds):
            tag = f"-seed{seed}" if place else ""
            path = self.folder / "tuning" / f"{folder_name(name, **knobs)}{tag}"
            jobs.append(Job(path, self.plan.config(name, seed, {**chosen, name: knobs}), select_only=True))
        return Trial(number, knobs, jobs)

    def _extend(
        self, name: str, tried: list[Trial], seeds: tuple[int, ...], chosen: ByMethod, jobs: Jobs,
        lower: bool,
    ) -> None:  # fmt: skip
        """Tries values beyond a grid's edge while the edge is best."""
        for _ in range(EXTENSIONS):
            beyond = past_the_edge(best(tried, lower, name).setting, [trial.setting for trial in tried])
            more = [self._trial(len(tried) + n, name, knobs, seeds, chosen) for n, knobs in enumerate(beyond)]
            if not more:
                return
            settled(more, jobs)
            tried += more

    def _widen(self, chosen: ByMethod, jobs: Jobs) -> None:
        """Extends a method's own candidates while a candidate at their edge is chosen."""
        for name in self.plan.needed():
            for _ in range(EXTENSIONS):
                config = self.plan.config(name, self.seeds[0], chosen)
                method = bare(stages_of(config)[-1])
                if not hasattr(method, "widened"):
                    break
                path = self.folder / "tuning" / folder_name(name, **chosen[name])
                found = jobs.all([Job(path, config, select_only=True)])[0]
                wider = method.widened(str(found.get("candidate") or ""))
                if not wider:
                    break
                chosen[name] = merged(chosen[name], {knob: _listed(value) for knob, value in wider.items()})

    def _spent(self, methods: list[MethodRecord], chosen: ByMethod) -> None:
        """Under privacy: the combined cost of a method's first run and the runs that chose its knobs."""
        if "privacy" not in self.base:
            return
        for entry in methods:
            name, seeds = entry["label"], self.tune_seeds or self.seeds[:1]
            needed = [name, *filter(None, [self.plan.entry(name).after])]
            tried = [t for n in needed if self.plan.space(n) for t in self._trials(n, seeds, chosen)]
            paths = [job.path for trial in tried for job in trial.jobs]
            entry["tuning_cost"] = together([self.folder / "runs" / f"{name}-seed{self.seeds[0]}", *paths])

    def _described(self, name: str, chosen: ByMethod) -> MethodRecord:
        config = self.plan.config(name, self.seeds[0], chosen)
        last = stages_of(config)[-1]
        rule = config.robust if config.privacy is None else None
        return describe(bare(last), rule, last.aggregator)

    def _about(
        self, experiment: Experiment, chosen: ByMethod, tuning: dict[str, list[TrialOfMethod]], engine: str
    ) -> CompareRecord:
        about: CompareRecord = {
            "format": RESULT_FORMAT,
            "baseline": next((name for name in ("fedavg", "shared") if name in self.methods), self.methods[0]),
            "references": [
                {"label": name, "title": REFERENCES[name][0], "what": REFERENCES[name][1]} for name in self.referred
            ],
            "checks": self.checks,
            "settled": self.settled.to_json() if self.automatic else {},
            "methods": [
                {
                    **self._described(name, chosen),
                    "label": name,
                    "title": self.plan.entry(name).title,
                    "stages": self.plan.stages(name, chosen),
                    "chosen": chosen.get(name, {}),
                    "tuning": tuning.get(name, []),
                }
                for name in self.methods
            ],
            "seeds": list(self.seeds),
            "tune_seeds": list(self.tune_seeds or self.seeds[:1]) if self.tune else [],
            "preset": self.preset,
            "expected": self.expected,
            "accept": self.accept,
            "notes": self.notes,
            **described(experiment, resolved(self.plan.config(self.methods[0], self.seeds[0], chosen))["split"]),
            "engine": {"text": engine},
            "privacy": self.base.get("privacy") or {},
        }
        if self.base.get("robust"):
            about["robust"] = self.base["robust"]
        if self.base.get("attack"):
            about["attack"] = self.base["attack"]
        if self.base.get("secure"):
            about["secure"] = self.base["secure"]
        about["command"] = self.command
        return about


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _import_report() -> None:
    """Imports what the report needs, which takes seconds."""
    import pandas  # noqa: F401
    import scipy.stats  # noqa: F401

    import bespoke.report.page
    import bespoke.report.terminal  # noqa: F401


def default_methods(data: Any) -> tuple[str, ...]:
    """The default methods; with a group column, group methods are included."""
    grouped = isinstance(data, dict) and data.get("group")
    return (*DEFAULT_METHODS, *GROUP_METHODS) if grouped else DEFAULT_METHODS


def tune_seeds(asked: Any, seeds: tuple[int, ...]) -> tuple[int, ...]:
    """The seeds of a trial: the first few, all, or those listed."""
    if asked == "all":
        return seeds
    return seeds[:asked] if isinstance(asked, int) else tuple(asked)
