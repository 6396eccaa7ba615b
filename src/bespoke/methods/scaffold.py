"""SCAFFOLD: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.

The server keeps a control variate c, client k one of its own, c_k: guesses of the common gradient and of the client's.
Local steps are corrected by their difference: y <- y - lr (grad f_k(y) - c_k + c), K of them from the shared model x.
Then

    option I:   c_k <- grad f_k(x)                       another pass over the client's rows
    option II:  c_k <- c_k - c + (x - y) / (K lr)        the mean gradient of the steps, at no further cost

The server: x <- x + server.lr mean_k (y_k - x) and c <- c + sum_k (change of c_k) / N, N being all clients that may
take part. So c is the mean of all N clients' c_k at all times, whoever is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from bespoke.declarations import Card, Needs, Reveal, Sent, stackable
from bespoke.method import Batches, Batching, Cohort, Setting, knob
from bespoke.methods.parts.client_optimizer import ClientOptimizer
from bespoke.methods.parts.descend import bounded, descend
from bespoke.methods.parts.schedule import at
from bespoke.methods.parts.shared_model import SharedModel
from bespoke.tensors import Params, Tree, add_scaled, is_buffer, scale, subtract, zeros_like


@dataclass(frozen=True)
class Scaffold(SharedModel):
    """FedAvg whose clients correct their steps by the difference of their gradient from the mean of all clients."""

    option: Literal["I", "II"] = knob(
        "II", "a client's control: gradient at the shared model (I), mean of its steps (II)"
    )
    weight_decay: float = knob(0.0, "client weight decay", ge=0)
    # by examples, c would have to be the mean by examples of clients that the server has not met
    weighting: Literal["uniform"] = knob("uniform", "weight of a client in the mean: all alike")

    card = Card("scaffold", "Karimireddy et al., ICML 2020", "SCAFFOLD", tunes={"lr": (0.01, 0.03, 0.1, 0.3)})
    uplink = {
        "delta": Sent(Reveal.SUM, change="weight"),
        "weight": Sent(Reveal.COUNT),
        "control": Sent(Reveal.SUM, change="weight"),
    }
    downlink = {"params": "the global model", "control": "the mean of all clients' controls"}
    private = {"control": "the client's own control: a guess of its gradient"}

    @property
    def needs(self) -> Needs:
        return Needs(still=self.option == "I")

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        clients = torch.tensor(float(setting.training or setting.clients))
        return {**super().init_server(params, setting), "control": zeros_like(params), "clients": clients}

    def broadcast(self, server: Tree) -> Tree:
        return {"params": server["params"], "control": server["control"]}

    def init_private(self, params: Params) -> Tree:
        return {"control": zeros_like(params)}

    def batching(self) -> Batching:
        return replace(super().batching(), epochs=self.epochs + (self.option == "I"))

    def gradient(self, params: Params, batches: Batches) -> Params:
        """The gradient on all rows of an epoch (or on a round's, if it is in steps), a batch at a time."""
        total, rows = zeros_like(params), torch.zeros(())
        for step in range(len(batches)):
            batch = batches[step]
            total = add_scaled(total, self.task.gradient(params, batch), batch["mask"].sum())
            rows = rows + batch["mask"].sum()
        return add_scaled(scale(total, 1 / rows), params, self.weight_decay)

    @stackable(lambda method: method.option == "II" and method.schedule.steady)
    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        start, own = down["params"], private["control"]
        drift = subtract(down["control"], own)
        steps = batches.part(0, self.epochs)
        # the learning rate of the steps, by which the control is divided
        lr = bounded(self.task, start, steps, self.schedule.of(self.lr, steps), self.weight_decay)
        decay = ClientOptimizer(weight_decay=self.weight_decay)
        trained = descend(self.task, start, steps, lr=lr, optimizer=decay, drift=drift)
        if self.option == "I":
            control = self.gradient(start, batches.part(self.epochs, self.epochs + 1))
        else:
            if callable(lr):  # the mean of gradients that went in with different rates
                step_length = sum(steps.live(step) * at(lr, step) for step in range(len(steps)))
            else:  # steps that only pad do not count; every epoch has the same
                many = 1 if self.steps_per_round else self.epochs
                step_length = many * sum(steps.live(step) for step in range(len(steps) // many)) * lr
            control = subtract(scale(subtract(start, trained), 1 / step_length), drift)
            control = {name: torch.zeros_like(c) if is_buffer(name) else c for name, c in control.items()}
        return {"control": control}, {**self.change(trained, start, batches), "control": subtract(control, own)}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        control = add_scaled(server["control"], cohort.sums["control"], 1 / server["clients"])
        return {**super().server_round(server, cohort), "control": control, "clients": server["clients"]}
