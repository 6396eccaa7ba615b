"""FedPC: Silva, Tambwekar, Gombolay, FedPC: Federated Learning for Language Generation with Personal and Context
Preference Embeddings, 2022.

A frozen language model reads a preference embedding before every text: the element-wise product psi_d * phi_c of the
user's (psi_d, which never leaves client d) and the context's (phi_c, shared). In a round client d takes K steps of Adam
on psi_d and on its copy of phi, which FedProx's term pulls to phi, and sends the change of phi (Algorithm 1; theta is
frozen). The server adds the mean change: of phi_c over the clients that used context c, or over all D of them
(`average = "all"`, lines 17 and 18 of the algorithm).

A new user begins with psi_0 (`newcomers = "shared"`): one of every `anybody_every` steps is taken with psi_0 in place
of psi_d, and its change travels with that of phi. The paper begins with the noisy average of all psi_d (`newcomers =
"average"`), for which their sum has to leave the clients.

A task whose parameters are no prefix has one context: psi_d and phi then have the form of all of its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bespoke.declarations import Card, Choosing, Handoff, Nothing, Observed, Reveal, Sent
from bespoke.method import Batches, Batching, Cohort, Setting, knob
from bespoke.methods.parts.client_optimizer import adam_start, adam_step
from bespoke.methods.parts.contexts import AVERAGE, Average, occurring, spread, step_contexts, used_by
from bespoke.methods.parts.local_adam import LocalAdam, pulled
from bespoke.methods.parts.schedule import at
from bespoke.tensors import Params, Tree, count, scale, subtract, tree_map, zeros_like


@dataclass(frozen=True)
class FedPC(LocalAdam):
    """A user's private embedding times a context's shared one, before the texts of a frozen language model."""

    average: Average = knob("used", AVERAGE)
    newcomers: Literal["shared", "average"] = knob(
        "shared", "a new user begins with a shared embedding learned with the rest, or the noisy average of all users'"
    )
    anybody_every: int = knob(5, "shared: of so many local steps the first is taken as anybody, not as the user", ge=2)
    noise: float = knob(0.01, "average: standard deviation of the noise that a user's embedding begins with", ge=0)
    tune_steps: int = knob(15, "local steps on its own texts by which a client tunes user and context at the end", ge=1)

    card = Card(
        "fedpc",
        "Silva et al., FedPC, 2022",
        personal="the product of its own embedding and the contexts', both tuned on its own texts",
        unseen="a client that never trained begins with the embedding of a new user, the shared psi_0 or the noisy "
        "average of all users' (newcomers), and tunes it on its own texts",
        tunes={"lr": (0.0003, 0.001, 0.003)},
    )
    private = {"user": "the user's embedding psi", "moments": "Adam's moments of it"}
    handoff = Handoff(Nothing())  # an embedding for each context, which no other method knows of
    choosing = Choosing(keep_shared=False)

    @property
    def uplink(self) -> dict[str, Sent]:
        users = {"users": Sent(Reveal.SUM)} if self.newcomers == "average" else {}
        shared = super().uplink
        return {"delta": shared["delta"], "uses": Sent(Reveal.SUM), **users, "weight": shared["weight"]}

    @property
    def downlink(self) -> dict[str, str]:
        which = "psi_0" if self.newcomers == "shared" else "the average of the users'"
        return {"params": f"the contexts' embeddings phi, and that of a new user: {which}"}

    # -- the server ----------------------------------------------------------------------------------------------------
    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        begun = self.begun(params)
        held = {"contexts": spread(self.task, begun), "anybody": tree_map(torch.ones_like, begun)}
        return {"params": held, "optimizer": {part: self.server.init(held[part]) for part in held}}

    def params(self, server: Tree) -> Params:
        return product(server["params"]["anybody"], server["params"]["contexts"])

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        sums, held, optimizer = cohort.sums, server["params"], server["optimizer"]
        uses, weight = sums["uses"], sums["weight"]
        contexts, state = step_contexts(
            self.server, optimizer["contexts"], held["contexts"], sums["delta"]["contexts"], uses, weight, self.average
        )
        if self.newcomers == "average":
            anybody, other = scale(sums["users"], weight.reciprocal()), optimizer["anybody"]
        else:
            mean = scale(sums["delta"]["anybody"], weight.reciprocal())
            anybody, other = self.server.step(optimizer["anybody"], held["anybody"], mean)
        params = {"contexts": contexts, "anybody": anybody}
        return {"params": params, "optimizer": {"contexts": state, "anybody": other}}

    def observe(self, server: Tree, cohort: Cohort) -> Observed:
        return used_by(cohort.sums["uses"])

    # -- the client ----------------------------------------------------------------------------------------------------
    def init_private(self, params: Params) -> Tree:
        begun = self.begun(params)
        return {"user": zeros_like(begun), "moments": adam_start(begun)}

    def user(self, down: Tree, private: Tree, batches: Batches) -> Params:
        """The client's embedding; before its first step it is what a new user has."""
        start, known = down["params"]["anybody"], private["moments"]["time"] > 0
        if self.newcomers == "average":
            drawn = batches.chances(count(start), "user").clamp(min=2.0**-25)
            noise = (2 * drawn - 1).erfinv().split([leaf.numel() for leaf in start.values()])
            start = {n: p + self.noise * 2**0.5 * z.reshape(p.shape) for (n, p), z in zip(start.items(), noise)}
        return tree_map(lambda own, new: torch.where(known, own, new), private["user"], start)

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        every = self.anybody_every if self.newcomers == "shared" else 0
        start = {**down["params"], "user": self.user(down, private, batches)}
        held, moments, uses = self.train(start, private["moments"], batches, every)
        parts = ("contexts", "anybody") if every else ("contexts",)
        up = {"delta": {part: subtract(held[part], start[part]) for part in parts}, "uses": uses}
        users = {} if every else {"users": held["user"]}
        kept = {"user": held["user"], "moments": moments}
        return kept, {**up, **users, "weight": torch.ones_like(batches.examples)}

    def train(self, held: Tree, moments: Tree, batches: Batches, every: int = 0) -> tuple[Tree, Tree, Tensor]:
        """Local steps on user and contexts, the first of `every` as anybody; also which contexts occurred."""
        start, states = held, {part: adam_start(held[part]) for part in ("contexts", "anybody")} | {"user": moments}
        uses, lr = torch.zeros(self.task.contexts), self.schedule.of(self.lr, batches)
        for step in range(len(batches)):
            batch, live = batches[step], batches.live(step)
            drawn_for = "anybody" if every and step % every == 0 else "user"

            def loss(p: Params, batch: Params = batch) -> Tensor:
                return self.task.loss(product(*_parted(p)), batch)

            slopes = _parted(self.slope(loss, _joined(held[drawn_for], held["contexts"])))
            for part, slope in zip((drawn_for, "contexts"), slopes):
                if part != "user":
                    slope = pulled(slope, held[part], start[part], self.mu)
                moved, states[part] = adam_step(states[part], held[part], slope, at(lr, step), live, self.eps)
                held = {**held, part: moved}
            uses = torch.maximum(uses, live * occurring(self.task, batch))
        return held, states["user"], uses

    # -- personal models -----------------------------------------------------------------------------------------------
    def support_batching(self) -> Batching:
        return Batching(self.batch_size, steps=self.tune_steps)

    def newcomer(self, down: Tree, private: Tree, support: Batches) -> Tree:
        return {**private, "user": self.user(down, private, support)}

    def candidates(self) -> tuple[str, ...]:
        return ("anybody", "tuned")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        held = down["params"]
        yield product(held["anybody"], held["contexts"])
        tuned, _, _ = self.train({**held, "user": private["user"]}, private["moments"], support)
        yield product(tuned["user"], tuned["contexts"])


def product(user: Params, contexts: Params) -> Params:
    """psi * phi: the model's parameters, a row for each context."""
    return {name: user[name] * leaf for name, leaf in contexts.items()}


def _joined(user: Params, contexts: Params) -> Params:
    return {f"user.{n}": p for n, p in user.items()} | {f"contexts.{n}": p for n, p in contexts.items()}


def _parted(params: Params) -> tuple[Params, Params]:
    user, contexts = (
        {name.removeprefix(part): p for name, p in params.items() if name.startswith(part)}
        for part in ("user.", "contexts.")
    )
    return user, contexts
