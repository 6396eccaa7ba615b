"""What a site keeps on its disk: the private state of each checkpoint, and the personal models of finished runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.data.standardize import client_scaling
from bespoke.deploy.export import client_folder, write_personal
from bespoke.digests import read_json, sealed
from bespoke.experiment.choosing import Chosen
from bespoke.experiment.experiment import Experiment
from bespoke.experiment.prepare import Prepared
from bespoke.federation.host import Host
from bespoke.federation.segments import read_segment
from bespoke.storage import write_text
from bespoke.tensors import take

Ints = NDArray[np.int64]
LAST = 4  # points of which files are kept: a hub goes back to its last two checkpoints


class Points:
    """Which files of private state belong to which checkpoint of a run.

    A hub that goes back to a checkpoint says which points have led to it. What was saved since is not loaded again, and
    a site that was away takes the newest of these points that it has.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.run = folder, run
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "points.json"
        self.files: dict[str, list[str]] = {}
        if self.path.exists():
            self.files = read_json(self.path, "the private state of this site is lost; begin a new run")["points"]

    def add(self, point: str, names: Sequence[str]) -> None:
        """A checkpoint's files, all of them written before."""
        self.files = {**{name: files for name, files in self.files.items() if name != point}, point: list(names)}
        self._settle()

    def back_to(self, points: Sequence[str]) -> list[str]:
        """The files of the newest of these points; what belongs to none of them is forgotten."""
        self.files = {name: files for name, files in self.files.items() if name in points}
        newest = max(self.files, key=points.index, default=None)
        names = [] if newest is None else self.files[newest]
        for name in names:
            read_segment(self.folder / name, verify=True, run=self.run)
        self._settle()
        return names

    def _settle(self) -> None:
        self.files = dict(list(self.files.items())[-LAST:])
        write_text(self.path, json.dumps(sealed({"run": self.run, "points": self.files})))
        stood_on = {name for files in self.files.values() for name in files}
        for path in self.folder.glob("*.safetensors"):
            if path.name not in stood_on:
                path.unlink()


def keep_models(
    host: Host, experiment: Experiment, prepared: Prepared, asked: dict[str, Any], clients: Ints, picked: Chosen,
    folder: Path,
) -> int:  # fmt: skip
    """Write the personal model of each of these clients; returns how many there are."""
    made: list[str] = []
    folder.mkdir(parents=True, exist_ok=True)
    how, given = prepared.scales
    for place, client in enumerate(clients.tolist()):
        candidate = int(picked.of(np.array([client]))[0])
        own = None if asked["own"] is None else take(asked["own"], slice(place, place + 1))
        rows = None if asked["rows"] is None else asked["rows"][place : place + 1]
        model = host.personal(asked["shared"], own, client, asked["support"], candidate, asked["key"], rows)
        name = experiment.population.ids[client]
        scaling = client_scaling(prepared.plain, experiment.split.train, how, client, given)
        where = client_folder(folder, name)
        stage = experiment.config["stage"][-1]
        write_personal(
            where, experiment, stage, name, model, experiment.stages[-1].method.candidates()[candidate], scaling
        )
        made.append(where.name)
    about: dict[str, Any] = {"models": made, "method": experiment.label}
    write_text(folder / "models.json", json.dumps(sealed(about)))
    return len(made)
