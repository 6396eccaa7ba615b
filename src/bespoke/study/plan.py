"""The plan of a comparison: the configuration of each method with given knobs, what is tried, and in which order."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bespoke.experiment.checks import checked
from bespoke.experiment.config import ExperimentConfig
from bespoke.experiment.fits import check_stages_fit
from bespoke.experiment.search_space import Space, grid, merged, probes, read_space
from bespoke.experiment.stage import StageSettings, stages_of
from bespoke.experiment.variants import Entry
from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.plain import ByMethod, TomlTable

NO_TASK: Any = None  # for methods that are only described


@dataclass(frozen=True)
class ComparisonPlan:
    """Methods times seeds; `chosen` are knobs by method, in addition to the fixed ones."""

    base: TomlTable  # an experiment without stages
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    rounds: int | Literal["auto"]
    knobs: ByMethod  # fixed
    grid: ByMethod | None  # values to try; None: nothing is tuned
    entries: ByMethod  # methods in settings, by label: see variants.py
    follows: dict[str, str]  # the method whose model a method starts from, where it is not the one on its card
    tune_seeds: tuple[int, ...] = ()  # default: the first seed
    validated: dict[str, ExperimentConfig] = field(default_factory=dict)  # each configuration is validated once

    def entry(self, name: str) -> Entry:
        entry = Entry.of(name, self.entries)
        follows = self.follows.get(name) or self.follows.get(entry.named)
        return replace(entry, follows=follows) if follows and entry.before is None and not entry.follows else entry

    def needed(self) -> list[str]:
        """The compared entries, preceded by all entries whose models they start from."""
        lineages = [self.lineage(name) for name in self.methods]
        return list(dict.fromkeys([*(name for lineage in lineages for name in lineage[:-1]), *self.methods]))

    def lineage(self, name: str) -> list[str]:
        """The entries that this one starts from, in order, itself last."""
        after = self.entry(name).after
        return [*(self.lineage(after) if after else []), name]

    def space(self, name: str) -> Space:
        """The search space of an entry; empty if nothing is tuned."""
        if self.grid is None:
            return {}
        exact = self.knobs.get(name, {}).get("solver") == "exact"
        tried = self.entry(name).tried(self.grid, exact)
        return read_space({k: list(v) if isinstance(v, tuple) else v for k, v in tried.items()}, f"grid.{name}")

    def check(self) -> None:
        """Refuses knobs, values and stages that do not fit, before any data are loaded."""
        for name in self.needed():
            for probe in ({}, *probes(self.space(name))):
                config = self.config(name, self.seeds[0], {name: probe})
                check_stages_fit([bare(stage) for stage in stages_of(config)])

    def stages(self, name: str, chosen: ByMethod) -> list[TomlTable]:
        entry = self.entry(name)
        before = self.stages(entry.after, chosen) if entry.after else []
        fixed = {**self.knobs.get(entry.named, {}), **self.knobs.get(name, {}), **entry.knobs}
        return [*before, *entry.stages(merged(fixed, chosen.get(name, {})), self.rounds)]

    def config(self, name: str, seed: int, chosen: ByMethod) -> ExperimentConfig:
        raw = {**self.base, "label": name, "seed": seed, "stage": self.stages(name, chosen)}
        key = json.dumps(raw, sort_keys=True, default=repr)
        if key not in self.validated:  # each is checked once
            self.validated[key] = checked(raw, f"compare: {name}")
        return self.validated[key]

    def first(self, name: str) -> ExperimentConfig:
        """A method's first trial, or its run if it has none; its ancestors as in their first trials."""
        spaces = {other: self.space(other) for other in self.lineage(name)}
        tried = {other: grid(space)[0] for other, space in spaces.items() if space}
        return self.config(name, (self.tune_seeds or self.seeds)[0] if spaces[name] else self.seeds[0], tried)


def bare(stage: StageSettings) -> Method:
    """The method of a stage with its knobs, on which its declarations may depend."""
    return METHODS[stage.method](NO_TASK, **stage.knobs)
