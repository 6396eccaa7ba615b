"""Meta-Learning, the baseline of Silva et al., FedPC, 2022: one last layer for all, tuned on each client.

"The last layer is unfrozen and all users jointly update this final output layer" (Appendix B), "fine-tuning the shared
model-head on-device" (Section 4). Client d takes K steps of Adam from the shared head W, which FedProx's term pulls
to W, and sends W_d - W; the server adds the mean through its optimizer. At the end a client tunes a copy of W on its
own texts: W is a start from which few steps lead far, as in Reptile (Nichol et al., 2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from bespoke.method import Batches, Cohort, Setting
from bespoke.methods.parts.local_head import LocalHead
from bespoke.methods.parts.schedule import at
from bespoke.tensors import Params, Tree, scale, subtract


@dataclass(frozen=True)
class FedPCMeta(LocalHead):
    """One last layer of a frozen language model for all users and contexts, tuned on each client."""

    card = replace(
        LocalHead.card,
        name="fedpc-meta",
        title="Meta-Learning (FedPC)",
        paper="the Meta-Learning baseline of Silva et al., FedPC, 2022",
        personal="the shared head, tuned on the client's own texts",
        unseen="a client that never trained tunes the shared head on its own texts",
    )
    downlink = {"params": "the shared head"}

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        params = self.begun(params)
        return {"params": params, "optimizer": self.server.init(params)}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        mean = scale(cohort.sums["delta"], cohort.sums["weight"].reciprocal())
        params, optimizer = self.server.step(server["optimizer"], server["params"], mean)
        return {"params": params, "optimizer": optimizer}

    def train(self, start: Params, batches: Batches) -> Params:
        """The head after a step on every batch."""
        (params, state), lr = self.own(start), self.schedule.of(self.lr, batches)
        for step in range(len(batches)):
            slope = self.task.gradient(params, batches[step])
            params, state = self.step(state, params, slope, start, self.mu, batches.live(step), at(lr, step))
        return params

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        delta = subtract(self.train(down["params"], batches), down["params"])
        return private, {"delta": delta, "weight": torch.ones_like(batches.examples)}

    def candidates(self) -> tuple[str, ...]:
        return ("shared", "tuned")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        yield down["params"]
        yield self.train(down["params"], support)
