"""The hub's half: runs an experiment on the sites that are there, as the training loop runs it anywhere.

A leg is a stretch of a run with the same sites. When one of them is lost the leg ends; the next begins at the last
checkpoint with the sites that are there then, if they are enough. Clients of a site that is away do not take part. A
site that is late ends no leg: it is left out of rounds until it has answered (engine.py).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bespoke.deploy.federated.agreement import Agreement, hub_config
from bespoke.deploy.federated.engine import SiteEngine
from bespoke.deploy.federated.repeated import newest_checkpoint, unfinished
from bespoke.deploy.federated.scoring import SiteResults, SiteScoring
from bespoke.errors import RemoteLost, UserError
from bespoke.experiment.build import to_toml
from bespoke.experiment.config import ExperimentConfig
from bespoke.federation.sites import Transport, Wired
from bespoke.federation.wire import LIMIT
from bespoke.records import RunRecord
from bespoke.runs.events import Progress, Silent
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run

MOST_LEGS = 6  # without a new checkpoint in between
LEGS = "federation/legs.jsonl"  # when the run went on, and with which sites


@dataclass
class Hub:
    """An experiment, its folder, and what it takes to go on."""

    config: ExperimentConfig
    path: Path
    expected: tuple[str, ...]  # names of all sites of the project
    min_sites: int = 1
    progress: Progress = field(default_factory=Silent)
    stop: Callable[[], bool] = lambda: False
    limit: int = LIMIT
    after_round: Callable[[int, int], None] = lambda stage, round: None

    def done(self) -> RunRecord | None:
        """The result of a finished run."""
        return RunFolder(self.path).result() if (self.path / "config.toml").exists() else None

    def run(self, connect: Callable[[], Mapping[str, Transport]]) -> RunRecord:
        """Legs until the run is done. `connect`: transports to the sites that are there now, by name.

        Raises RemoteLost when too few sites are left.
        """
        fruitless, point = 0, self._point()
        lost: RemoteLost | None = None
        while True:
            transports = dict(connect())
            if lost is not None and len(transports) < max(self.min_sites, 1):
                raise lost  # whoever carries the messages waits for the sites, and begins the next leg
            try:
                return self.leg(transports)
            except RemoteLost as error:
                lost = error
                self._note({"ended": str(error)})
                fruitless, point = (0, self._point()) if self._point() != point else (fruitless + 1, point)
                if fruitless >= MOST_LEGS:
                    raise
                self.progress.note(f"{error}; going back to the last checkpoint")

    def leg(self, transports: Mapping[str, Transport]) -> RunRecord:
        """One leg: to the end of the run, or until a site is lost."""
        self._enough(transports)
        remotes = {name: Wired(transport, f"site {name}", self.limit) for name, transport in sorted(transports.items())}
        folder = RunFolder.create(self.path, to_toml(hub_config(self.config)))
        with folder.locked():
            done = folder.result()
            if done is not None:
                return done
            agreed = Agreement.read(self.path)
            if agreed is None:
                agreed = Agreement.reached(self.config, remotes, self.progress.note)
                agreed.write(self.path)
                for name in sorted(set(self.expected) - set(remotes)):
                    self.progress.note(f"site {name} is not there; the run begins without it")
            else:
                if unfinished(self.path):
                    self._all_of(agreed, remotes)
                late = [name for name in remotes if name not in agreed.names]
                for name in late:
                    self.progress.note(f"site {name} was not there when the run began; it takes part in the next run")
                    remotes.pop(name)
                self._enough(remotes)
                agreed.check(self.config, remotes)
            leg = secrets.token_hex(6)
            self._note({"leg": leg, "sites": sorted(remotes), "away": sorted(set(agreed.names) - set(remotes))})
            experiment = agreed.experiment(self.config)
            engine = SiteEngine(agreed, remotes, self.path, leg, self.min_sites, self._late)
            scoring: Any = partial(SiteScoring, share_clients=agreed.share_clients)
            return Run(
                experiment, folder, self.progress, how=engine.choice, stop=self.stop, checkpoint_seconds=0.0,
                engine_of=lambda population, choice: engine, scoring_of=scoring, results_of=SiteResults, callbacks=(),
                after_round=self.after_round,
            ).run()  # fmt: skip

    def _all_of(self, agreed: Agreement, sites: Mapping[str, Any]) -> None:
        """A sum over fewer clients than before would show the difference: a round that was about to be added up under
        secure sums is repeated with the sites that it had."""
        away = sorted(set(agreed.names) - set(sites))
        if away:
            raise RemoteLost(
                f"a round under secure sums is repeated with the same sites, and {', '.join(away)} is not there"
            )

    def _late(self, said: dict[str, Any]) -> None:
        self._note(said)
        self.progress.note(f"{', '.join(said['late'])}: late, and left out of round {said['round']}")

    def _point(self) -> str:
        return newest_checkpoint(self.path)

    def _enough(self, sites: Mapping[str, Any]) -> None:
        if len(sites) < max(self.min_sites, 1):
            away = ", ".join(sorted(set(self.expected) - set(sites))) or "none"
            raise UserError(
                f"{len(sites)} of {len(self.expected)} sites are there, and min_sites = {self.min_sites}; not there: "
                f"{away}"
            )

    def _note(self, what: dict[str, Any]) -> None:
        (self.path / LEGS).parent.mkdir(parents=True, exist_ok=True)
        with open(self.path / LEGS, "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S"), **what}) + "\n")
