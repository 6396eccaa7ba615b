"""Cross-entropy over a large vocabulary, computed in blocks that stay in the processor's cache.

With thousands of words, half of a step's time goes into passes over (tokens x words) numbers that no cache holds: bias,
softmax, its gradient, a field of zeros to scatter into, and the gradient of the head, as large as the head itself. Here
the logits are computed once and turned into the gradient in place, some rows at a time while they are in the cache. In
plain SGD (`Head`) the bias is a column of the head, and the head takes up its gradient as that is computed.

Under autocast the three products are computed in bfloat16; the softmax between them, and what they are added to, stay
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

IN_CACHE = 2**18  # numbers of a block of logits
WORDS = 2**11  # words whose logits are computed at once
HELD = 2**22  # logits that are held at once where nothing but the loss is wanted
SPARE = 16  # numbers at the end of a descending head's rows
RAREST = 1e-38  # a word less likely than this counts as this likely in the loss; its gradient is exact


def low_products(numbers: Tensor) -> bool:
    """Whether products are to be computed in bfloat16."""
    kind = numbers.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def own_precision(numbers: Tensor) -> AbstractContextManager[object]:
    """Within it products are computed in the precision of what is multiplied."""
    kind = numbers.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _block(words: int, numbers: Tensor) -> int:
    """How many rows of logits are taken at once: what a core's cache holds, elsewhere what memory holds."""
    return max((IN_CACHE if numbers.device.type == "cpu" else HELD) // words, 1)


def _product(left: Tensor, right: Tensor, low: bool) -> Tensor:
    """left @ right in float32, or in bfloat16 and put back into float32."""
    with own_precision(left):
        return (left.bfloat16() @ right.bfloat16()).float() if low else left.float() @ right.float()


def _logits(features: Tensor, head: Tensor, low: bool) -> Tensor:
    """features @ head^T, some words at a time: of tens of thousands at once MKL's product takes half as long again."""
    if low:
        return _product(features, head.mT, low)
    found = torch.empty(len(features), len(head))
    with own_precision(features):
        for words, some in zip(head.split(WORDS), found.split(WORDS, 1)):
            torch.mm(features.float(), words.mT, out=some)
    return found


class _HeadLoss(torch.autograd.Function):
    """sum_i weight_i * cross_entropy(features_i @ head^T + bias, target_i)."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor
    ) -> Tensor:
        ctx.low = low_products(features)
        logits = _logits(features, head, ctx.low)
        total = torch.zeros(())
        numbers = torch.arange(len(targets))
        rows = _block(len(head), logits)
        for part, target, weight in zip(logits.split(rows), targets.split(rows), weights.split(rows)):
            if bias is not None:
                part += bias
            torch.softmax(part, -1, out=part)
            at_target = numbers[: len(part)], target
            total -= (part[at_target].clamp(min=RAREST).log() * weight).sum()
            part[at_target] -= 1
            part *= weight[:, None]
        ctx.save_for_backward(features, head, logits)
        ctx.biased = bias is not None
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (scale,) = grads
        features, head, slope = ctx.saved_tensors
        # the slope is the largest by far: scale what is made of it
        to_features = to_head = None  # of a frozen model's features or head nobody wants it
        if ctx.needs_input_grad[0]:
            to_features = _product(slope, head, ctx.low) * scale
        if ctx.needs_input_grad[1]:
            to_head = _product(slope.mT, features * scale, ctx.low)
        biased = ctx.biased and ctx.needs_input_grad[2]
        return to_features, to_head, slope.sum(0) * scale if biased else None, None, None


_head_loss: Callable[..., Tensor] = _HeadLoss.apply  # torch does not annotate it


def head_loss(features: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the items' losses; those of weight zero, such as padding, cost nothing."""
    live = weights > 0
    if not bool(live.all()):
        features, targets, weights = features[live], targets[live], weights[live]
    return _head_loss(features, head, bias, targets, weights)


def head_slopes(features: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each item's loss and its gradient at the features, of a head that is held; logits are held in blocks.

    A head in bfloat16 has its products computed so; the softmax between them is float32.
    """
    losses, slopes = torch.empty(len(targets)), torch.empty(len(targets), features.shape[1])
    held, inside, low = max(HELD // len(head), 1), _block(len(head), features), head.dtype == torch.bfloat16
    numbers = torch.arange(inside)
    for begin in range(0, len(targets), held):
        some = slice(begin, begin + held)
        with own_precision(features):
            logits = features[some].to(head.dtype) @ head.mT if low else _logits(features[some], head, low)
        for part, target, loss in zip(logits.split(inside), targets[some].split(inside), losses[some].split(inside)):
            likely = part.float()  # itself, if it is float32
            if bias is not None:
                likely += bias
            torch.softmax(likely, -1, out=likely)
            at_target = numbers[: len(part)], target
            loss.copy_(-likely[at_target].clamp(min=RAREST).log())
            likely[at_target] -= 1
            if low:
                part.copy_(likely)
        with own_precision(features):
            slopes[some] = logits @ head
    return losses, slopes


def head_judged(features: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Each item's loss, and 1 where the likeliest word is the target, else 0: (2, items). Logits are held in blocks."""
    rows = max(HELD // len(head), 1)
    found = [torch.zeros(2, 0)]
    for part, target in zip(features.split(rows), targets.split(rows)):
        logits = part @ head.mT if bias is None else torch.addmm(bias, part, head.mT)
        losses = logits.logsumexp(-1) - logits.gather(-1, target[:, None])[:, 0]
        found.append(torch.stack([losses, (logits.argmax(-1) == target).float()]))
    return torch.cat(found, 1)


def head_words(
    features: Tensor, head: Tensor, bias: Tensor | None, words: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Log-probabilities of some words for each item, that of the likeliest word, and which it is."""
    rows, found = max(HELD // len(head), 1), []
    for part, some in zip(features.split(rows), words.split(rows)):
        logits = part @ head.mT if bias is None else torch.addmm(bias, part, head.mT)
        whole, (best, place) = logits.logsumexp(-1, keepdim=True), logits.max(-1, keepdim=True)
        found.append((logits.gather(-1, some) - whole, best - whole, place))
    values, best, place = (torch.cat(side) for side in zip(*found))
    return values, best, place


class Head:
    """A head that descends: weight and bias side by side, a row a word."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        words, self.width = weight.shape
        self.biased = bias is not None
        # rows some numbers longer than they need be: products are up to a tenth faster where rows do not all begin at
        # the same place of a cache's lines
        rows = weight.new_empty(words, self.width + SPARE)
        rows[:, : self.width] = weight
        if bias is not None:
            rows[:, self.width] = bias
        self.weight, self.bias = rows[:, : self.width], rows[:, self.width]
        self.rows = rows[:, : self.width + self.biased]

    def step(self, features: Tensor, targets: Tensor, counted: Tensor, rate: float, low: bool = False) -> Tensor:
        """One step of SGD on the mean loss of the counted items; returns its gradient at the features, before it."""
        if not bool(counted.all()):
            to_features = torch.zeros_like(features)
            if bool(counted.any()):
                some = torch.ones(int(counted.sum()), dtype=torch.bool)
                to_features[counted] = self.step(features[counted], targets[counted], some, rate, low)
            return to_features
        inputs = torch.cat([features, torch.ones(len(features), 1)], 1) if self.biased else features
        share = -rate / len(targets)  # the slope of the mean: divided here, not there
        if low:
            return self._low_step(inputs.bfloat16(), targets, share) / len(targets)
        slope = _logits(inputs, self.rows, low)
        rows = _block(len(self.rows), slope)
        numbers = torch.arange(rows)
        for part, target in zip(slope.split(rows), targets.split(rows)):
            torch.softmax(part, -1, out=part)
            part[numbers[: len(part)], target] -= 1
        to_features = slope @ self.weight
        self.rows.addmm_(slope.mT, inputs, alpha=share)
        return to_features / len(targets)

    def _low_step(self, inputs: Tensor, targets: Tensor, share: float) -> Tensor:
        """The step with its products in bfloat16. What is put back into float32 is so in blocks that a cache holds."""
        head = self.rows.bfloat16()
        slope = inputs @ head.mT
        rows = _block(len(head), slope)
        numbers = torch.arange(rows)
        for part, target in zip(slope.split(rows), targets.split(rows)):
            likely = torch.softmax(part, -1, dtype=torch.float32)
            likely[numbers[: len(part)], target] -= 1
            part.copy_(likely)
        to_features = (slope @ head[:, : self.width]).float()
        for words, some in zip(self.rows.split(WORDS), slope.split(WORDS, 1)):
            words.add_(some.mT @ inputs, alpha=share)
        return to_features

    def params(self) -> dict[str, Tensor]:
        """Weight and bias as they lie here: a copy would be as large as the head."""
        return {"head.weight": self.weight, **({"head.bias": self.bias} if self.biased else {})}
