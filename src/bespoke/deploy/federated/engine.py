"""An engine of sites: clients of sites that are away do not take part; private state and scores stay where they are.

A site that is late is left out of its round and asked again when its answer has come, which is not used. Its clients'
private state is then what it was before that round.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.deploy.federated.agreement import Agreement
from bespoke.digests import read_json, sealed
from bespoke.errors import RemoteLost, UserError
from bespoke.experiment.opening import opening_of
from bespoke.federation.calls import Call
from bespoke.federation.engine import Engine, RoundResult
from bespoke.federation.execution import Choice
from bespoke.federation.opening import Opening
from bespoke.federation.remote import Remote
from bespoke.federation.roster import Roster
from bespoke.federation.sites import Numbered, Wired
from bespoke.federation.work import ClientWork
from bespoke.messages.transform import State
from bespoke.storage import write_text
from bespoke.tensors import Params, Tree, take

Ints = NDArray[np.int64]
POINTS = "federation/points.json"
AWAY = -1  # the home of a client whose site is not there
BY_SITES = Choice(False, 1, 0, 1, "autograd", "as each site chooses")


class SiteEngine(Engine):
    """`sites`: those that are there, by name; `leg`: a name of this stretch of the run, which no other has.

    `min_sites`: a round that fewer sites have answered is not used. `note`: told who was late, and in which round.
    """

    def __init__(
        self, agreed: Agreement, sites: Mapping[str, Wired], folder: Path, leg: str, min_sites: int = 1,
        note: Callable[[dict[str, Any]], None] = lambda said: None,
    ) -> None:  # fmt: skip
        met = agreed.met()
        self.there = [name for name in agreed.names if name in sites]
        where = [self.there.index(name) if name in sites else AWAY for name in agreed.names]

        def describe(work: ClientWork, params: Params, roster: Roster) -> Opening:
            return replace(opening_of(work, params, roster), learned=agreed.learned)

        remotes: list[Remote] = [
            Numbered(sites[name], met.numbers[place], met.roster, describe)
            for place, name in enumerate(agreed.names)
            if name in sites
        ]
        super().__init__(met.roster, BY_SITES, remotes, np.array(where, np.int64)[met.homes])
        self.run, self.leg, self.points = agreed.id, leg, Points(folder / POINTS)
        self.folder, self.min_sites, self.note = folder, min_sites, note
        self.wires = [sites[name] for name in self.there]
        self.untold: set[int] = set()  # places that were behind when clients were introduced to each other

    def open(self, work: ClientWork, params: Params) -> None:
        if work.secure is not None and self.sums is None:
            from bespoke.deploy.federated.sums import SiteSums  # needs cryptography, an extra

            # clients answer no number twice, whatever leg or run it is of
            self.sums = SiteSums(work.secure, self.roster.keys, rounds=int(time.time() * 1000), run=self.folder)
        super().open(work, params)
        # whether a round has a sum at all is not to depend on who is late: the privacy account does not hold that
        self.patient = work.masks and any(transform.hides for transform in work.transforms)

    def present(self, clients: Ints) -> Ints:
        """Those of these clients whose site is there, and not still busy with an earlier round."""
        assert self.homes is not None
        there: Ints = clients[np.isin(self.homes[clients], self._in_time)]
        return there

    def wait_for_all(self) -> None:
        """Until the sites that were late have answered; raises RemoteLost if one does not."""
        for place in sorted(self.behind):
            self._catch_up(place)

    def _catch_up(self, place: int) -> None:
        super()._catch_up(place)
        if place in self.untold:
            self.untold.discard(place)
            self._secure("directory", {0: self.sums.introduced})

    def _shares(self, clients: Ints, weight: Any) -> list[Ints]:
        home = self.home(clients)
        return [np.flatnonzero(home == place) for place in range(len(self.remotes))]

    # -- a round -----------------------------------------------------------------------------------------------------
    def round(
        self, server: Tree, clients: Ints, key: int, next_clients: Ints | None = None, state: State | None = None,
        number: int = 0, contacted: Ints | None = None,
    ) -> RoundResult:  # fmt: skip
        for place in sorted(self.behind):
            if self.wires[place].ready():
                self._catch_up(place)
        if self.sums is not None:
            self.sums.begin(key)
        everyone, before = None if contacted is None else self.present(contacted), set(self.behind)
        found = super().round(server, self.present(clients), key, None, state, number, everyone)
        if late := sorted(self.there[place] for place in self.behind - before):
            self.note({"late": late, "round": number})
        return found

    def _without_late(self, asked: list[int], key: int) -> list[int]:
        if len(self._in_time) < self.min_sites:
            many = f"{len(self._in_time)} of {len(self.there)} sites"
            raise RemoteLost(f"{many} have answered in time, and min_sites = {self.min_sites}")
        return super()._without_late(asked, key)

    def _secure(self, step: str, messages: dict[int, Any]) -> dict[int, Any]:
        if step == "directory":
            self.untold |= self.behind
        return super()._secure(step, messages)

    # -- scores that stay --------------------------------------------------------------------------------------------
    def score(self, server: Tree, clients: Ints, name: str, key: int) -> None:
        """Every site that is not behind makes and scores the personal models of its clients."""
        method, clients = self.work.method, self.present(clients)
        shared, own, rows = method.broadcast(server), self._own(server, clients), self._rows(server, clients)
        self._settle()
        values = {"shared": shared, "name": name, "key": key}
        self.scoring = [place for place, share in enumerate(self._shares(clients, None)) if len(share)]
        shares = self._shares(clients, None)
        self._ask({
            place: Call("score", {
                **values, "own": own if not own else take(own, torch.from_numpy(shares[place])),
                "clients": clients[shares[place]], "rows": None if rows is None else rows[shares[place]],
            })
            for place in self.scoring
        })  # fmt: skip

    def statistics(self, request: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """What each site says of the scores that it made, by place."""
        answers: dict[int, dict[str, Any]] = self._ask(
            {place: Call("statistics", {"request": request}) for place in self.scoring}
        )
        return answers

    def keep(self, request: dict[str, Any]) -> None:
        """Every site makes the chosen personal models of its clients and keeps them."""
        self._ask({place: Call("keep", {"request": request}) for place in self.scoring})

    def numbers(self, place: int, clients: Sequence[int]) -> Ints:
        """Clients that a site names by its own numbers."""
        remote: Any = self.remotes[place]
        found = np.array(clients, np.int64)
        if len(found) and not 0 <= found.min() <= found.max() < len(remote.numbers):
            raise UserError(f"{remote.name} answered for clients that it does not have")
        numbers: Ints = remote.numbers[found]
        return numbers

    # -- private state -----------------------------------------------------------------------------------------------
    def save_private(self, folder: Path, name: str, only_dirty: bool = True, run: str = "") -> list[str]:
        """Every site writes its own clients' state; its files are named by this point and this leg."""
        if not self.stateful:
            return []
        super().save_private(Path(), f"{name}@{self.leg}", only_dirty, self.run)
        self.points.add(f"{name}@{self.leg}")
        return []

    def kept_layers(self, point: str = "") -> list[str]:
        if self.layered:
            super().kept_layers(f"{point}@{self.leg}")
            self.points.add(f"{point}@{self.leg}")
        return []

    def load_private(self, paths: Sequence[Path], point: str = "") -> None:
        """Every site goes back to the newest state that it has of the points which have led to this one."""
        if not self.stateful:
            return
        self._settle()
        values = {"folder": "", "names": self.points.up_to(point), "share": None, "point": self.run}
        self._ask({place: Call("load_private", values) for place in range(len(self.remotes))})


class Points:
    """The checkpoints that have led to where a run stands, with the leg in which each was made, first to last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.points: list[str] = []
        if path.exists():
            self.points = read_json(path, "begin a new run in another folder")["points"]

    def add(self, point: str) -> None:
        self._write([*(known for known in self.points if known != point), point])

    def up_to(self, point: str) -> list[str]:
        """Those before this one and itself; what came after it did not happen."""
        self._write([known for known in self.points if _order(known) <= _order(point)])
        return self.points

    def _write(self, points: list[str]) -> None:
        self.points = points
        write_text(self.path, json.dumps(sealed({"points": points})))


def _order(point: str) -> tuple[int, int]:
    """Where a point lies in the run: "stage-round@leg", or "stage-begin@leg"."""
    stage, _, number = point.partition("@")[0].partition("-")
    return int(stage), -1 if number == "begin" else int(number)
