"""Cross-entropy over a large vocabulary without going through memory again and again.

With thousands of words, half of a step's time goes into passes over (tokens x words) numbers that no cache holds: bias,
softmax, its gradient, a field of zeros to scatter into. Here the logits are computed once, turned into the gradient in
place, some rows at a time while they are in the cache, and kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IN_CACHE = 2**18  # numbers of a block of logits


class _HeadLoss(torch.autograd.Function):
    """sum_i weight_i * cross_entropy(features_i @ head^T + bias, target_i)."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor
    ) -> Tensor:
        logits = features @ head.mT
        total = torch.zeros(())
        rows = max(IN_CACHE // logits.shape[1], 1)
        for part, target, weight in zip(logits.split(rows), targets.split(rows), weights.split(rows)):
            if bias is not None:
                part += bias
            logs = torch.log_softmax(part, -1)
            total -= (logs.gather(1, target[:, None])[:, 0] * weight).sum()
            torch.exp(logs, out=part)
            part *= weight[:, None]
            part[torch.arange(len(target)), target] -= weight
        ctx.save_for_backward(features, head, logits)
        ctx.biased = bias is not None
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        (scale,) = grads
        features, head, slope = ctx.saved_tensors
        # the slope is the largest by far: scale what is made of it
        to_features, to_head = (slope @ head) * scale, (slope.mT @ (features * scale))
        return to_features, to_head, slope.sum(0) * scale if ctx.biased else None, None, None


def head_loss(features: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the items' losses; those of weight zero, such as padding, cost nothing."""
    live = weights > 0
    if not bool(live.all()):
        features, targets, weights = features[live], targets[live], weights[live]
    return _HeadLoss.apply(features, head, bias, targets, weights)
