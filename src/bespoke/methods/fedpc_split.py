"""Split-Learning, the baseline of Silva et al., FedPC, 2022: a last layer for each user and one for each context.

Each user "only updates their own model head and the contexts that they use" (Appendix B). Head U_d never leaves client
d; heads C_c are shared. A text of client d in context c is predicted by both (the paper does not say how): by the mean
of their logits, (U_d + C_c) h / 2, which begins as the pretrained model, or by their sum (`join`). In a round client d
takes K steps of Adam on U_d and on its copies of C, which FedProx's term pulls to C, and sends the change of C; the
server adds a context's mean change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from bespoke.declarations import Observed, Reveal, Sent
from bespoke.method import Batches, Cohort, Setting, knob
from bespoke.methods.parts.contexts import AVERAGE, Average, occurring, spread, step_contexts, used_by
from bespoke.methods.parts.local_head import LocalHead
from bespoke.methods.parts.schedule import at
from bespoke.tensors import Params, Tree, subtract, tree_map


@dataclass(frozen=True)
class FedPCSplit(LocalHead):
    """A user's private last layer and the contexts' shared ones, of a frozen language model."""

    join: Literal["mean", "sum"] = knob("mean", "a text's logits: the mean of the user's and the context's, or the sum")
    average: Average = knob("used", AVERAGE)

    card = replace(
        LocalHead.card,
        name="fedpc-split",
        title="Split-Learning (FedPC)",
        paper="the Split-Learning baseline of Silva et al., FedPC, 2022",
        personal="the user's head and the contexts', tuned on the client's own texts",
        unseen="a client that never trained tunes the pretrained head and the contexts' heads on its own texts",
    )
    downlink = {"params": "the contexts' heads"}
    private = {"user": "the user's head"}

    @property
    def uplink(self) -> dict[str, Sent]:
        shared = super().uplink
        return {"delta": shared["delta"], "uses": Sent(Reveal.SUM), "weight": shared["weight"]}

    # -- the server ----------------------------------------------------------------------------------------------------
    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        contexts = spread(self.task, self.begun(params))
        return {"params": contexts, "optimizer": self.server.init(contexts)}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        change, uses, weight = (cohort.sums[name] for name in ("delta", "uses", "weight"))
        contexts, optimizer = step_contexts(
            self.server, server["optimizer"], server["params"], change, uses, weight, self.average
        )
        return {"params": contexts, "optimizer": optimizer}

    def observe(self, server: Tree, cohort: Cohort) -> Observed:
        return used_by(cohort.sums["uses"])

    # -- the client ----------------------------------------------------------------------------------------------------
    def init_private(self, params: Params) -> Tree:
        return {"user": self.begun(params)}

    @property
    def part(self) -> float:
        """What logits of the user and of the context are times."""
        return 0.5 if self.join == "mean" else 1.0

    def joined(self, user: Params, contexts: Params) -> Params:
        """The one head by which texts of each context are predicted: the last layer is linear."""
        return {n: torch.lerp(user[n], c, 0.5) if self.join == "mean" else user[n] + c for n, c in contexts.items()}

    def train(self, user: Params, shared: Params, batches: Batches) -> tuple[Params, Params, Tensor]:
        """User and contexts after a step on every batch; also which contexts occurred.

        A client computed by itself has copies of those contexts alone that its texts have: the others stay as they are.
        """
        some = self._own_contexts(batches)
        start = shared if some is None else {n: leaf[some] for n, leaf in shared.items()}
        (user, moments), (contexts, states) = self.own(user), self.own(start)
        uses, lr = torch.zeros(self.task.contexts), self.schedule.of(self.lr, batches)
        for step in range(len(batches)):
            batch, live = batches[step], batches.live(step)
            uses = torch.maximum(uses, live * occurring(self.task, batch))
            if some is not None:
                batch = {**batch, "context": torch.searchsorted(some, batch["context"].long())}
            slope = self.task.gradient(self.joined(user, contexts), batch)
            slope = tree_map(lambda g: g.mul_(self.part) if self.plain else g * self.part, slope)
            together = {n: g.sum(0, keepdim=True) if g.shape[0] > user[n].shape[0] else g for n, g in slope.items()}
            user, moments = self.step(moments, user, together, user, 0.0, live, at(lr, step))
            contexts, states = self.step(states, contexts, slope, start, self.mu, live, at(lr, step))
        if some is not None:
            contexts = {n: leaf.index_copy(0, some, contexts[n]) for n, leaf in shared.items()}
        return user, contexts, uses

    def _own_contexts(self, batches: Batches) -> Tensor | None:
        """The contexts of a client's texts; None for all, where clients are computed together or there is but one."""
        if not self.plain or self.task.contexts == 1:
            return None
        return occurring(self.task, batches.rows()).nonzero()[:, 0]

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        user, contexts, uses = self.train(private["user"], down["params"], batches)
        up = {"delta": subtract(contexts, down["params"]), "uses": uses, "weight": torch.ones_like(batches.examples)}
        return {"user": user}, up

    # -- personal models -----------------------------------------------------------------------------------------------
    def candidates(self) -> tuple[str, ...]:
        return ("contexts", "tuned")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        yield down["params"]
        user, contexts, _ = self.train(private["user"], down["params"], support)
        yield self.joined(user, contexts)
