"""kNN-Per: Marfoq et al., Personalized Federated Learning through Local Memorization, ICML 2022.

A client keeps a memory of its rows: their features under the shared model (what its last layer sees) and targets. A
prediction mixes what the k nearest in memory say with what the shared model says: lambda kNN + (1 - lambda) model,
probabilities with probabilities, numbers with numbers. Nothing is trained; lambda (`mix`) is chosen on validation data.

Implementations weigh a neighbour at distance d differently, selectable as `weight`: exp(-d) (`exp`, Motley's code for
devices), exp(-d^2 / (dim scale)) (`exp-squared`, the authors' own), 1 / d (`inverse`, Motley's code for silos).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bespoke.declarations import Card, Choosing, Needs
from bespoke.method import Batches, Batching, Method, knob
from bespoke.tensors import Params, Tree

BLOCK = 2**18  # numbers held for some queries at a time: a text has thousands of tokens to look up among thousands
TINY = 1e-12  # least distance: a neighbour at the very place outweighs all others, as in scikit-learn


@dataclass(frozen=True)
class KNNPer(Method):
    """The shared model's predictions mixed with those of the nearest rows in a client's own memory."""

    k: int = knob(10, "neighbours that are asked", ge=1)
    weight: Literal["exp", "exp-squared", "inverse"] = knob(
        "exp", "weight of a neighbour at distance d: exp(-d), exp(-d^2 / (dim scale)), or 1 / d"
    )
    votes: Literal["targets", "predictions"] = knob(
        "targets", "what a neighbour says: its target, or what the shared model says of it (Motley's code for ADNI)"
    )
    scale: float = knob(1.0, "scale of the weight exp-squared", gt=0)
    mix: tuple[float, ...] = knob(
        tuple(i / 10 for i in range(11)), "parts of the neighbours to try; the best is chosen on validation data",
        ge=0, le=1,
    )  # fmt: skip
    capacity: int | float | None = knob(
        None, "rows kept in memory, drawn at random: a number of them, or a part (0.5); all if not given", gt=0
    )
    choose: Literal["global", "client"] = knob("global", "who chooses the mix: all clients together, or each client")

    card = Card(
        "knn-per",
        "Marfoq et al., ICML 2022",
        "kNN-Per",
        personal="the shared model and a memory of the client's own rows",
        unseen="a client that never trained fills its memory with its own rows like all others",
        after="fedavg",
        tunes={"weight": ("exp", "inverse")},
    )
    private = {"memory": "features and targets of the client's own rows"}

    needs = Needs(last=True)

    @property
    def choosing(self) -> Choosing:
        return Choosing(self.choose, keep_shared=0 in self.mix)

    def support_batching(self) -> Batching:
        return Batching(2**31, uses=0)  # all rows at once, in random order, because a limited memory keeps the first

    def candidates(self) -> tuple[str, ...]:
        return tuple(f"mix {part:g}" for part in self._parts())

    def _parts(self) -> tuple[float, ...]:
        """The parts of the mixture; the shared model is first, even if it may not be chosen."""
        return (0.0, *(part for part in self.mix if part))

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Tree]:
        memory = self._memory(down["params"], support)
        for part in self._parts():
            yield {"params": down["params"], "memory": memory, "mix": torch.tensor(part)}

    def _memory(self, params: Params, support: Batches) -> Params:
        rows, task = support.rows(), self.task
        kept, most = support.examples, len(rows["mask"])
        if isinstance(self.capacity, float) and self.capacity <= 1:
            kept, most = (self.capacity * kept).ceil(), math.ceil(self.capacity * most)
        elif self.capacity is not None:
            kept, most = kept.clamp(max=self.capacity), min(math.ceil(self.capacity), most)
        rows = {name: column[:most] for name, column in rows.items()}
        rows["mask"] = rows["mask"] * (torch.arange(most) < kept)  # the longest client of a chunk has more to keep
        features, targets, mask = task.items(params, rows)
        if self.votes == "predictions":
            targets = task.chosen(task.predict(params, rows)).reshape(targets.shape)
        return {"features": features, "targets": targets, "mask": mask}

    def predict(self, personal: Tree, batch: Params) -> Tensor:
        outputs: Tensor = self._mixed(personal, self._asked(personal, batch))
        return outputs

    def outputs(self, models: Iterator[Tree], parts: dict[str, Params]) -> Iterator[Params]:
        asked: dict[str, Any] = {}  # candidates differ in the mix alone: neighbours are looked up once
        for personal in models:
            asked = asked or {name: self._asked(personal, rows) for name, rows in parts.items()}
            yield {name: self._mixed(personal, said) for name, said in asked.items()}

    def _mixed(self, personal: Tree, asked: tuple[Any, Any, Tensor]) -> Any:
        outputs, vote, known = asked
        return self.task.mixed(outputs, vote, personal["mix"] * known)

    def _asked(self, personal: Tree, batch: Params) -> tuple[Any, Any, Tensor]:
        """The model's outputs for these rows, the neighbours' vote, and whether there are neighbours (1, else 0)."""
        task, memory = self.task, personal["memory"]
        outputs, queries = task.asked(personal["params"], batch)
        centre = memory["features"].mean(0)  # about it products of features lose least to rounding
        there, queries = memory["features"] - centre, queries - centre
        memory = {**memory, "features": there, "lengths": (there * there).sum(-1)}
        size = max(64, BLOCK // (len(there) + self.k * queries.shape[-1]))
        looked_up = [self._neighbours(memory, some) for some in queries.split(size)]
        targets, weights = (torch.cat(side) for side in zip(*looked_up))
        return outputs, task.vote(outputs, targets, weights), (memory["mask"].sum() > 0).float()

    def _neighbours(self, memory: Params, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Targets and weights, which sum to one, of the nearest in memory: (queries, neighbours) each."""
        features, mask = memory["features"], memory["mask"]
        # a product of matrices finds the nearest fast; their distances are then computed without its rounding
        rough = memory["lengths"] - 2 * queries @ features.mT
        nearest = rough.masked_fill(mask == 0, torch.inf).topk(min(self.k, len(mask)), largest=False).indices
        squared = ((queries[:, None] - features[nearest]) ** 2).sum(-1)
        heights = {
            "exp": lambda: -squared.sqrt(),
            "exp-squared": lambda: -squared / (queries.shape[-1] * self.scale),
            "inverse": lambda: -squared.sqrt().clamp(min=TINY).log(),
        }[self.weight]()
        # a softmax, for exp(-d) of far neighbours would vanish; of fewer than k those that are none have no weight
        heights = heights.masked_fill(mask[nearest] == 0, -torch.inf)
        return memory["targets"][nearest], heights.softmax(-1).nan_to_num(0.0)
