"""From outputs to scores: rows in blocks, sums over rows, and metrics from sums."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke.tensors import Params, T, take, tree_map

RAREST = 1e-12  # probability of a class that no neighbour has, so that losses stay finite


def cut(rows: Params, size: int) -> list[Params]:
    """Rows in blocks of this size, of one row at least."""
    size, many = max(size, 1), len(rows["mask"])
    return [take(rows, slice(begin, begin + size)) for begin in range(0, many, size)] if many > size else [rows]


def joined(pieces: list[T]) -> T:
    """Joins values of several blocks."""
    return tree_map(lambda *parts: torch.cat(parts), *pieces) if pieces[1:] else pieces[0]


def mean_over(losses: Tensor, mask: Tensor) -> Tensor:
    """The mean over rows with mask 1."""
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)


def shares(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The weight of each class among neighbours, for each item."""
    none = torch.zeros(len(targets), outputs.shape[-1])
    return none.scatter_add(-1, targets.long(), weights).reshape(outputs.shape)


def log_mixture(outputs: Tensor, vote: Tensor, part: Tensor) -> Tensor:
    """log(part * vote + (1 - part) * softmax(outputs)), exactly the model's own log-probabilities where part is 0."""
    seen = vote.clamp(min=RAREST).log() + part.log()
    return torch.logaddexp(seen, F.log_softmax(outputs, dim=-1) + (1 - part).log())


DERIVED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {  # metrics that follow from another one's mean
    "rmse": ("mse", torch.sqrt),
    "half_mse": ("mse", lambda mse: mse / 2),
    "perplexity": ("loss", lambda loss: torch.exp(loss.clamp(max=math.log(1e30)))),
}


def sums_of(metric: str) -> tuple[str, ...]:
    """The names of the summed scores that a metric needs."""
    source = DERIVED[metric][0] if metric in DERIVED else metric
    return source, f"{source}_count", "count"


def finished(metric: str, sums: Params) -> Tensor:
    """A metric from summed scores: the mean over rows (or its own count), or a function of a mean."""
    source, finish = DERIVED.get(metric, (metric, lambda mean: mean))
    score: Tensor = finish(sums[source] / sums.get(f"{source}_count", sums["count"]))
    return score
