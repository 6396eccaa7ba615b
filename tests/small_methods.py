"""Small methods that use each part of the contract once. A module of its own: worker processes import it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from bespoke.declarations import Reveal, Sent
from bespoke.method import Batches, Batching, Cohort, Method, Setting, knob
from bespoke.methods import MRMTL, Ditto, FineTune, Mixed, PFedMe
from bespoke.methods.fedavg import FedAvg
from bespoke.methods.parts.descend import descend
from bespoke.tensors import Params, Tree, add_scaled, norm, scale, subtract, tree_map, zeros_like


@dataclass(frozen=True)
class Drift(FedAvg):
    """Stateful: each client corrects its update by the difference it saw before (SCAFFOLD in spirit)."""

    card = replace(FedAvg.card, name="drift")
    private = {"drift": "the client's last change, smoothed"}

    def init_private(self, params: Params) -> Tree:
        return {"drift": zeros_like(params)}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        trained = self.train(down["params"], batches)
        change = subtract(trained, down["params"])
        sent = add_scaled(change, private["drift"], 0.5)
        drift = add_scaled(scale(private["drift"], 0.5), change, 0.5)
        return {"drift": drift}, {"delta": scale(sent, batches.examples), "weight": batches.examples}


@dataclass(frozen=True)
class SmallDitto(FedAvg):
    """A private model beside the shared one, pulled to it (Ditto): the private model never leaves."""

    pull: float = knob(0.3, "strength of the pull to the shared model", ge=0)

    card = replace(FedAvg.card, name="small-ditto", personal="the private model")
    private = {"model": "the client's own model"}

    def batching(self) -> Batching:
        return replace(super().batching(), uses=2)

    def init_private(self, params: Params) -> Tree:
        return {"model": params}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        _, up = super().client_round(down, {}, batches)
        own = descend(self.task, private["model"], batches, lr=self.lr, anchor=down["params"], pull=self.pull)
        return {"model": own}, up

    def candidates(self) -> tuple[str, ...]:
        return ("shared", "private", "private, adapted")

    def support_batching(self) -> Batching:
        return Batching(self.batch_size)

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        yield down["params"]
        yield private["model"]
        yield descend(self.task, private["model"], support, lr=self.lr, anchor=down["params"], pull=self.pull)


@dataclass(frozen=True)
class SecretDitto(SmallDitto):
    """A private model, and private numbers that hold the client's own rows: nothing of either may be found outside."""

    card = replace(SmallDitto.card, name="secret-ditto")
    private = {"model": "the client's own model", "secret": "sums of its rows"}

    def init_private(self, params: Params) -> Tree:
        return {"model": params, "secret": torch.zeros(8)}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        new, up = super().client_round(down, private, batches)
        rows = batches.rows()
        seen = (rows["y"] * rows["mask"]).sum() * torch.arange(1.0, 9.0).sqrt()
        return {**new, "secret": private["secret"] * 0.7 + seen}, up


@dataclass(frozen=True)
class LeakyDitto(SecretDitto):
    """The same, but it sends its secret: declared, so allowed; the positive control of the search for private bytes."""

    card = replace(SecretDitto.card, name="leaky-ditto")
    uplink = {"delta": Sent(Reveal.SUM, change="weight"), "weight": Sent(Reveal.SUM), "secret": Sent(Reveal.EACH)}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        new, up = super().client_round(down, private, batches)
        return new, {**up, "secret": new["secret"]}


@dataclass(frozen=True)
class Median(FedAvg):
    """An EACH field: the server sees every client's change and takes the coordinate-wise median."""

    card = replace(FedAvg.card, name="median")
    uplink = {"delta": Sent(Reveal.EACH, change="weight"), "weight": Sent(Reveal.SUM), "size": Sent(Reveal.EACH)}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        trained = self.train(down["params"], batches)
        delta = subtract(trained, down["params"])
        return private, {"size": batches.examples, "weight": batches.examples, "delta": delta}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        middle = tree_map(lambda leaf: leaf.median(0).values, cohort.each["delta"])
        params, optimizer = self.server.step(server["optimizer"], server["params"], middle)
        return {"params": params, "optimizer": optimizer}


@dataclass(frozen=True)
class Offsets(FedAvg):
    """Unicast: the server holds a scale for each of two kinds of clients and sends each client its own."""

    card = replace(FedAvg.card, name="offsets")
    downlink = {"params": "the global model", "rate": "the client's own rate", "nested": "and a tree of numbers"}

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        return {**super().init_server(params, setting), "rates": torch.tensor([0.5, 1.5])}

    def unicast(self, server: Tree, client: int) -> Tree:
        return {"rate": server["rates"][client % 2], "nested": {"one": torch.full((3,), float(client))}}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        trained = descend(self.task, down["params"], batches, lr=self.lr * down["rate"])
        shift = 1 + down["nested"]["one"].mean() / 100
        weight = batches.examples
        return private, {"delta": scale(subtract(trained, down["params"]), weight * shift), "weight": weight}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        return {**super().server_round(server, cohort), "rates": server["rates"] * 0.9}

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        yield scale(down["params"], down["rate"])


