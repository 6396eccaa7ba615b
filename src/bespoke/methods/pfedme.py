"""pFedMe: Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020.

The shared model w minimises the mean of the clients' Moreau envelopes F_k(w) = min_theta f_k(theta) + (lam / 2)
||theta - w||^2, whose gradient is lam (w - theta_k(w)). On each batch client k takes K steps of rate eta_p to theta and
one of rate eta along that gradient; theta is carried over to the next batch. The server mixes the old model with the
mean of the clients': w <- (1 - beta) w + beta mean_k w_k. In code: K = inner_steps, eta_p = personal_lr, eta = lr,
beta = server.lr. With `solver = "exact"` theta_k(w) is the minimum itself, in the last layer, and a round's step along
the envelope's gradient has the rate 1 / lam: w_k = theta_k(w), so that w settles where it is the mean of the theta_k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bespoke.declarations import Card, Choosing, Needs, stackable, stacks
from bespoke.method import Batches, Batching, knob
from bespoke.methods.parts.client_optimizer import OPTIMIZER, ClientOptimizer
from bespoke.methods.parts.descend import descended
from bespoke.methods.parts.schedule import at
from bespoke.methods.parts.shared_model import SharedModel
from bespoke.methods.parts.solved import SOLVER, WHOLE, Solver, nothing_descends, solved
from bespoke.tensors import Params, Tree, add, scale, subtract


@dataclass(frozen=True)
class PFedMe(SharedModel):
    """A shared model near which every client finds its own by a few steps."""

    lr: float = knob(0.005, "rate at which a client moves its copy of the shared model (eta)", gt=0)
    lam: float = knob(15.0, "strength of the pull of the personal model to the shared one", gt=0)
    personal_lr: float = knob(0.09, "learning rate of the personal model (eta_p); times lam it has to be below 2", gt=0)
    inner_steps: int = knob(5, "steps of the personal model on each batch (K)", ge=1)
    weight_decay: float = knob(0.0, "weight decay of the personal model (0.001 in the authors' code)", ge=0)
    optimizer: ClientOptimizer = field(
        default_factory=ClientOptimizer, metadata={"doc": OPTIMIZER + "; of the personal model's steps"}
    )
    solver: Solver = knob("sgd", SOLVER)
    adapt_epochs: int | None = knob(None, "epochs in which the personal model is made; as epochs if not given", ge=1)

    card = Card(
        "pfedme",
        "Dinh et al., NeurIPS 2020",
        "pFedMe",
        personal="what a round makes of the shared model on the client's own rows, pulled to it",
        unseen="a client that never trained makes its model from the shared one on its own rows, like all others",
        tunes={"lr": (0.01, 0.03, 0.1), "lam": (1.0, 15.0), "personal_lr": (0.03, 0.09)},
        tunes_exact={"lam": (0.001, 0.01, 0.1, 1.0, 10.0)},
    )
    choosing = Choosing(keep_shared=False)
    needs = Needs(still=True)

    def __post_init__(self) -> None:
        self.stepper.joined()  # refuses wrong combinations
        if self.solver == "exact":
            nothing_descends(self.optimizer, self.schedule)

    @property
    def stepper(self) -> ClientOptimizer:
        return self.optimizer.joined(weight_decay=self.weight_decay)

    def batching(self) -> Batching:
        if self.solver == "exact":
            return WHOLE
        return replace(super().batching(), uses=self.inner_steps)

    def support_batching(self) -> Batching:
        if self.solver == "exact":
            return WHOLE
        if self.steps_per_round and self.adapt_epochs is None:
            return self.batching()
        return Batching(self.batch_size, self.adapt_epochs or self.epochs, drop_last=self.drop_last)

    @stackable(lambda method: method.solver == "sgd" and not method.optimizer.stateful and method.schedule.steady)
    def local(self, w: Params, batches: Batches) -> tuple[Params, Params]:
        """(w_k, theta_k): the client's copy of the shared model and its personal model after these batches."""
        if self.solver == "exact":
            theta = solved(self.task, w, batches.rows(), self.lam * batches.examples)
            return theta, theta
        theta, state = w, None
        rate, personal = self.schedule.of(self.lr, batches), self.schedule.of(self.personal_lr, batches)
        for step in range(len(batches)):
            theta, state = descended(
                self.task, theta, state, batches.again(step, self.inner_steps), lr=at(personal, step),
                optimizer=self.stepper, anchor=w, pull=self.lam,
            )  # fmt: skip
            w = add(w, scale(subtract(w, theta), -self.lam * at(rate, step) * batches.live(step)))
        return w, theta

    @stackable(lambda method: stacks(method.local))
    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        moved, _ = self.local(down["params"], batches)
        return private, self.change(moved, down["params"], batches)

    def candidates(self) -> tuple[str, ...]:
        return ("global", "personal")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        yield down["params"]
        yield self.local(down["params"], support)[1]
