"""Sites of a federation in this process: every call and every answer goes through the wire, as bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bespoke.data.population import Population
from bespoke.experiment.build import build
from bespoke.experiment.config import ExperimentConfig
from bespoke.experiment.experiment import Experiment
from bespoke.experiment.opening import opening_of, work_of
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.host import Host
from bespoke.federation.opening import Opening
from bespoke.federation.site import Site
from bespoke.federation.sites import Wired, meet
from bespoke.federation.work import ClientWork, Mode


class SiteHost(Host):
    """A host that keeps its private state in a folder of its own, and remembers what was saved under which name."""

    folder: Path
    tells = False  # the other side the names of its files

    def __init__(self, population: Population, mode: Mode) -> None:
        super().__init__(population, mode)
        self.saved: dict[str, list[str]] = {}

    def save_private(self, folder: Any, name: str, only_dirty: bool = True, run: str = "") -> list[str]:
        names = super().save_private(self.folder, name, only_dirty, run)
        self.saved[name.rpartition("-")[0]] = names
        return names if self.tells else []

    def load_private(self, folder: Any, names: Sequence[str], share: Any = None, point: str = "") -> None:
        super().load_private(self.folder, self.saved.get(point, []))


class Loop:
    """A transport to a site of this process; `lose`: which messages' answers are lost, counted from 1."""

    def __init__(self, site: Site, lose: Callable[[int], bool] = lambda _: False) -> None:
        self.site, self.lose = site, lose
        self.sent: list[bytes] = []
        self.received: list[bytes] = []

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def receive(self) -> bytes:
        answer = self.site.answer(self.sent[-1])
        if self.lose(len(self.sent)):
            answer = self.site.answer(self.sent[-1])  # it asks again, as a transport does
        self.received.append(answer)
        return answer

    def ready(self) -> bool:
        return True

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        pass


def site(population: Population, mode: Mode, folder: Path) -> Site:
    """A site with these clients, which builds the experiment that it is told of on its own rows."""
    built: dict[str, Experiment] = {}

    def work(opening: Opening) -> ClientWork:
        config = ExperimentConfig.model_validate(opening.config)
        key = config.model_dump_json()
        if key not in built:
            built[key] = build(config, population)
        return work_of(opening, built[key])

    host = SiteHost(population, mode)
    host.folder = folder
    return Site(host, work)


def federation(
    populations: Sequence[Population], choice: Choice, folders: Sequence[Path],
    lose: Callable[[int], bool] = lambda _: False,
) -> tuple[Engine, list[Loop]]:  # fmt: skip
    """An engine of a site for each population, and the wires between."""
    sites = [site(population, choice.mode(), folder) for population, folder in zip(populations, folders)]
    loops = [Loop(one, lose) for one in sites]
    met = meet([Wired(loop, f"site {place}") for place, loop in enumerate(loops)], opening_of)
    return Engine(met.roster, choice, met.remotes, met.homes), loops


def split_up(population: Population, sites: int) -> list[Population]:
    """The clients of a population at so many sites, by turns."""
    return [population.only(np.arange(place, len(population), sites)) for place in range(sites)]
