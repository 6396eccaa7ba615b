"""`bespoke compare`: does personalization help here, which method, by how much, who is hurt, what does it cost?

Every method is tuned on validation data with the first seed, then run with every seed; all of it lies on disk, the
tuning runs included, and a comparison that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bespoke.config import ExperimentConfig, check_compare, check_stage, checked, read_toml
from bespoke.data.arrays import write_text
from bespoke.data.population import Population
from bespoke.engines.engine import Choice as EngineChoice
from bespoke.entries import Entry
from bespoke.errors import UserError, unknown
from bespoke.experiments import build, load_population, resolved, to_toml
from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.rounds import Experiment, Interrupted, Progress, Run, Silent
from bespoke.runfolder import FORMAT, RunFolder
from bespoke.tensors import count

NO_TASK: Any = None  # a method that is only described needs no task
DEFAULT_METHODS = ("fedavg", "local", "finetune", "fedprox")


@dataclass
class Comparison:
    """Methods times seeds on one dataset; `base` is an experiment without stages."""

    base: dict[str, Any]
    folder: Path
    methods: tuple[str, ...] = DEFAULT_METHODS
    seeds: tuple[int, ...] = (0, 1, 2)
    rounds: int = 60
    tune: bool = True
    knobs: dict[str, dict[str, Any]] = field(default_factory=dict)  # fixed knobs by method
    grid: dict[str, dict[str, list[Any]]] = field(default_factory=dict)  # what to try, by method; else the method's own
    expected: dict[str, dict[str, Any]] = field(default_factory=dict)  # published numbers by method, for the report
    accept: dict[str, Any] = field(default_factory=dict)  # when clients take their models; the report applies it
    command: str = ""
    progress: Progress = field(default_factory=Silent)
    stop: Callable[[], bool] = lambda: False
    how: EngineChoice | None = None
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)  # methods in settings, by label: see entries.py

    @classmethod
    def read(cls, path: Path, folder: Path, **rest: Any) -> Comparison:
        """From a TOML file: an experiment without stages, and a [compare] table (see benchmarks/motley)."""
        raw = read_toml(path)
        table = raw.pop("compare", None)
        if table is None:
            raise UserError(f"{path} has no [compare] table (methods, seeds, rounds); a single experiment: bespoke run")
        expected = raw.pop("expected", {})
        asked = check_compare(table, str(path))
        seeds = tuple(range(asked.seeds)) if isinstance(asked.seeds, int) else tuple(asked.seeds)
        methods = tuple(dict.fromkeys([*(asked.methods or DEFAULT_METHODS), *asked.entries]))
        return cls(
            raw, folder, methods, seeds, asked.rounds, asked.tune, asked.knobs, asked.grid, expected,
            accept=asked.accept, entries=asked.entries, **rest,
        )  # fmt: skip

    def run(self) -> Path:
        """Tune, run, and write compare.json; returns the folder."""
        if not (self.methods and self.seeds):
            raise UserError(f"nothing to compare: methods = {self.methods}, seeds = {self.seeds}")
        for name in self.methods:
            if name not in METHODS and name not in self.entries:
                raise unknown("method", name, [*METHODS, *self.entries], "--methods")
        first = checked({**self.base, "stage": [{"method": "fedavg", "rounds": 0}]}, "compare")
        population = load_population(first)
        for note in population.about.get("notes", []):
            self.progress.note(note)
        chosen: dict[str, dict[str, Any]] = {}
        tuning: dict[str, list[dict[str, Any]]] = {}
        earlier = [self._entry(name).after for name in self.methods]
        needed = list(dict.fromkeys([*filter(None, earlier), *self.methods]))
        for name in needed:
            chosen[name], tuning[name] = self._tuned(name, population, chosen)
        experiment: Experiment | None = None
        for name, seed in itertools.product(self.methods, self.seeds):
            config = self._config(name, seed, chosen)
            experiment = build(config, population)
            self._execute(experiment, config, self.folder / "runs" / f"{name}-seed{seed}")
        assert experiment is not None
        write_text(self.folder / "compare.json", json.dumps(self._about(experiment, chosen, tuning), indent=1))
        return self.folder

    def _entry(self, name: str) -> Entry:
        return Entry.of(name, self.entries)

    def _stages(self, name: str, chosen: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        entry = self._entry(name)
        before = self._stages(entry.after, chosen) if entry.after else []
        fixed = {**self.knobs.get(entry.method.name, {}), **self.knobs.get(name, {}), **entry.knobs}
        return [*before, *entry.stages(_merged(fixed, chosen.get(name, {})), self.rounds)]

    def _made(self, name: str, chosen: dict[str, dict[str, Any]]) -> Method:
        """The method of the last stage with its knobs: what travels may depend on them."""
        kind, _, _, knobs = check_stage(self._stages(name, chosen)[-1], f"compare: {name}")
        return METHODS[kind](NO_TASK, **knobs)

    def _config(self, name: str, seed: int, chosen: dict[str, dict[str, Any]]) -> ExperimentConfig:
        return checked(
            {**self.base, "label": name, "seed": seed, "stage": self._stages(name, chosen)}, f"compare: {name}"
        )

    def _tuned(
        self, name: str, population: Population, chosen: dict[str, dict[str, Any]]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The knobs that do best on the validation data of the first seed, and what was tried."""
        grid = self._entry(name).tried(self.grid)
        if not (self.tune and grid):
            return {}, []
        tried = []
        for values in itertools.product(*grid.values()):
            knobs = dict(zip(grid, values))
            config = self._config(name, self.seeds[0], {**chosen, name: knobs})
            path = self.folder / "tuning" / "-".join([name, *(f"{knob}{value}" for knob, value in knobs.items())])
            result = self._execute(build(config, population), config, path, select_only=True)
            tried.append({"knobs": knobs, "validation": result["validation"]})
        usable = [trial for trial in tried if trial["validation"] is not None]
        if not usable:
            raise UserError(
                f"{name}: no setting of {len(tried)} tried has a finite score on validation data. If there are too few "
                "clients or rows to choose on, use --no-tune; if training diverged: are there huge numbers?"
            )
        sign = 1 if self._lower_is_better else -1
        best = min(usable, key=lambda trial: sign * trial["validation"])
        return best["knobs"], tried

    def _execute(
        self, experiment: Experiment, config: ExperimentConfig, path: Path, select_only: bool = False
    ) -> dict[str, Any]:
        self._lower_is_better = experiment.lower_is_better
        if self.stop():  # a method without rounds is never asked inside a run
            raise Interrupted(f"stopped before {path.name}")
        text = to_toml(config)
        if (path / "config.toml").exists() and (path / "config.toml").read_bytes() != text.encode():
            raise UserError(
                f"{path} holds another experiment than the one asked for now; resume with the same options or choose "
                "another folder with --out"
            )
        folder = RunFolder.create(path, text)
        with folder.locked():
            result = Run(
                experiment, folder, self.progress, self.folder / "stages", path.name, select_only, self.how, self.stop
            ).run()
        self.how = EngineChoice(**json.loads((path / "engine.json").read_text()))
        return result

    def _about(self, experiment: Experiment, chosen: dict[str, Any], tuning: dict[str, Any]) -> dict[str, Any]:
        population, split = experiment.population, experiment.split
        about = population.about
        return {
            "format": FORMAT,
            "title": about.get("title", about["name"]),
            "metric": experiment.metric,
            "lower_is_better": experiment.lower_is_better,
            "baseline": "fedavg" if "fedavg" in self.methods else self.methods[0],
            "methods": [
                {
                    **describe(self._made(name, chosen)),
                    "label": name,
                    "title": self._entry(name).title,
                    "stages": self._stages(name, chosen),
                    "chosen": chosen.get(name, {}),
                    "tuning": tuning.get(name, []),
                }
                for name in self.methods
            ],
            "seeds": list(self.seeds),
            "expected": self.expected,
            "accept": self.accept,
            "data": {
                "name": about["name"],
                "title": about.get("title", ""),
                "clients": len(population),
                "examples": population.rows,
                "groups": len(population.groups),
                "features": about.get("features", []),
                "target": about.get("target", ""),
                "task": about["task"],
                "licence": about.get("licence", ""),
                "notes": about.get("notes", []),
            },
            "split": {
                **resolved(self._config(self.methods[0], self.seeds[0], chosen))["split"],
                "train_clients": len(split.train.clients),
                "test_clients": len(split.test.query.clients),
                "train_rows": int(split.train.sizes().sum()),
                "validation_rows": int(split.selection.validation.sizes().sum()),
                "query_rows": int(split.test.query.sizes().sum()),
            },
            "model": {"name": type(experiment.task.network).__name__, "parameters": count(experiment.task.init(0))},
            "engine": {"text": self.how.text() if self.how else ""},
            "cohort": experiment.cohort,
            "command": self.command,
            "versions": {
                "python": platform.python_version(),
                **{p: version(p) for p in ("bespoke-fl", "torch", "numpy")},
            },
        }


def _merged(fixed: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    """Fixed and chosen knobs together; a chosen `server.lr` goes into the table `server`."""
    merged = {k: dict(v) if isinstance(v, dict) else v for k, v in fixed.items()}
    for name, value in chosen.items():
        *parents, last = name.split(".")
        node = merged
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return merged


def describe(method: Method) -> dict[str, Any]:
    """What a method does, what travels, what stays private: read off its declarations."""
    return {
        "name": method.name,
        "title": type(method).__name__,
        "summary": (method.__doc__ or "").strip().splitlines()[0],
        "paper": method.paper,
        "down": method.downlink,
        "travels": {name: reveal.value for name, reveal in method.uplink.items()},
        "reveals": {name: reveal.name for name, reveal in method.uplink.items()},
        "private": method.private,
        "personal": method.personal,
        "unseen": method.unseen,
        "rounds": method.trains,
    }
