"""Mocha: Smith et al., Federated Multi-Task Learning, NeurIPS 2017, in the primal form of Motley's cross-silo code.

Each of m clients has weights w_t, a row of W. All lower  sum_t f_t(w_t) + (lam / 2) tr(W^T R W),  and the relation R is
learned from W: Sigma = (W W^T)^(1/2) / tr((W W^T)^(1/2)), which begins as I / m. R is Sigma itself in Motley's code
(`coupling = "motley"`: what clients have in common is shrunk), its inverse Omega in the original (`coupling = "omega"`:
related clients are drawn together).

The coupling's gradient for w_t is lam (R_tt w_t + sum_{s != t} R_ts w_s) = lam R_tt (w_t - a_t), a pull to the anchor
a_t = -sum_{s != t} R_ts w_s / R_tt. The others' weights are those of the round's start for everyone (a Jacobi step), so
the server can tell each client its a_t and R_tt, and no client sees another's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from bespoke.declarations import Card, Choosing, Needs, Reveal, Sent, stackable
from bespoke.method import Batches, Batching, Cohort, Method, Setting, knob
from bespoke.methods.parts.client_optimizer import ClientOptimizer
from bespoke.methods.parts.descend import descend
from bespoke.methods.parts.schedule import SCHEDULE, Schedule, at
from bespoke.tensors import Params, Tree, subtract, take, tree_map

FLOOR = 1e-8  # of the eigenvalues of W W^T


@dataclass(frozen=True)
class Mocha(Method):
    """Linear models, one a client, coupled by a relation between clients that is learned with them."""

    lr: float = knob(0.1, "client learning rate", gt=0)
    lam: float = knob(0.001, "strength of the coupling", ge=0)
    coupling: Literal["motley", "omega"] = knob("motley", "Sigma (Motley's code) or its inverse (the original)")
    relate_every: int = knob(1, "rounds between two updates of the relation", ge=1)
    epochs: int = knob(1, "local epochs per round", ge=1)
    batch_size: int = knob(32, "client batch size", ge=1)
    weight_decay: float = knob(0.0, "client weight decay", ge=0)
    drop_last: bool = knob(False, "leave out the last, partial batch")
    shuffle: bool = knob(True, "draw new batches in every round; off: rows in their stored order")
    schedule: Schedule = field(default_factory=Schedule, metadata={"doc": SCHEDULE})

    card = Card(
        "mocha",
        "Smith et al., NeurIPS 2017; primal: Wu et al., Motley, 2022",
        personal="weights of its own, coupled to those of related clients",
        unseen="a client that never trained gets the mean of the others' weights",
        tunes={"lr": (0.01, 0.03, 0.1, 0.3), "lam": (0.0001, 0.001, 0.01)},
    )
    uplink = {"delta": Sent(Reveal.EACH)}
    downlink = {
        "params": "the mean of the clients' weights",
        "weights": "the client's own weights",
        "anchor": "where the other clients' weights pull it",
        "pull": "how strongly",
    }
    needs = Needs(linear=True, clients=3000)  # the server decomposes a matrix of clients x clients
    choosing = Choosing(keep_shared=False)

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        tasks = setting.clients
        weights = tree_map(lambda p: p.expand(tasks, *p.shape).clone(), params)
        trained = torch.zeros(tasks, dtype=torch.bool)
        return self._coupled(params, weights, trained, self._relation(torch.eye(tasks, dtype=torch.float64)), 0)

    def batching(self) -> Batching:
        return Batching(self.batch_size, self.epochs, drop_last=self.drop_last, shuffle=self.shuffle)

    def unicast(self, server: Tree, client: int) -> Tree:
        return {name: take(server[name], client) for name in ("weights", "anchor", "pull")}

    @stackable(lambda method: method.schedule.steady)
    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        # the coupling in closed form (a proximal step): Omega is stiff, and would overshoot at any usual learning rate
        full, pull = self.schedule.of(self.lr, batches), down["pull"]

        def proximal(step: int) -> Tensor:
            rate: Tensor = at(full, step) / (1 + at(full, step) * pull)
            return rate

        trained = descend(
            self.task, down["weights"], batches, lr=proximal if callable(full) else proximal(0),
            optimizer=ClientOptimizer(weight_decay=self.weight_decay), anchor=down["anchor"], pull=pull,
        )  # fmt: skip
        return private, {"delta": subtract(trained, down["weights"])}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        places = torch.tensor(cohort.clients)
        weights = tree_map(lambda w, d: w.index_add(0, places, d), server["weights"], cohort.each["delta"])
        trained = server["trained"].index_fill(0, places, True)
        number, relation = int(server["round"]) + 1, server["relation"]
        if number % self.relate_every == 0:
            rows = _rows(weights, trained)
            relation = self._relation(rows @ rows.mT)
        return self._coupled(server["params"], weights, trained, relation, number)

    def candidates(self) -> tuple[str, ...]:
        return ("mean", "personal")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        yield down["params"]
        yield down["weights"]

    def _relation(self, gram: Tensor) -> Tensor:
        """R from W W^T."""
        values, vectors = torch.linalg.eigh(gram)
        roots = values.clamp(min=FLOOR).sqrt()
        spectrum = roots / roots.sum()
        relation: Tensor = (vectors * (spectrum if self.coupling == "motley" else 1 / spectrum)) @ vectors.mT
        return relation

    def _coupled(self, mean: Params, weights: Params, trained: Tensor, relation: Tensor, number: int) -> Tree:
        """The server's state, with the next message to each client."""
        if trained.any():
            mean = tree_map(lambda w: w[trained].mean(0), weights)
            # a client that never trained is at the mean, which is its best known model
            weights = tree_map(lambda w, m: torch.where(_along(trained, w), w, m), weights, mean)
        rows, own = _rows(weights, trained), relation.diagonal()[:, None]
        anchors = (rows - (relation @ rows) / own).float().split([w[0].numel() for w in weights.values()], dim=1)
        return {
            "params": mean, "weights": weights, "trained": trained, "relation": relation,
            "anchor": {n: a.reshape(w.shape) for (n, w), a in zip(weights.items(), anchors)},
            "pull": (self.lam * relation.diagonal()).float(), "round": torch.tensor(number),
        }  # fmt: skip


def _rows(weights: Params, trained: Tensor) -> Tensor:
    """W in double precision, a row a client; who never trained has no weights yet."""
    return torch.cat([w.flatten(1) for w in weights.values()], dim=1).double() * trained[:, None]


def _along(flags: Tensor, leaf: Tensor) -> Tensor:
    return flags.reshape(-1, *[1] * (leaf.dim() - 1))
