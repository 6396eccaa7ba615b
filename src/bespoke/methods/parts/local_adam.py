"""Local training by Adam (Kingma and Ba, 2015), shared by FedPC's methods.

In a round a client takes K steps on batches of its own; what it shares is pulled to the round's start by FedProx's
term. The moments are state that goes in and comes out: those of a shared part begin anew in every round, those of a
private part may stay on the client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bespoke.declarations import Needs, Reveal, Sent
from bespoke.method import Batching, Method, knob
from bespoke.methods.parts.client_optimizer import BETA2, EPS
from bespoke.methods.parts.schedule import SCHEDULE, Schedule
from bespoke.methods.parts.server_optimizer import ServerOptimizer
from bespoke.tensors import Params, Tree, tree_map


def server_adam(lr: float = 0.01) -> ServerOptimizer:
    return ServerOptimizer("adam", lr, beta2=BETA2, eps=EPS)


SERVER = "server optimizer: name, lr and what belongs to it"


@dataclass(frozen=True)
class LocalAdam(Method):
    """K local steps of Adam, and a server optimizer for the clients' mean change."""

    lr: float = knob(0.001, "learning rate of the local Adam", gt=0)
    eps: float = knob(EPS, "epsilon of the local Adam: a slope far below it moves nothing", gt=0)
    steps: int = knob(10, "local steps per round", ge=2)
    batch_size: int = knob(15, "texts of a step", ge=1)
    mu: float = knob(1.0, "strength of the pull of what is shared to the round's start (FedProx)", ge=0)
    schedule: Schedule = field(default_factory=Schedule, metadata={"doc": SCHEDULE})
    tokens: int = knob(1, "embeddings of the prefix before a text", ge=1)
    server: ServerOptimizer = field(default_factory=server_adam, metadata={"doc": SERVER})

    needs = Needs(still=True)

    @property
    def uplink(self) -> dict[str, Sent]:
        return {"delta": Sent(Reveal.SUM, change="weight"), "weight": Sent(Reveal.COUNT)}

    def batching(self) -> Batching:
        return Batching(self.batch_size, steps=self.steps)

    def begun(self, params: Params) -> Params:
        """The parameters at the start, with as many embeddings in a prefix as are wanted."""
        prefix = params.get("prefix")
        if prefix is None or prefix.shape[-2] == self.tokens:
            return params
        return {**params, "prefix": prefix[..., :1, :].expand(*prefix.shape[:-2], self.tokens, -1).clone()}

    def slope(self, loss: Any, params: Params) -> Params:
        return self.task.slopes(lambda p: (loss(p),), params)[0]


def pulled(slope: Tree, params: Tree, start: Tree, mu: float) -> Tree:
    """The slope with FedProx's term: mu (params - start)."""
    return tree_map(lambda g, p, s: g + mu * (p - s), slope, params, start)
