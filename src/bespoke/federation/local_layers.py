"""Layers that stay on each client, whatever the method: FedBN's rule for normalization.

A client's functions see the whole model: its own layers are put into what it was sent, and taken out of what it sends.
They lie in a table beside the private state of methods, which a stage hands on to the next. What a client's training
made of them is read off the change that it sends, so a method has to send one shared model's change and nothing else.
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
    """Refuse a method whose messages do not say what became of a client's layers."""
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
        """A model with the layers that a client begins with."""
        return {**params, **self.start}

    def of(self, client: int) -> Params:
        """A client's own, or what all begin with."""
        found: Params = take(self.table.read([client]), 0)
        return found

    def holds(self, client: int) -> bool:
        return bool(self.table.holds(np.array([client]))[0])

    @staticmethod
    def into(down: Tree, layers: Params) -> Tree:
        """What a client was sent, its layers in place."""
        return {**down, "params": {**down["params"], **layers}} if "params" in down else down

    @staticmethod
    def out_of(up: Tree, layers: Params, method: Method) -> tuple[Tree, Params]:
        """A client's message without its layers, and what training made of these."""
        after = dict(layers)
        for name, times in changes(method.uplink).items():
            weight = up[times] if times else torch.ones(())
            moved = {layer: change for layer, change in up[name].items() if layer in layers}
            after |= {layer: layers[layer] + change / weight for layer, change in moved.items()}
            up = {**up, name: {layer: change for layer, change in up[name].items() if layer not in layers}}
        return up, after

    def write(self, clients: Iterable[int], layers: Tree) -> None:
        self.table.write(clients, layers)
