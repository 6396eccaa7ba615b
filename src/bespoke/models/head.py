"""The task of a frozen language model whose last layer is learned; all layers below it stay fixed.

The representation of a text does not depend on the head, so it is computed once and cached (models/frozen.py). Memory
holds the logits of some tokens at a time. A bias of the last layer is not learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke.models.fast.token_loss import head_judged, head_loss
from bespoke.models.frozen import NOTHING
from bespoke.models.language import ITEMS
from bespoke.models.prefix import PrefixLM
from bespoke.models.scores import cut, joined
from bespoke.tensors import Params


@dataclass(frozen=True)
class HeadLM(PrefixLM):
    """The next token of texts; `head` (heads, words, width) has one for each context (a batch's `context`), or one."""

    own_head = True
    batches_clients = False  # a head for each client of a chunk would be too large, so clients are run one by one

    def with_head(self) -> PrefixLM:
        return self

    def init(self, seed: int) -> Params:
        """The pretrained head, whatever the seed."""
        return {"head": self.network.layer()[0][None].clone()}

    def fresh(self, seed: int) -> Params:
        """The pretrained head with some noise, because models with the same start would stay the same."""
        head, generator = self.network.layer()[0][None], torch.Generator().manual_seed(seed)
        return {"head": head + 0.1 * head.std() * torch.randn(head.shape, generator=generator)}

    def work(self, x: Tensor) -> int:
        return PrefixLM(self.network).work(x)

    def _heads(self, params: Params, batch: Params) -> list[tuple[Tensor, Tensor]]:
        """Each head, and a mask of its rows."""
        heads, mask = params["head"], batch["mask"]
        if len(heads) == 1:
            return [(heads.flatten(0, 1), torch.ones_like(mask))]  # a view: a gradient for it needs no copy
        return [(head, (batch["context"] == place).float()) for place, head in enumerate(heads.unbind(0))]

    def loss(self, params: Params, batch: Params) -> Tensor:
        targets, tokens = self._targets(batch), self._tokens(batch)
        seen, words = self.network.seen(batch["x"], targets).flatten(0, 1), targets.clamp(min=0).flatten()
        bias, total = self.network.layer()[1], torch.zeros(())
        for head, rows in self._heads(params, batch):
            weights = (tokens * rows[:, None]).flatten()
            if self.how == "autograd":
                total = total + head_loss(seen, head, bias, words, weights)
            else:
                losses = -F.log_softmax(self._said(seen, head), -1).gather(-1, words[:, None])[:, 0]
                total = total + (losses * weights).sum()
        return self._penalized(total / tokens.sum().clamp(min=1.0), params)

    def _said(self, seen: Tensor, head: Tensor) -> Tensor:
        bias = self.network.layer()[1]
        return seen @ head.mT if bias is None else seen @ head.mT + bias

    def features(self, params: Params, batch: Params) -> Tensor:
        return self.network.hidden(torch.zeros(len(batch["x"]), 0, self.network.width), batch["x"])

    def predict(self, params: Params, batch: Params) -> Tensor:
        """All logits; without contexts or a mask the first head's, as in an exported model that is asked."""
        heads, seen = params["head"], self.features(params, batch)
        if len(heads) == 1 or "context" not in batch:
            return self._said(seen, heads[0])
        said = [self._said(seen, head) * rows[:, None, None] for head, rows in self._heads(params, batch)]
        return torch.stack(said).sum(0)

    def judged(self, params: Params, rows: Params) -> Params:
        """Each token's loss and whether it is the likeliest; given tokens are skipped."""
        bias, pieces = self.network.layer()[1], []
        for block in cut(rows, ITEMS // rows["x"].shape[-1]):
            targets = self._targets(self.scored_rows(block))
            seen = self.network.seen(block["x"], targets)
            scores = torch.zeros(*targets.shape, 2)
            for head, mine in self._heads(params, block):
                counted = (targets != NOTHING) & (mine[:, None] > 0)
                if self.how == "autograd":
                    scores[counted] = head_judged(seen[counted], head, bias, targets[counted]).mT
                else:
                    found = head_judged(seen.flatten(0, 1), head, bias, targets.clamp(min=0).flatten())
                    scores = torch.where(counted[..., None], found.mT.reshape(*counted.shape, 2), scores)
            pieces.append({"losses": scores[..., 0], "right": scores[..., 1]})
        return joined(pieces)