@dataclass(frozen=True)
class Motley4(FedAvg):
    """Private leaves of four types and sizes that do not divide each other, returned in another order than begun."""

    card = replace(FedAvg.card, name="four-types")
    private = {
        "count": "rounds taken part in",
        "sum": "of the targets",
        "seen": "whether it ever trained",
        "w": "model",
    }

    def init_private(self, params: Params) -> Tree:
        return {
            "seen": torch.zeros(3, dtype=torch.bool),
            "sum": torch.zeros((), dtype=torch.float64),
            "count": torch.zeros((), dtype=torch.int32),
            "inner": {"w": params, "rows": torch.zeros(2, dtype=torch.int64)},
        }

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        trained = self.train(down["params"], batches)
        rows = batches.rows()
        new = {
            "inner": {"rows": private["inner"]["rows"] + batches.examples.long(), "w": trained},
            "count": private["count"] + torch.ones((), dtype=torch.int32),
            "sum": private["sum"] + (rows["y"].double() * rows["mask"].double()).sum(),
            "seen": torch.ones_like(private["seen"]),
        }
        weight = batches.examples * (1 + private["count"])  # the state matters: those who came often weigh more
        return new, {"delta": scale(subtract(trained, down["params"]), weight), "weight": weight}

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        yield private["inner"]["w"]


@dataclass(frozen=True)
class Bounded(FedAvg):
    """Local training alone is put in FedAvg's place, with a norm in it: each client's own, not that of a stack."""

    card = replace(FedAvg.card, name="bounded")

    def train(self, start: Params, batches: Batches) -> Params:
        change = subtract(super().train(start, batches), start)
        return add_scaled(start, change, (0.2 / norm(change).clamp(min=1e-12)).clamp(max=1.0))


@dataclass(frozen=True)
class Talkative(FedAvg):
    """Sends a field that it does not declare."""

    card = replace(FedAvg.card, name="talkative")

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        private, up = super().client_round(down, private, batches)
        return private, {**up, "gossip": batches.examples}


@dataclass(frozen=True)
class Silent(FedAvg):
    """Declares a field that it does not send."""

    card = replace(FedAvg.card, name="silent")
    uplink = {"delta": Sent(Reveal.SUM, change="weight"), "weight": Sent(Reveal.SUM), "promised": Sent(Reveal.SUM)}


@dataclass(frozen=True)
class SolvedFineTune(FineTune):
    """Fine-tuning whose candidates are fits to convergence."""

    solver: Literal["sgd", "exact"] = "exact"
    pulls: tuple[float, ...] = (0.1, 1.0)
    intercepts: tuple[float, ...] = (0.5,)
    card = replace(FineTune.card, name="solved-finetune")


@dataclass(frozen=True)
class SolvedDitto(Ditto):
    """Ditto with private models fitted to convergence."""

    solver: Literal["sgd", "exact"] = "exact"
    card = replace(Ditto.card, name="solved-ditto")


@dataclass(frozen=True)
class SolvedMRMTL(MRMTL):
    """MR-MTL with private models fitted to convergence."""

    solver: Literal["sgd", "exact"] = "exact"
    card = replace(MRMTL.card, name="solved-mr-mtl")


@dataclass(frozen=True)
class SolvedPFedMe(PFedMe):
    """pFedMe with personal models fitted to convergence."""

    solver: Literal["sgd", "exact"] = "exact"
    card = replace(PFedMe.card, name="solved-pfedme")


@dataclass(frozen=True)
class FullMixed(Mixed):
    """A mixed model whose coefficients vary together, without groups."""

    covariance: Literal["diagonal", "full"] = "full"
    groups_vary: bool = False
    card = replace(Mixed.card, name="full-mixed")


@dataclass(frozen=True)
class RobustMixed(Mixed):
    """A mixed model with heavy tails."""

    robust: bool = True
    card = replace(Mixed.card, name="robust-mixed")


SOLVED_METHODS: tuple[type[Method], ...] = (
    SolvedFineTune, SolvedDitto, SolvedMRMTL, SolvedPFedMe, FullMixed, RobustMixed,
)  # fmt: skip
SMALL_METHODS: tuple[type[Method], ...] = (Drift, SmallDitto, Median, Offsets, Motley4, Bounded, *SOLVED_METHODS)
