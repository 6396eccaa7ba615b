"""A sentence classifier on frozen word vectors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from bespoke.data.sources.formats.vectors import frozen
from bespoke.models.networks import Assembled, ModuleNetwork


class _LastOutput(nn.Module):
    def __init__(self, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, num_layers=layers, batch_first=True)

    def forward(self, embedded: Tensor) -> Tensor:
        last: Tensor = self.lstm(embedded)[0][:, -1]
        return last


@dataclass(frozen=True)
class SentimentLSTM(ModuleNetwork):
    """LSTM layers over frozen word vectors; the last output goes through a dense layer.

    As in Self-FL's Appendix G.3: two layers of 256 units on 300 dimensions, 1.1M parameters. The vectors are no
    parameters: nobody trains them, and everybody has them before the first round.
    """

    outputs: int
    vectors: str  # their name: see bespoke.data.sources.formats.vectors
    dimension: int = 300
    hidden: int = 256
    layers: int = 2

    vectorizes = False  # as LSTM

    def build(self) -> nn.Module:
        return Assembled(_LastOutput(self.dimension, self.hidden, self.layers), nn.Linear(self.hidden, self.outputs))

    def prepare(self, x: Tensor) -> Tensor:
        return F.embedding(x.long(), frozen(self.vectors))
