"""What the sites of a run have agreed on before anything is trained: versions, schema, clients, means and deviations.

It is written into the run's folder when the run begins (federation/agreement.json), and holds for all of it: a site
that comes back has to bring the same clients.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bespoke import __version__
from bespoke.data.population import Population
from bespoke.data.splits import Split
from bespoke.deploy.federated.place import ALIKE, source_of
from bespoke.digests import digest, read_json, sealed
from bespoke.errors import UserError
from bespoke.experiment.build import build, resolved
from bespoke.experiment.config import DataConfig, ExperimentConfig
from bespoke.experiment.experiment import Experiment
from bespoke.experiment.prepare import Prepared, make_split
from bespoke.federation.calls import Call
from bespoke.federation.remote import Remote
from bespoke.federation.roster import Joined, Roster, joined
from bespoke.federation.sites import learn
from bespoke.federation.wire import VERSION
from bespoke.imported import is_outside
from bespoke.storage import write_text

FILE = "federation/agreement.json"  # in a folder of its own: results do not depend on it
ELSEWHERE = "rows of the sites"  # what stands in the place of a path


def hub_config(config: ExperimentConfig) -> ExperimentConfig:
    """The experiment as the hub runs it: whatever [data] names, the rows are those of the sites."""
    data = DataConfig(population=ELSEWHERE, standardize=config.data.standardize)
    return config.model_copy(update={"data": data, "callbacks": None})


def seen_split(population: Population, config: ExperimentConfig) -> Split:
    """The split as a hub sees it: which clients are in which part, and with how many rows. Which rows these are is seen
    at the sites, whose own splits count."""
    if config.split.order == "time":
        config = config.model_copy(update={"split": config.split.model_copy(update={"order": "stored"})})
    return make_split(population, config)


def made_up(shapes: dict[str, Any], rows: int) -> dict[str, Tensor]:
    """Columns of numbers that nobody has measured, in the form of the sites' rows: a model of one's own is tried on
    some of them before it is trained. Each row is a window on one line of numbers: many rows take little memory."""
    columns = {}
    for name, (kind, shape) in shapes.items():
        dtype, size = getattr(torch, kind), math.prod(shape)
        line = torch.randn(rows + size, generator=torch.Generator().manual_seed(0))
        line = line.to(dtype) if dtype.is_floating_point else torch.zeros(rows + size, dtype=dtype)
        columns[name] = line.as_strided((rows, *shape), (1, *torch.empty(shape, device="meta").stride()))
    return columns


@dataclass(frozen=True)
class Agreement:
    """The sites of a run, by name in the order of their places, and what they have in common."""

    names: tuple[str, ...]
    rosters: tuple[Roster, ...]
    about: dict[str, Any]
    learned: dict[str, Any] | None
    floats: int  # numbers that each site has sent for it
    share_clients: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))  # of the run: sites keep its files under it

    # -- made --------------------------------------------------------------------------------------------------------
    @classmethod
    def reached(cls, config: ExperimentConfig, sites: Mapping[str, Remote], note: Callable[[str], None]) -> Agreement:
        """Ask all sites what they bring, compare it, and learn means and deviations if the rows want them."""
        names = tuple(sorted(sites))
        plain = resolved(hub_config(config))
        said = _ask(sites, Call("describe", {"config": plain, "learned": None}))
        compare(said)
        _check_code(config, names[0], said[names[0]])
        known = _ask(sites, Call("hello"))
        rosters = tuple(known[name] for name in names)
        met, about = joined(rosters, [f"site {name}" for name in names]), said[names[0]]["about"]
        for name in names:
            note(f"site {name}: {said[name]['clients']} clients, sums of {said[name]['least']} or more")
        learned, floats = None, 0
        missing = _missing(config, about, said[names[0]]["statistics"])
        if missing:
            named: Any = {**about, "name": ELSEWHERE}
            split = seen_split(met.roster.population(named), config)
            found, floats = learn([sites[name] for name in names], split.train)
            learned = {name: list(found[name]) for name in missing if name in found}
            said = _ask(sites, Call("describe", {"config": plain, "learned": learned}))
        else:
            said = _ask(sites, Call("describe", {"config": plain, "learned": {}}))
            learned = {}
        compare(said)
        shares = all(said[name]["share_clients"] for name in names)
        return cls(names, rosters, said[names[0]]["about"], learned, floats, shares)

    def check(self, config: ExperimentConfig, sites: Mapping[str, Remote]) -> None:
        """Sites that come back bring what they brought."""
        said = _ask(sites, Call("describe", {"config": resolved(hub_config(config)), "learned": self.learned}))
        for name in sites:
            if name not in self.names:
                raise UserError(f"site {name} was not there when the run began; it takes part in the next run")
            _check_version(name, said[name])
            _check_code(config, name, said[name])
            if said[name]["about"] != self.about:
                raise UserError(f"site {name} brings other columns than when the run began; give it back its schema")
        for name, roster in _ask(sites, Call("hello")).items():
            if _plain(roster) != _plain(self.rosters[self.names.index(name)]):
                raise UserError(
                    f"site {name} brings other clients or rows than when the run began; give it back the table it had, "
                    "or begin a new run"
                )

    # -- as a file ---------------------------------------------------------------------------------------------------
    def write(self, folder: Path) -> None:
        found = {
            "names": list(self.names), "rosters": [_plain(roster) for roster in self.rosters], "about": self.about,
            "learned": self.learned, "floats": self.floats, "share_clients": self.share_clients, "id": self.id,
        }  # fmt: skip
        (folder / FILE).parent.mkdir(exist_ok=True)
        write_text(folder / FILE, json.dumps(sealed(found)))

    @classmethod
    def read(cls, folder: Path) -> Agreement | None:
        if not (folder / FILE).exists():
            return None
        found = read_json(folder / FILE, "begin a new run in another folder")
        rosters = tuple(_roster(plain) for plain in found["rosters"])
        return cls(
            tuple(found["names"]), rosters, found["about"], found["learned"], found["floats"], found["share_clients"],
            found["id"],
        )  # fmt: skip

    # -- used --------------------------------------------------------------------------------------------------------
    def met(self) -> Joined:
        return joined(self.rosters, [f"site {name}" for name in self.names])

    def experiment(self, config: ExperimentConfig) -> Experiment:
        """The experiment on clients of which the hub knows ids, sizes and groups."""
        hub = hub_config(config)
        about: Any = {**self.about, "name": ELSEWHERE, "statistics_floats": self.floats, "asked_floats": self.floats}
        population = self.met().roster.population(about)
        if "shapes" in about:
            population = replace(population, columns=made_up(about["shapes"], population.rows))
        split = seen_split(population, hub)
        return build(hub, prepared=Prepared(population, split, population, ("none", {})))


def compare(said: Mapping[str, dict[str, Any]]) -> None:
    """Refuses sites that differ in version, schema or columns; says which differs from which, and in what."""
    first, *others = sorted(said)
    _check_version(first, said[first])
    for name in others:
        _check_version(name, said[name])
        mine, theirs = said[first], said[name]
        if mine["schema"] != theirs["schema"]:
            differing = sorted({*mine["columns"]} ^ {*theirs["columns"]})
            what = f"the columns {', '.join(differing)}" if differing else "what is declared of a column or the target"
            raise UserError(f"site {name} has another schema than site {first}: {what}; give all sites one schema file")
        for key in ALIKE:
            if mine["about"].get(key) != theirs["about"].get(key):
                raise UserError(
                    f"site {name} and site {first} differ in {key}: {_short(theirs['about'].get(key))} and "
                    f"{_short(mine['about'].get(key))}; give all sites one schema file"
                )
        if mine["statistics"] != theirs["statistics"]:
            raise UserError(f"site {name} and site {first} have other means and deviations in their schemas")


def _check_version(name: str, said: dict[str, Any]) -> None:
    if said["wire"] != VERSION or said["version"] != __version__:
        raise UserError(
            f"site {name} runs bespoke {said['version']} (messages {said['wire']}), and this hub {__version__} "
            f"(messages {VERSION}); install the same release"
        )


def _check_code(config: ExperimentConfig, name: str, said: dict[str, Any]) -> None:
    """A model of one's own has to be the same at the hub and at the sites, which have been compared."""
    model = config.model.name
    if is_outside(model) and said["about"]["code"] != source_of(model):
        raise UserError(
            f"[model] {model!r} at site {name} is another than at this hub: install the same release of its package"
        )


