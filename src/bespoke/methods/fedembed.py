"""FedEmbed: Silva et al., FedEmbed: Personalized Private Federated Learning, 2022.

Each client u has an embedding e, which never leaves it and goes into a shared encoder theta twice: beside the input and
beside the features. Above the features are K heads phi_1, ..., phi_K, one for each sub-population of clients, a global
head nu, and a head gamma that tells the kind m of a row. With f = theta(x, e) joined with e, a client in
sub-population k descends, on its own rows,

    theta, phi_k, gamma:    L_C(phi_k(f), y) + kinds L_M(gamma(f), m),    e held
    e, nu:                  L_C(phi_k(f), y) + L_C(nu(f), y),             theta, phi_k held

so that the conflicting labels of other sub-populations reach neither theta nor phi_k through nu, while all embeddings
are taught by one head and lie in one space (Section 3.2). The kind of a row is nobody's preference: L_M does not reach
e (Algorithm 1, line 20). The heads of other sub-populations are sent with zeros for a change: in the sum nobody sees
which head was trained. Who is in which sub-population: see assignment.py; "personal": a head that stays on the client;
"none": one head for all, no nu (the paper's Global+).

Prototypes are embeddings of imagined users: a client that likes kind p moves prototype p as its own embedding would be
moved if it were there. They travel with the model, and are updated with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke.declarations import Card, Choosing, Handoff, Needs, Nothing, Observed, Sent
from bespoke.method import Batches, Batching, Cohort, Setting, knob
from bespoke.methods.parts.assignment import (
    ByKind,
    HeadOnClient,
    OneHead,
    OnMap,
    Prototypes,
    SelfOrganizingMap,
    liked_kind,
    one_of,
    pick,
)
from bespoke.methods.parts.client_optimizer import OPTIMIZER, ClientOptimizer
from bespoke.methods.parts.schedule import at
from bespoke.methods.parts.shared_model import SharedModel
from bespoke.task import Task
from bespoke.tensors import Params, Tree, scale, subtract

HEADS = ("heads.weight", "heads.bias")


@dataclass(frozen=True)
class FedEmbed(SharedModel):
    """Personal embeddings that condition a shared encoder, and a head for each sub-population of clients."""

    assignment: Literal["som", "prototype", "type", "personal", "none"] = knob(
        "som", "a client's head: by a self-organising map, the nearest prototype, the kind it likes, its own, or one"
    )
    k: int = knob(
        10, "sub-populations that the map looks for; prototypes and types are as many as there are kinds", ge=2
    )
    size: int = knob(8, "size of the embedding (28 for MNIST in the paper: the side of its images)", ge=1)
    embedding_lr: float = knob(1.0, "learning rate of embeddings and prototypes", gt=0)
    optimizer: ClientOptimizer = field(
        default_factory=ClientOptimizer,
        metadata={"doc": OPTIMIZER + ", with rates lr and embedding_lr; the paper has Adam with PyTorch's rate, 0.001"},
    )
    kinds: float = knob(1.0, "weight of telling the kinds of rows apart, where the data know them; 0: left out", ge=0)
    margin: float = knob(1.0, "prototype: margin of the triplet loss", ge=0)
    triplet_lr: float = knob(0.1, "prototype: rate of the triplet loss", gt=0)
    triplets: int = knob(5, "prototype: steps of the triplet loss in a round, each against another prototype", ge=1)
    som: SelfOrganizingMap = field(
        default_factory=SelfOrganizingMap, metadata={"doc": "the map: update, lr, radius, halving"}
    )
    adapt_epochs: int = knob(10, "epochs in which a client that never trained makes its embedding", ge=1)

    card = Card(
        "fedembed",
        "Silva et al., 2022",
        personal="the encoder and its sub-population's head, conditioned on its own embedding",
        unseen="a client that never trained makes an embedding on its own rows, the shared model held, and takes the "
        "head that the embedding leads to",
        tunes={"lr": (0.03, 0.1, 0.3), "embedding_lr": (0.3, 1.0, 3.0)},
    )
    handoff = Handoff(Nothing())  # no other method knows the inputs of its model
    choosing = Choosing(keep_shared=False)
    needs = Needs(still=True)

    @property
    def uplink(self) -> dict[str, Sent]:
        shared = super().uplink
        delta = replace(shared["delta"], rows=(*HEADS, "prototypes"))
        return {**shared, "delta": delta, **self.heads.uplink}

    @property
    def downlink(self) -> dict[str, str]:
        return {"params": self.heads.model, **self.heads.downlink}

    @property
    def private(self) -> dict[str, str]:
        head = {"head": "the client's own head"} if self.heads.own_head else {}
        moments = {"moments": "the optimizer's state of the client's own parameters"} if self.optimizer.stateful else {}
        return {"embedding": "the client's embedding", "rounds": "rounds it took part in", **head, **moments}

    # -- what there is -------------------------------------------------------------------------------------------------
    @property
    def _task(self) -> Task:
        return self.task.conditioned(self.size)

    @property
    def heads(self) -> OneHead:
        """How clients are assigned to heads."""
        if self.assignment == "som":
            return OnMap(self.som, self.k)
        if self.assignment == "prototype":
            return Prototypes(self.task, self.margin, self.triplet_lr, self.triplets)
        if self.assignment == "type":
            return ByKind(self.task)
        return HeadOnClient() if self.assignment == "personal" else OneHead()

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        network, many, seed = self._task.network, self.heads.heads, setting.seed
        model = network.body(params, seed)
        heads = [network.new_head(network.outputs, seed + 1 + place) for place in range(many)]
        if heads:
            model |= {f"heads.{name}": torch.stack([head[name] for head in heads]) for name in heads[0]}
        above = {"global": network.outputs} if self.heads.above else {}
        above |= {"kinds": self.task.kinds} if self.task.kinds and self.kinds else {}
        for place, (name, outputs) in enumerate(above.items()):
            model |= {f"{name}.{n}": p for n, p in network.new_head(outputs, seed + 1 + many + place).items()}
        model |= self.heads.init_params(self.size, seed)
        return {**super().init_server(model, setting), **self.heads.init_server(self.size, seed)}

    def init_private(self, params: Params) -> Tree:
        network, _ = self._task.network, self.heads.heads  # data without kinds are refused before anything is trained
        begun: Tree = {"embedding": torch.zeros(self.size), "rounds": torch.zeros(())}
        own = {"embedding": begun["embedding"]}
        if self.heads.own_head:
            width = network.width + self.size
            begun["head"] = {"weight": torch.zeros(network.outputs, width), "bias": torch.zeros(network.outputs)}
            own |= {f"head.{name}": p for name, p in begun["head"].items()}
        if self.optimizer.stateful:
            begun["moments"] = {name: self.optimizer.start(p) for name, p in own.items()}
        return begun

    def broadcast(self, server: Tree) -> Tree:
        return {name: server[name] for name in self.downlink}

    # -- the server ----------------------------------------------------------------------------------------------------
    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        new = super().server_round(server, cohort)
        grown, heirs = self.heads.learn(server, cohort)
        if heirs is None:
            return new
        for leaves in (new["params"], *(leaf for leaf in new["optimizer"].values() if isinstance(leaf, dict))):
            leaves |= {name: leaves[name][heirs] for name in HEADS}  # moments move with their heads
        return {**new, **grown}

    def observe(self, server: Tree, cohort: Cohort) -> Observed:
        return self.heads.observe(cohort)

    # -- the client ----------------------------------------------------------------------------------------------------
    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        params, embedding = down["params"], self.embedding(private, batches)
        liked = self._liked(batches)
        embedding = self.heads.attracted(params, embedding, liked, batches)
        place = self.heads.place(down, embedding, liked)
        start = self.model(params, private, place, liked, embedding)
        trained, moments = self.train(start, private.get("moments", {}), batches)
        weight = self.weight(batches)
        delta = scale(self._spread(subtract(trained, start), params, place, liked), weight)
        up = {"delta": delta, "weight": weight, **self.heads.message(down, trained["embedding"])}
        return self._kept(trained, moments, private), up

    def embedding(self, private: Tree, batches: Batches) -> Tensor:
        """The client's embedding, which the client draws before its first round."""
        drawn = batches.chances(self.size, "embedding")
        return torch.where(private["rounds"] > 0, private["embedding"], drawn)

    def _liked(self, batches: Batches) -> Tensor | None:
        return liked_kind(batches.rows(), self.heads.heads) if self.heads.likes else None

    def model(self, params: Params, private: Tree, place: Tensor, liked: Tensor | None, embedding: Tensor) -> Params:
        """The parameters that one client trains: encoder, its head, global ones, its embedding (and its prototype)."""
        if self.heads.own_head:  # before its first round a client's own head is the global one
            known = private["rounds"] > 0
            head = {n: torch.where(known, p, params[f"global.{n}"]) for n, p in private["head"].items()}
        else:
            head = {name.removeprefix("heads."): pick(params[name], place) for name in HEADS}
        own = {f"head.{name}": p for name, p in head.items()} | {"embedding": embedding}
        if liked is not None and "prototypes" in params:
            own["prototype"] = pick(params["prototypes"], liked)
        return {**{n: p for n, p in params.items() if n not in (*HEADS, "prototypes")}, **own}

    def train(self, model: Params, moments: Tree, batches: Batches, alone: bool = False) -> tuple[Params, Tree]:
        """Local training; `alone`: of the client's own parameters, with the shared model held.

        `moments`: the optimizer's state for the client's own parameters, which continues from round to round; that for
        shared parameters starts anew.
        """
        apart = ("embedding", "prototype", *(name for name in model if name.startswith("global.")))
        shared = [name for name in model if name not in apart]
        own = [name for name in apart if name in model and name != "prototype"]
        groups = [shared, own, [name for name in model if name == "prototype"]]
        if alone:
            mine = ("head.weight", "head.bias") if self.heads.own_head else ()
            groups = [list(mine), ["embedding"], []]
        which = [place for place, names in enumerate(groups) if names]
        taught = [name for names in groups for name in names]
        states = {n: moments.get(n) or self.optimizer.start(model[n]) for n in taught}
        lr, own_lr = (self.schedule.of(rate, batches) for rate in (self.lr, self.embedding_lr))
        for step in range(len(batches)):
            batch, live, now = batches[step], batches.live(step), model

            def losses(*parts: Params, now: Params = now, batch: Params = batch) -> tuple[Tensor, ...]:
                found = self.losses({n: p for part in (now, *parts) for n, p in part.items()}, batch)
                return tuple(found[place] for place in which)

            slopes = self._task.slopes(losses, *({name: model[name] for name in groups[place]} for place in which))
            moved: Params = {}
            for name, slope in ((name, slope) for part in slopes for name, slope in part.items()):
                rate = at(own_lr if name in ("embedding", "prototype") else lr, step)
                moved[name], states[name] = self.optimizer.step(states[name], model[name], slope, rate, live)
            model = {**model, **moved}
        return model, {name: states[name] for name in moments}

    def losses(self, model: Params, batch: Params) -> tuple[Tensor, ...]:
        """The losses of the shared parameters, of the embedding (with nu) and of the prototype."""
        task = self._task
        features = task.network.features(model, batch["x"])
        loss = task.mean_loss(_affine(model, "head", features), batch)
        shared = own = loss
        if "global.weight" in model:
            own = loss + task.mean_loss(_affine(model, "global", features), batch)
        if "kinds.weight" in model:
            shared = loss + self.kinds * _unlikeliness(_affine(model, "kinds", features), batch)
        if "prototype" not in model:
            return shared, own
        there = task.network.features({**model, "embedding": model["prototype"]}, batch["x"])
        imagined = (task.mean_loss(_affine(model, name, there), batch) for name in ("head", "global"))
        return shared, own, sum(imagined, torch.zeros(()))

    def _spread(self, change: Params, params: Params, place: Tensor, liked: Tensor | None) -> Params:
        """A client's change in the form of the server's model: zeros for the heads and prototypes of others."""
        delta = {name: change[name] for name in params if name in change}
        for name in (name for name in HEADS if name in params):
            mine = change[name.replace("heads.", "head.")]
            delta[name] = one_of(place, self.heads.heads).reshape(-1, *(1,) * mine.dim()) * mine
        if "prototypes" in params and liked is not None:
            delta["prototypes"] = one_of(liked, self.heads.heads)[:, None] * change["prototype"]
        return delta

    def _kept(self, trained: Params, moments: Tree, private: Tree) -> Tree:
        kept: Tree = {"embedding": trained["embedding"], "rounds": private["rounds"] + 1}
        if moments:
            kept["moments"] = moments
        if self.heads.own_head:
            kept["head"] = {name: trained[f"head.{name}"] for name in private["head"]}
        return kept

    # -- personal models -----------------------------------------------------------------------------------------------
    def support_batching(self) -> Batching:
        return Batching(self.batch_size, self.adapt_epochs, drop_last=self.drop_last)

    def newcomer(self, down: Tree, private: Tree, support: Batches) -> Tree:
        params, liked = down["params"], self._liked(support)
        embedding = self.heads.attracted(params, self.embedding(private, support), liked, support)
        start = self.model(params, private, self.heads.place(down, embedding, liked), None, embedding)
        return self._kept(*self.train(start, private.get("moments", {}), support, alone=True), private)

    def candidates(self) -> tuple[str, ...]:
        return ("global head", "personal")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        params, embedding, liked = down["params"], private["embedding"], self._liked(support)
        model = self.model(params, private, self.heads.place(down, embedding, liked), None, embedding)
        mine = {n: p for n, p in model.items() if not n.startswith(("global.", "kinds."))}
        common = {f"head.{n}": params.get(f"global.{n}", model[f"head.{n}"]) for n in ("weight", "bias")}
        yield {**mine, **common, "embedding": torch.full_like(embedding, 0.5)}  # the mean of initial embeddings
        yield mine

    def predict(self, personal: Params, batch: Params) -> Tensor:
        outputs: Tensor = self._task.predict(personal, batch)
        return outputs


def _affine(params: Params, name: str, features: Tensor) -> Tensor:
    return features @ params[f"{name}.weight"].mT + params[f"{name}.bias"]


def _unlikeliness(outputs: Tensor, batch: Params) -> Tensor:
    """The cross-entropy of the rows' kinds."""
    losses = -F.log_softmax(outputs, -1).gather(-1, batch["kind"].long()[:, None])[:, 0]
    return (losses * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1.0)
