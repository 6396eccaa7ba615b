"""A Transformer (Vaswani et al. 2017) for next-word prediction, in the sizes of Motley's TedMulti."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bespoke.models.networks import Assembled, ModuleNetwork
from bespoke.tensors import Params


class _Attention(nn.Module):
    """Causal self-attention, written out: torch's fused kernels have no rule for vmap on a CPU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        def split(part: Tensor) -> Tensor:
            heads: Tensor = part.unflatten(-1, (self.heads, -1))
            return heads.transpose(-2, -3)  # (batch, heads, length, width / heads)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        match = query @ key.mT / math.sqrt(query.shape[-1])
        later = torch.ones(match.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weights = match.masked_fill(later, -torch.inf).softmax(-1)
        out: Tensor = self.out((weights @ value).transpose(-2, -3).flatten(-2))
        return out


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention = _Attention(width, heads)
        self.dense = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.after_attention, self.after_dense = nn.LayerNorm(width, 1e-6), nn.LayerNorm(width, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.after_attention(x + self.attention(x))
        out: Tensor = self.after_dense(x + self.dense(x))
        return out


def positions(length: int, width: int) -> Tensor:
    """sin and cos of position / 10000^(2i / width), one after the other."""
    rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[:, :width]


@dataclass(frozen=True)
class Transformer(ModuleNetwork):
    """Embedding, blocks of causal attention, and the embedding again as the last layer, at every position.

    Motley's sizes are the defaults: 4.8M parameters with the 15,818 tokens of TedMulti, features of the embedding's
    width. Its dropout is left out, as in the other networks: a client's update shall depend on its data alone.
    """

    vocabulary: int
    embedding: int = 96
    width: int = 512  # of the blocks
    hidden: int = 2048  # of their dense layers
    heads: int = 8
    layers: int = 1

    tied = True

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} has to be a multiple of heads = {self.heads}")
        super().__post_init__()

    def build(self) -> nn.Module:
        body = nn.Sequential(
            nn.Linear(self.embedding, self.width),
            *(_Block(self.width, self.hidden, self.heads) for _ in range(self.layers)),
            nn.Linear(self.width, self.embedding),
        )
        head = nn.Linear(self.embedding, self.vocabulary, bias=False)
        nn.init.uniform_(head.weight, -0.05, 0.05)
        return Assembled(body, head)

    def prepare(self, x: Tensor) -> Tensor:
        return x.long()

    def features(self, params: Params, x: Tensor) -> Tensor:
        """The embedding is the last layer's weight: one table serves both ends."""
        embedded = F.embedding(self.prepare(x), params["head.weight"]) * math.sqrt(self.embedding)
        return self._part("features", params, embedded + positions(x.shape[-1], self.embedding).to(embedded))
