"""A host's task: what its clients do in a stage, and how it executes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bespoke.data.splits import Train
from bespoke.declarations import changes
from bespoke.federation.held import Collusion
from bespoke.federation.roster import Roster
from bespoke.messages.robust.exchange import Rule
from bespoke.messages.secure.settings import SecureConfig
from bespoke.messages.transform import Transform
from bespoke.method import Method, Setting
from bespoke.plain import TomlTable
from bespoke.task import Gradient, Precision
from bespoke.tensors import Params, Tree, take


@dataclass(frozen=True)
class Mode:
    """How a host executes clients: one at a time, or `chunk` of them vectorized."""

    vectorized: bool
    chunk: int = 32
    threads: int = 1
    gradient: Gradient = "autograd"
    precision: Precision = "float32"
    device: str = "cpu"


@dataclass(frozen=True)
class Described:
    """An experiment's configuration as JSON, and the number of a stage."""

    config: TomlTable
    stage: int


@dataclass(frozen=True)
class ClientWork:
    """What clients do in a stage: the method, the transforms of its messages, and the training rows."""

    method: Method
    train: Train
    transforms: tuple[Transform, ...] = ()
    setting: Setting | None = None  # of the stage; None: that of the population alone
    robust: Rule | None = None  # how changes are aggregated, if not by their sum
    collusion: Collusion | None = None
    secure: SecureConfig | None = None  # messages are masked; the server learns their sum only
    described: Described | None = None  # the stage in plain values, if it has such a description
    sample: Tree | None = None  # what a client receives in a first round; None: hosts make it

    def __post_init__(self) -> None:
        for transform in self.transforms if self.method.trains else ():
            transform.check(self.method)

    def before(self, roster: Roster) -> Setting:
        """The server's knowledge before the first round."""
        if self.setting is not None:
            return self.setting
        groups = roster.group_numbers()
        known = torch.zeros(len(roster)) if groups is None else torch.from_numpy(groups)
        return Setting(0, len(roster), len(self.train.clients), known)

    def first_sent(self, params: Params, roster: Roster, client: int) -> Tree:
        """What this client receives in a first round."""
        server = self.method.init_server(params, self.before(roster))
        shared = self.method.broadcast(server)
        shared = shared if self.method.groups(server) is None else take(shared, 0)
        return {**shared, **self.method.unicast(server, client)}

    @property
    def holds(self) -> bool:
        """Whether messages stay on the hosts until the server asks for them."""
        return (self.robust is not None or self.collusion is not None) and bool(changes(self.method.uplink))

    @property
    def masks(self) -> bool:
        """Whether messages leave their host masked only."""
        return self.secure is not None and self.method.trains and bool(self.method.uplink)

    @property
    def remembers(self) -> bool:
        """Whether clients keep state of transforms besides the method's state."""
        return self.method.trains and any(transform.remembers for transform in self.transforms)
