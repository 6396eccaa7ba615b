"""Small networks of a user's own, as a module of theirs would have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bespoke


class Block(nn.Module):
    """Two convolutions with BatchNorm, and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(inner)) + x)


class ResNet(nn.Module):
    """A residual network for images of 8 x 8."""

    def __init__(self, classes: int = 10, width: int = 4) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width)
        self.block = Block(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.block(torch.relu(self.bn(self.stem(x))))
        return self.fc(seen.mean((2, 3)))


class Dropped(nn.Module):
    """Two layers with dropout between them: vmap can run it."""

    def __init__(self, inputs: int = 6, classes: int = 3) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(inputs, 12), nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.dropout(torch.tanh(self.body(x)), 0.4, self.training))


class Normed(nn.Module):
    """Two layers with BatchNorm between them."""

    def __init__(self, inputs: int = 6, classes: int = 3) -> None:
        super().__init__()
        self.body, self.bn, self.fc = nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.bn(self.body(x))))


def balanced(outputs: Tensor, y: Tensor) -> float:
    """The mean over classes of how many of their rows are found."""
    found = [(outputs.argmax(-1)[y == label] == label).float().mean() for label in y.unique()]
    return float(torch.stack(found).mean())


def make(**options: Any) -> nn.Module:
    return Dropped(**options)


def sized(width: int = 2) -> Any:
    """A model that is described by a function of its options."""
    return bespoke.model(lambda: ResNet(width=width), head="fc", buffers="average")


averaged = bespoke.model(ResNet, head="fc", buffers="average")
private = bespoke.model(ResNet, head="fc", buffers="private")
frozen = bespoke.model(ResNet, head="fc", buffers="frozen")
unsaid = bespoke.model(ResNet, head="fc")
dropped = bespoke.model(Dropped, head="fc")
normed = bespoke.model(Normed, head="fc", buffers="average")
normed_privately = bespoke.model(lambda: Normed(3, 2), head="fc", buffers="private")
measured = bespoke.model(Dropped, head="fc", metrics={"balanced": balanced})
