"""FedPC (Generated): Silva et al., FedPC, 2022, Section 3.2.1, Algorithm 2 and Appendix A.

Nothing is trained for a user: two generators Gamma (user) and nu (context), one decoder block each, make the preference
embedding from the texts that the client has said before (`generator.py`). The texts of a batch are taken as one after
the other; text k has the embedding that the texts before it make:

    psi_k   = psi_0 + g_Gamma * Gamma(texts 1 .. k-1)
    phi_c,k = phi_c + g_nu * nu(phi_c, texts 1 .. k-1 in context c)
    loss of text k:  L(psi_k * phi_c,k, text k)

so a text never takes part in its own embedding, and generators have a gradient. Both generators, phi and psi_0 are
shared: in a round client d takes K steps of Adam on its copy of all, pulled by FedProx's term, and sends the changes.
At the end a client reads its own texts, and has psi_d * phi_d,c without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bespoke.declarations import Needs
from bespoke.method import Batches, Batching, Cohort, Setting, knob
from bespoke.methods.fedpc import FedPC, product
from bespoke.methods.parts.client_optimizer import adam_start, adam_step
from bespoke.methods.parts.contexts import occurring
from bespoke.methods.parts.generator import Reads, generated, generator_start, nothing_read, read
from bespoke.methods.parts.local_adam import pulled
from bespoke.methods.parts.schedule import at
from bespoke.tensors import Params, Tree, flatten, scale, subtract, take, unflatten


@dataclass(frozen=True)
class FedPCGenerated(FedPC):
    """Shared generators make the embeddings of user and contexts from the texts that a client said before."""

    reads: Reads = knob(
        "utterance", "a step of a generator reads the next text, its next word (the paper's form), or all texts so far"
    )
    heads: int = knob(4, "attention heads of a generator", ge=1)
    expand: int = knob(1, "width of a generator's feed-forward layer, in widths of an embedding", ge=1)
    most: int = knob(256, "texts that a client reads at most for its embedding at the end", ge=1)
    newcomers: Any = field(default="shared", init=False)  # no knobs: the same is done for all users, and nothing tuned
    anybody_every: int = field(default=2, init=False)
    noise: float = field(default=0.0, init=False)
    tune_steps: int = field(default=1, init=False)

    card = replace(
        FedPC.card,
        name="fedpc-generated",
        personal="the product of the embeddings that the generators make from its own texts",
        unseen="a client that never trained reads its own texts, as all others do",
    )
    private = {}
    needs = Needs(words=True, still=True, parameters=2048)  # a generator has six times the square of them

    @property
    def downlink(self) -> dict[str, str]:
        return {"params": "the two generators, the contexts' embeddings phi, and the users' first one psi_0"}

    # -- the server ----------------------------------------------------------------------------------------------------
    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        server = super().init_server(params, setting)
        draw = torch.Generator().manual_seed(setting.seed)
        first, generators = _table(server["params"]["anybody"]), dict[str, Tensor]()
        width = first.shape[-1]
        for part in ("user", "context"):
            block = generator_start(width, self.task.word_width, self.heads, self.expand * width, draw)
            if self.reads == "history":
                block["prior"] = torch.zeros(())
            generators |= {f"{part}.{name}": leaf for name, leaf in block.items()}
        generators["first"] = torch.randn(first.shape, generator=draw)
        server["params"]["generators"] = generators
        server["optimizer"]["generators"] = self.server.init(generators)
        return server

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        after = super().server_round(server, cohort)
        mean = scale(cohort.sums["delta"]["generators"], cohort.sums["weight"].reciprocal())
        moved, state = self.server.step(server["optimizer"]["generators"], server["params"]["generators"], mean)
        after["params"]["generators"], after["optimizer"]["generators"] = moved, state
        return after

    # -- the client ----------------------------------------------------------------------------------------------------
    def init_private(self, params: Params) -> Tree:
        return {}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        start = held = down["params"]
        state, uses, lr = adam_start(start), torch.zeros(self.task.contexts), self.schedule.of(self.lr, batches)
        for step in range(len(batches)):
            batch, live = batches[step], batches.live(step)

            def loss(p: Params, batch: Params = batch) -> Tensor:
                return self.task.loss_of_rows(self.embedded(unflatten(p), batch), batch)

            slope = pulled(unflatten(self.slope(loss, flatten(held))), held, start, self.mu)
            held, state = adam_step(state, held, slope, at(lr, step), live, self.eps)
            uses = torch.maximum(uses, live * occurring(self.task, batch))
        return private, {"delta": subtract(held, start), "uses": uses, "weight": torch.ones_like(batches.examples)}

    def embedded(self, held: Tree, batch: Params) -> Params:
        """The model's parameters for each text of a batch, by the texts before it."""
        before = [known for known, _ in self.read(held, self.begin(held), batch)]
        made = [
            base[place] + generated(block, first[place], known)
            for (block, base, first), place, known in zip(self.parts(held), self.places(batch), before)
        ]
        return _untabled(made[0] * made[1], held["contexts"])

    def parts(self, held: Tree) -> list[tuple[Params, Tensor, Tensor]]:
        """Of user and context: the generator, the embeddings without texts, and what the generator begins with."""
        generators, contexts = held["generators"], _table(held["contexts"])
        blocks = [
            {name.removeprefix(part): leaf for name, leaf in generators.items() if name.startswith(part)}
            for part in ("user.", "context.")
        ]
        return [(blocks[0], _table(held["anybody"]), generators["first"]), (blocks[1], contexts, contexts)]

    def places(self, batch: Params) -> list[Tensor]:
        """Which embedding of the user, of whom there is one, and of the contexts each text has."""
        one = torch.zeros_like(batch["mask"]).long()
        return [one, batch["context"].long() if self.task.contexts > 1 else one]

    def begin(self, held: Tree) -> list[Tree]:
        return [nothing_read(first, self.heads, self.reads) for _, _, first in self.parts(held)]

    def read(self, held: Tree, carried: list[Tree], batch: Params) -> list[tuple[Tree, Tree]]:
        """For user and context: what is known before each text of a batch, and after all of them."""
        words, counted = self.task.words(batch)
        return [
            read(block, first, known, words, counted, place, self.heads, self.reads)
            for (block, _, first), known, place in zip(self.parts(held), carried, self.places(batch))
        ]

    # -- personal models -----------------------------------------------------------------------------------------------
    def support_batching(self) -> Batching:
        return Batching(self.batch_size)

    def newcomer(self, down: Tree, private: Tree, support: Batches) -> Tree:
        return private

    def candidates(self) -> tuple[str, ...]:
        return ("anybody", "generated")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        held = down["params"]
        yield product(held["anybody"], held["contexts"])
        known = self.begin(held)
        for step in range(min(len(support), -(-self.most // self.batch_size))):
            batch = support[step]
            mask = batch["mask"] * (torch.arange(len(batch["mask"])) < self.most - step * self.batch_size)
            known = [after for _, after in self.read(held, known, {**batch, "mask": mask})]
        made = [base + generated(block, first, after) for (block, base, first), after in zip(self.parts(held), known)]
        params = _untabled(made[0] * made[1], held["contexts"])
        yield params if "prefix" in params else take(params, 0)


def _table(params: Params) -> Tensor:
    """Embeddings as (contexts, tokens, width); all parameters of a model that is trained are one token."""
    if "prefix" in params:
        return params["prefix"]
    return torch.cat([leaf.flatten() for leaf in params.values()])[None, None]


def _untabled(rows: Tensor, like: Params) -> Params:
    """Parameters with a first dimension of rows, from embeddings as `_table` has them."""
    if "prefix" in like:
        return {"prefix": rows}
    parts = rows[:, 0].split([leaf.numel() for leaf in like.values()], dim=-1)
    return {name: part.unflatten(-1, leaf.shape) for (name, leaf), part in zip(like.items(), parts)}
