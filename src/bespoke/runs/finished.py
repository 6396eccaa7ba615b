"""Opens a finished run and makes its models again from its checkpoint, private state and rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.splits import Part, Support, Train
from bespoke.declarations import One, PerGroup
from bespoke.errors import UserError
from bespoke.experiment.config import ExperimentConfig
from bespoke.experiment.experiment import Experiment
from bespoke.experiment.reading import read_recorded
from bespoke.federation.host import Host
from bespoke.federation.work import ClientWork, Mode
from bespoke.methods.parts.grouped import stacked
from bespoke.randomness import mix
from bespoke.records import ChoicesRecord
from bespoke.runs.folder import RunFolder
from bespoke.tensors import Params, Tree, take, tree_map


def open_run(path: Path) -> tuple[RunFolder, ExperimentConfig]:
    """Opens a finished run, or explains what the folder is instead."""
    if (path / "compare.json").exists() or (path / "runs").is_dir():
        inside = sorted(p.name for p in (path / "runs").glob("*")) if (path / "runs").is_dir() else []
        named = ", ".join(f"{path}/runs/{name}" for name in inside[:6])
        raise UserError(f"{path} is a comparison; name one of its runs: {named or 'there is none yet'}")
    folder = RunFolder.existing(path)
    if folder.result() is None:
        raise UserError(f"{path} is unfinished; go on with: bespoke run ... --resume --out {path}")
    return folder, read_recorded(path)


class Models:
    """The models of a finished run, made again from its checkpoint, private state and rows."""

    def __init__(self, folder: RunFolder, experiment: Experiment) -> None:
        found = folder.final()
        if found is None:
            raise UserError(f"{folder.path} holds no checkpoint")
        self.experiment, self.method = experiment, experiment.stages[-1].method
        self.choices = read_choices(folder.path)
        self.host = Host(experiment.population, Mode(vectorized=False))
        begun = folder.beginning(found.stage).server  # the state of clients that never trained
        start, setting = begun["params"], experiment.setting(found.stage, begun)
        self.host.open(ClientWork(self.method, experiment.split.train, experiment.transforms, setting), start)
        self.start, self.setting = start, setting
        self.host.load_private(folder.path / "private", found.segments)
        self.server = found.server if found.round >= 0 else self.method.init_server(start, setting)
        self.groups = self.method.groups(self.server)

    def adapts(self, client: int) -> bool:
        """Whether this client has rows for making a personal model."""
        return bool(self.experiment.split.test.support.sizes(np.array([client]))[0])

    def personal(self, client: int) -> tuple[Tree, str]:
        """The model this client ended up with, and the name of the candidate."""
        name = self.experiment.population.ids[client]
        if not self.adapts(client):
            raise UserError(f"client {name!r} has no rows to adapt on")
        candidate = self.choices["own"].get(name, self.choices["default"])
        own = tree_map(lambda leaf: leaf[None], self.method.unicast(self.server, client)) or None
        rows = None if self.groups is None else self.groups[[client]].numpy()
        key, support = int(mix("personalize", self.experiment.seed)), self.experiment.split.test.support
        model = self.host.personal(
            self.method.broadcast(self.server), own, client, support, candidate, key, rows
        )  # fmt: skip
        return model, self.method.candidates()[candidate]

    def newcomer(self, rows: Population) -> Tree:
        """The personal model of a client that the run does not know, made by the method on these rows."""
        if self.method.unicast(self.server, 0):
            raise UserError(f"{self.method.card.name} sends each client something of its own: new users have none")
        whole, one = Part(0, (1.0,)), np.zeros(1, np.int64)
        host = Host(rows, Mode(vectorized=False))
        host.open(ClientWork(self.method, Train(rows, one, whole), setting=self.setting), self.start)
        key, group = int(mix("newcomer", self.experiment.seed)), None if self.groups is None else one
        support, candidate = Support(rows, one, whole), self.choices["default"]
        return host.personal(self.method.broadcast(self.server), None, 0, support, candidate, key, group)

    def kept(self, name: str) -> tuple[NDArray[np.int64], Tree]:
        """The clients that have trained, and one field of their private state. Only a simulation can see it."""
        clients = np.array(sorted(self.host.private.slots), dtype=np.int64)
        held = self.host.private.read(clients)
        return clients, (held["method"] if self.host.work.remembers else held)[name]

    def shared(self, group: int = 0) -> Params | None:
        """The network's parameters that a group of clients shares (group 0: all clients); None if there are none.

        If groups have models of their own, row 0 is the model from which they all started.
        """
        trained = any(stage.method.trains and stage.rounds for stage in self.experiment.stages)
        if not trained or self.method.handoff.gives not in (One(), PerGroup()):
            return None
        params = self.method.params(self.server)
        if self.groups is not None:
            return take(params, group)
        return params if group == 0 and not stacked(self.experiment.task, params) else None


def personal_model(folder: RunFolder, experiment: Experiment, client: int) -> tuple[Tree, str]:
    """The model this client ended up with, and the name of the candidate."""
    return Models(folder, experiment).personal(client)


def read_choices(run: Path) -> ChoicesRecord:
    """Reads which candidate clients use: the common one, and the choices of clients that chose for themselves."""
    path = run / "choices.json"
    try:
        choices = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(choices["default"], int) and isinstance(choices["own"], dict):
            read: ChoicesRecord = choices
            return read
        problem: object = "it does not say who uses which model"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = error
    raise UserError(f"{path} is missing or damaged ({problem}); run the experiment again in another folder")
