"""What a host is given: what its clients do in a stage, and how it executes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bespoke.data.population import Population
from bespoke.data.splits import Train
from bespoke.declarations import changes
from bespoke.federation.held import Collusion
from bespoke.messages.robust.exchange import Rule
from bespoke.messages.secure.settings import SecureConfig
from bespoke.messages.transform import Transform
from bespoke.method import Method, Setting
from bespoke.task import Gradient, Precision


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
class ClientWork:
    """What clients do in a stage: the method, what acts on its messages, and the rows they may use."""

    method: Method
    train: Train
    transforms: tuple[Transform, ...] = ()
    setting: Setting | None = None  # of the stage; where nobody knows it, that of the population alone
    robust: Rule | None = None  # how changes become one, if not by their sum
    collusion: Collusion | None = None
    secure: SecureConfig | None = None  # messages are masked, and the server learns their sum alone

    def __post_init__(self) -> None:
        for transform in self.transforms if self.method.trains else ():
            transform.check(self.method)

    def before(self, population: Population) -> Setting:
        """What the server knows before the first round."""
        groups = population.group_numbers()
        known = torch.zeros(len(population)) if groups is None else torch.from_numpy(groups)
        return self.setting or Setting(0, len(population), len(self.train.clients), known)

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