def _missing(config: ExperimentConfig, about: dict[str, Any], known: Mapping[str, Any]) -> list[str]:
    """The columns whose means and deviations the experiment wants, and nobody has declared."""
    advice = about.get("standardize", {"features": "none", "target": False})
    how = config.data.standardize or advice["features"]
    table = about.get("input", "table") == "table"
    numeric = [name for name, number in zip(about.get("features", []), about.get("numeric", [])) if number]
    wanted = numeric if how == "global" and table else []
    wanted = [*wanted, *([about["target"]] if advice["target"] and about.get("task") == "regression" else [])]
    return [name for name in wanted if name not in known]


def _ask(sites: Mapping[str, Remote], call: Call) -> dict[str, Any]:
    for remote in sites.values():
        remote.start(call)
    return {name: remote.finish() for name, remote in sites.items()}


def _plain(roster: Roster) -> dict[str, Any]:
    return {
        "ids": list(map(str, roster.ids)), "keys": [int(key) for key in roster.keys],
        "sizes": [int(size) for size in roster.sizes], "groups": list(map(str, roster.groups)),
        "group": None if roster.group is None else [int(group) for group in roster.group],
    }  # fmt: skip


def _roster(plain: dict[str, Any]) -> Roster:
    group = None if plain["group"] is None else np.array(plain["group"], np.int64)
    keys = np.array(plain["keys"], np.uint64)
    return Roster(plain["ids"], keys, np.array(plain["sizes"], np.int64), group, tuple(plain["groups"]))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({digest(text.encode())[:8]})"
