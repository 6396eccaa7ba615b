"""Layers that stay on each client, whatever the method: FedBN's rule for normalization.

A client's functions see the whole model: the host inserts the client's layers into what it receives, and removes them
from what it sends. The layers are in a table beside the methods' private state, and the next stage keeps them. Their
new values follow from the change that the client sends. So a method has to send one shared model's change, alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from bespoke.declarations import One, PerGroup, changes
from bespoke.errors import UserError
from bespoke.federation.private_state import PrivateTable
from bespoke.method import Method
from bespoke.tensors import Params, Tree, take

SUFFIX = "-layers"  # of the files that hold them, beside those of private state


def check_layers(method: Method, where: str) -> None:
    """Refuses a method whose messages do not contain the change of a client's layers."""
    changed = changes(method.uplink)
    fine = set(method.uplink) == {*changed, *changed.values()} - {""} and len(changed) <= 1
    fine = fine and not any(sent.rows for sent in method.uplink.values())
    fine = fine and method.handoff.gives in (One(), PerGroup())
    if not fine or (method.trains and not changed):
        raise UserError(
            f"{where}: {method.card.name} sends more of a model than one change, or has several models, and layers "
            "that stay on each client (buffers='private') do not go with that; use buffers='average' or 'frozen', or "
            "another method, such as fedavg, fedprox, ditto, mr-mtl, fedrep or finetune"
        )


class LocalLayers:
    """The layers of a host's clients."""

    def __init__(self, start: Params) -> None:
        self.start = start
        self.table = PrivateTable(start)

    def whole(self, params: Params) -> Params:
        """A model with the initial layers of clients."""
        return {**params, **self.start}

    def of(self, client: int) -> Params:
        """A client's layers, or the initial ones."""
        found: Params = take(self.table.read([client]), 0)
        return found

    def holds(self, client: int) -> bool:
        return bool(self.table.holds(np.array([client]))[0])

    @staticmethod
    def into(down: Tree, layers: Params) -> Tree:
        """What a client receives, with its layers inserted."""
        return {**down, "params": {**down["params"], **layers}} if "params" in down else down

    @staticmethod
    def out_of(up: Tree, layers: Params, method: Method) -> tuple[Tree, Params]:
        """A client's message without its layers, and the layers after training."""
        after = dict(layers)
        for name, times in changes(method.uplink).items():
            weight = up[times] if times else torch.ones(())
            moved = {layer: change for layer, change in up[name].items() if layer in layers}
            after |= {layer: layers[layer] + change / weight for layer, change in moved.items()}
            up = {**up, name: {layer: change for layer, change in up[name].items() if layer not in layers}}
        return up, after

    def write(self, clients: Iterable[int], layers: Tree) -> None:
        self.table.write(clients, layers)
