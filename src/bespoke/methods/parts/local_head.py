"""Local training of a frozen language model's last layer, shared by the baselines of FedPC (Silva et al., 2022).

A head has a number for each word and each entry of the representation: millions. One client at a time is trained, in
memory that its steps overwrite. Adam's moments begin anew in every round: kept, they would be two more heads a client.

A task that is no frozen language model is trained as a whole: its parameters take the place of the head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bespoke.declarations import Card, Choosing, Handoff, Nothing
from bespoke.method import Batching, knob
from bespoke.methods.parts.client_optimizer import adam_in_place, adam_start, adam_step
from bespoke.methods.parts.local_adam import SERVER, LocalAdam, pulled, server_adam
from bespoke.methods.parts.server_optimizer import ServerOptimizer
from bespoke.tensors import Params, Tree, tree_map


@dataclass(frozen=True)
class LocalHead(LocalAdam):
    """K local steps of Adam on a last layer, tuned once more at the end."""

    tokens: int = field(default=1, init=False)  # no knob: there is no prefix
    # Adam moves rows of rare words as far as any other: at the prefix's rate of 0.01 one round ruins the head
    server: ServerOptimizer = field(default_factory=lambda: server_adam(0.001), metadata={"doc": SERVER})
    tune_steps: int = knob(15, "local steps on its own texts by which a client tunes its heads at the end", ge=1)

    card = Card(tunes={"lr": (0.0001, 0.0003, 0.001)})
    handoff = Handoff(Nothing())  # a head, of which a method on the prefix knows nothing
    choosing = Choosing(keep_shared=False)

    def __post_init__(self) -> None:
        if self.task is not None:  # a method that is only described has none
            object.__setattr__(self, "task", self.task.with_head())

    def begun(self, params: Params) -> Params:
        """The pretrained head; or the parameters of a task that has none."""
        return self.task.init(0) if self.task.own_head and "head" not in params else params

    @property
    def plain(self) -> bool:
        """Whether a client is computed by itself, so that its tensors may be overwritten."""
        return self.task.how == "autograd"

    def own(self, params: Params) -> tuple[Params, Tree]:
        """Parameters to be trained, and Adam's state: in memory of their own where steps overwrite it."""
        return tree_map(torch.clone, params) if self.plain else params, adam_start(params)

    def step(
        self, state: Tree, params: Params, slope: Params, start: Params, mu: float, live: float | Tensor,
        lr: float | Tensor,
    ) -> tuple[Params, Tree]:  # fmt: skip
        """A step of Adam with FedProx's pull to `start`."""
        if not self.plain:
            return adam_step(state, params, pulled(slope, params, start, mu), lr, live, self.eps)
        adam_in_place(state, params, slope, float(lr), start, mu, self.eps)
        return params, state

    def support_batching(self) -> Batching:
        return Batching(self.batch_size, steps=self.tune_steps)
