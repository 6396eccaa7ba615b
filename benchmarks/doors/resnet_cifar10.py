"""ResNet-18 with BatchNorm for images of 32 x 32 (He et al., CVPR 2016; its form for CIFAR: a first layer of 3 x 3).

Named by resnet_cifar10.toml and resnet_cifar10_small.toml. `width` is that of the first layer: 64 in the paper, 11.2M
parameters; the work grows with its square.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import bespoke
from bespoke.data.partition import dirichlet
from bespoke.randomness import generator


class Block(nn.Module):
    """Two convolutions with BatchNorm, and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        around = [nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)]
        self.around = nn.Sequential(*(around if stride > 1 or before != after else []))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(inner)) + self.around(x))


class ResNet18(nn.Module):
    """Four stages of two blocks each; all but the first halve the image and double the channels."""

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = []
        for place in range(4):
            before, after = sizes[place], sizes[place + 1]
            blocks += [Block(before, after, 1 if place == 0 else 2), Block(after, after, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.blocks(torch.relu(self.bn(self.conv(x))))
        logits: Tensor = self.fc(seen.mean((2, 3)))
        return logits


def some(labels: NDArray[np.int64], clients: int, seed: int, alpha: float) -> NDArray[np.int64]:
    """A partitioner: 300 images a client, drawn at random and dealt out by a Dirichlet distribution."""
    drawn = generator("resnet cifar10", seed).choice(len(labels), 300 * clients, replace=False)
    owner = np.full(len(labels), -1)
    owner[drawn] = dirichlet(labels[drawn], clients, alpha, seed, minimum=50)
    return owner


averaged = bespoke.model(ResNet18, head="fc", buffers="average")
private = bespoke.model(ResNet18, head="fc", buffers="private")
