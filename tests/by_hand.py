"""Rounds of few clients with one weight and one bias, small enough to be checked by hand."""

from __future__ import annotations

import numpy as np
import torch

from bespoke.data.population import Population
from bespoke.data.splits import everything
from bespoke.federation.batches import Orders, SlicedBatches
from bespoke.method import Cohort, Method, Setting
from bespoke.models.networks import Linear
from bespoke.models.task import Regression
from bespoke.tensors import Params, Tree

TASK = Regression(Linear(1))
ZERO = {"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}


def batches_of(x: list[float], y: list[float], made: Method, key: int = 1, support: bool = False) -> SlicedBatches:
    """A client's minibatches in a round, or (`support`) of the rows it adapts on."""
    columns = {"x": torch.tensor(x)[:, None], "y": torch.tensor(y)}
    population = Population.build(columns, np.repeat(["a"], len(x)))
    batching = made.support_batching() if support else made.batching()
    return Orders.draw(everything(population), np.array([0]), batching, key).sliced(0)


def numbers(params: Params) -> tuple[float, float]:
    return params["weight"].item(), params["bias"].item()


def rounds(made: Method, batches: dict[int, SlicedBatches], times: int) -> tuple[Tree, dict[int, Tree]]:
    """Some rounds of these clients by hand: the server's state and everyone's private state."""
    server = made.init_server(ZERO, Setting(0, len(batches)))
    private = {client: made.init_private(ZERO) for client in batches}
    for _ in range(times):
        sent = []
        for client, mine in batches.items():
            down = {**made.broadcast(server), **made.unicast(server, client)}
            private[client], up = made.client_round(down, private[client], mine)
            sent.append(up)
        sums = {n: torch.utils._pytree.tree_map(lambda *a: sum(a), *[up[n] for up in sent]) for n in sent[0]}
        each = {n: torch.utils._pytree.tree_map(lambda *a: torch.stack(a), *[up[n] for up in sent]) for n in sent[0]}
        server = made.server_round(server, Cohort(sums, each, tuple(batches)))
    return server, private
