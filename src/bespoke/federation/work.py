"""What a host is given: what its clients do in a stage, and how it executes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bespoke.data.splits import Train
from bespoke.declarations import changes
from bespoke.federation.held import Collusion
from bespoke.federation.roster import Roster
from bespoke.messages.robust.exchange import Rule
from bespoke.messages.secure.settings import SecureConfig
from bespoke.messages.transform import Transform
from bespoke.method import Method, Setting
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
    """An experiment's configuration as JSON has it, and which of its stages is meant."""

    config: dict[str, Any]
    stage: int


@dataclass(frozen=True)
class ClientWork:
    """What clients do in a stage: the method, what acts on its messages, and the rows they may use."""

    method: Method
    train: Train
    transforms: tuple[Transform, ...] = ()
    setting: Setting | None = None  # of the stage; where nobody knows it, that of the population alone
    robust: Rule | None = None  # how changes become one, if not by their sum
    collusion: Collusion | None = None
    secure: SecureConfig | None = None  # messages are masked, and the server learns their sum alone
    described: Described | None = None  # where it is described in plain values
    sample: Tree | None = None  # what a client is sent in a first round; None: hosts make it, as a server would

    def __post_init__(self) -> None:
        for transform in self.transforms if self.method.trains else ():
            transform.check(self.method)

    def before(self, roster: Roster) -> Setting:
        """What the server knows before the first round."""
        if self.setting is not None:
            return self.setting
        groups = roster.group_numbers()
        known = torch.zeros(len(roster)) if groups is None else torch.from_numpy(groups)
        return Setting(0, len(roster), len(self.train.clients), known)

    def first_sent(self, params: Params, roster: Roster, client: int) -> Tree:
        """What a client of this number is sent in a first round."""
        server = self.method.init_server(params, self.before(roster))
        shared = self.method.broadcast(server)
        shared = shared if self.method.groups(server) is None else take(shared, 0)
        return {**shared, **self.method.unicast(server, client)}

    @property
    def holds(self) -> bool:
        """Whether messages stay with the hosts until the server has said what it wants of them."""
        return bool(changes(self.method.uplink)) and (self.robust is not None or self.collusion is not None)

    @property
    def masks(self) -> bool:
        """Whether messages leave their host masked alone."""
        return self.secure is not None and self.method.trains and bool(self.method.uplink)

    @property
    def remembers(self) -> bool:
        """Whether clients keep something besides what the method keeps."""
        return self.method.trains and any(transform.remembers for transform in self.transforms)
