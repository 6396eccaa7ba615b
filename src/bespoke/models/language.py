"""Language models: the next token at every position, for vocabularies whose outputs do not fit in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke.errors import UserError
from bespoke.models.fast.token_loss import Head, head_judged, head_loss
from bespoke.models.own_metric import Metric
from bespoke.models.scores import cut, joined, log_mixture, shares
from bespoke.models.task import BaseTask
from bespoke.tensors import Params

ITEMS = 2**12  # tokens whose features are in memory at once if outputs are not stored


@dataclass(frozen=True)
class LanguageModel(BaseTask):
    """The next token at every position; `padding` targets count neither in the loss nor in the score.

    Targets `unscored` are learned but do not count in the accuracy: Motley leaves out unknown words and sentence ends.
    """

    padding: int = 0
    unscored: tuple[int, ...] = ()
    metrics: tuple[str, ...] = ("accuracy", "loss", "perplexity")
    lower_is_better: tuple[str, ...] = ("loss", "perplexity", "bits_per_character")

    def with_metrics(self, own: tuple[Metric, ...], centre: float = 0.0) -> Self:
        if own:
            raise UserError(
                f"the metric {own[0].name} takes all outputs of a client's rows, and those of a language model are too "
                "many to be held at once; use accuracy, loss or perplexity"
            )
        return self

    def _tokens(self, batch: Params) -> Tensor:
        return (batch["y"] != self.padding).float() * batch["mask"][..., None]

    def items(self, params: Params, batch: Params) -> tuple[Tensor, Tensor, Tensor]:
        """Every token except padding is an item."""
        return self.features(params, batch).flatten(0, 1), batch["y"].flatten(), self._tokens(batch).flatten()

    def chosen(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def vote(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return shares(outputs, targets, weights)

    def mixed(self, outputs: Tensor, vote: Tensor, part: Tensor) -> Tensor:
        return log_mixture(outputs, vote, part)

    def loss(self, params: Params, batch: Params) -> Tensor:
        tokens = self._tokens(batch)
        total = None
        if self.how == "autograd":
            total = self._total(params, self.features(params, batch).flatten(0, 1), batch["y"].long(), tokens)
        if total is None:
            total = (self.judge(self.predict(params, batch), batch)["losses"] * tokens).sum()
        return self._penalized(total / tokens.sum().clamp(min=1.0), params)

    def _total(self, params: Params, features: Tensor, y: Tensor, tokens: Tensor) -> Tensor | None:
        """The sum of the tokens' losses, without padding and in place, which torch.func cannot do."""
        layer = self.network.output_layer(params)
        if layer is not None:
            return head_loss(self.network.before_output(params, features), *layer, y.flatten(), tokens.flatten())
        live = tokens.flatten() > 0
        losses = self.network.item_losses(params, features[live], y.flatten()[live])
        return None if losses is None else losses.sum()

    def descend(
        self, params: Params, batches: Any, lr: Any, decay: Any, anchor: Params | None, pull: Any
    ) -> Params | None:
        """Plain SGD on one client without storing the head's gradient, the largest part with a large vocabulary."""
        plain = isinstance(lr, float) and not decay and not self.l2 and anchor is None and not self.safe
        if self.how != "autograd" or not plain or self.network.tied or "head.weight" not in params:
            return None
        head = Head(params["head.weight"], params.get("head.bias"))
        body = {name: p.clone() for name, p in params.items() if name not in ("head.weight", "head.bias")}
        table, low = body.get(self.network.table), self.precision == "bf16"
        for step in range(len(batches)):
            batch, rate = batches[step], lr * float(batches.live(step))
            moving = {n: p.detach().requires_grad_() for n, p in body.items() if p is not table}
            with self.lowered(params):
                if table is None:
                    features = self.network.features(moving, batch["x"]).flatten(0, 1)
                else:  # of a table of words, only the rows of these words change
                    tokens = self.network.prepare(batch["x"])
                    moving[""] = F.embedding(tokens, table).requires_grad_()
                    features = self.network.after_lookup(moving, moving[""]).flatten(0, 1)
            counted = self._tokens(batch).flatten() > 0
            slope = head.step(features.detach().float(), batch["y"].long().flatten(), counted, rate, low)
            slope = slope.to(features.dtype)
            for name, gradient in zip(moving, torch.autograd.grad(features, list(moving.values()), slope)):
                if name:
                    body[name].sub_(gradient, alpha=rate)
                elif table is not None:
                    table.index_add_(0, tokens.flatten(), gradient.flatten(0, 1), alpha=-rate)
        moved = body | head.params()
        return {name: moved[name] for name in params}

    def row_numbers(self, x: Tensor) -> int:
        return x.shape[1:].numel() * getattr(self.network, "vocabulary", 1)

    def judge(self, outputs: Any, rows: Params) -> Params:
        """Each token's loss, and whether the likeliest is right; judged outputs are returned unchanged."""
        if isinstance(outputs, dict):
            return outputs
        losses = -F.log_softmax(outputs, dim=-1).gather(-1, rows["y"].long()[..., None])[..., 0]
        return {"losses": losses, "right": (outputs.argmax(-1) == rows["y"]).float()}

    def judged(self, params: Params, rows: Params) -> Params:
        layer = self.network.output_layer(params)
        if layer is None:
            judged: Params = super().judged(params, rows)
            return judged
        pieces = []
        for block in cut(rows, ITEMS // rows["x"].shape[1:].numel()):  # a client may have no row in a part
            features = self.network.before_output(params, self.features(params, block).flatten(0, 1))
            targets, counted = block["y"].long().flatten(), self._tokens(block).flatten() > 0
            shape = block["y"].shape
            if self.how == "autograd":  # skips padding; under vmap every client has its own
                found = torch.zeros(2, len(targets))
                found[:, counted] = head_judged(features[counted], *layer, targets[counted])
            else:
                found = head_judged(features, *layer, targets)
            pieces.append({"losses": found[0].reshape(shape), "right": found[1].reshape(shape)})
        return joined(pieces)

    def score(self, outputs: Any, batch: Params) -> Params:
        tokens, judged = self._tokens(batch), self.judge(outputs, batch)
        scored = tokens
        for token in self.unscored:
            scored = scored * (batch["y"] != token)
        loss = (judged["losses"] * tokens).sum()
        sums = {"accuracy": (judged["right"] * scored).sum(), "accuracy_count": scored.sum()}
        if "characters" in batch:  # an unknown word is one token, so the cost of its spelling is added
            sums["bits_per_character"] = loss / math.log(2) + (batch["spelling"] * batch["mask"]).sum()
            sums["bits_per_character_count"] = (batch["characters"] * batch["mask"]).sum()
        return {**sums, "loss": loss, "count": tokens.sum()}

    def row_metric(self, metric: str) -> str | None:
        return "loss"

    def row_values(self, outputs: Any, batch: Params, metric: str) -> Tensor:
        """The loss of each sentence, summed over its tokens."""
        return (self.judge(outputs, batch)["losses"] * self._tokens(batch)).sum(-1)
