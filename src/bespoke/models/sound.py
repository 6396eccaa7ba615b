"""Networks for spectrograms, whose rows are stored as (frames, bands)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bespoke.models.networks import Assembled, ImageNetwork, ModuleNetwork, Network, channels_last, kernels_last
from bespoke.tensors import Params


class _PlaceMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # as pooling to 1 x 1, for which vmap has no rule
        return x.mean((-2, -1))


@dataclass(frozen=True)
class SpectrogramCNN(ModuleNetwork):
    """Four 3 x 3 convolutions, each pooled, and the mean over the remaining times and pitches: 15,300 parameters.

    It is a small variant of the wake-word network of Self-FL (convolutions and poolings, 3M parameters). GroupNorm
    comes after pooling, where it costs a quarter; without it, training takes four times as many steps.
    """

    outputs: int
    frames: int
    bands: int
    width: int = 8  # channels of the first layer; the next have two, four and four times as many
    norm_groups: int = 4

    def build(self) -> nn.Module:
        layers: list[nn.Module] = []
        channels = [1, self.width, 2 * self.width, 4 * self.width, 4 * self.width]
        for before, after in pairwise(channels):
            convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
            layers += [convolution, nn.MaxPool2d(2), nn.GroupNorm(self.norm_groups, after), nn.ReLU()]
        body = nn.Sequential(*layers, _PlaceMean())
        return Assembled(body, nn.Linear(channels[-1], self.outputs))

    def prepare(self, x: Tensor) -> Tensor:
        return channels_last(4 * super().prepare(x).reshape(-1, 1, self.frames, self.bands) - 2)  # about -2 to 2

    def features(self, params: Params, x: Tensor) -> Tensor:
        return super().features(kernels_last(params), x)


def _averaging(kernel: int, stride: int, pool: int) -> Tensor:
    """A matrix that maps a kernel to the average of `pool` of its shifts by `stride`."""
    places = torch.arange(kernel + stride * (pool - 1))[:, None] - torch.arange(kernel)
    return ((places >= 0) & (places < stride * pool) & (places % stride == 0)).float() / pool


class AveragedConv2d(nn.Conv2d):
    """A convolution and the average over `pool` of its outputs, in one: both are linear.

    The average of shifted kernels, at strides multiplied, gives the same numbers from fewer products, without the large
    picture between them: a step of FedEmbedSpeech takes 0.4 of the time at 200 x 375, 0.6 at 100 x 140.
    """

    def __init__(
        self,
        before: int,
        after: int,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        pool: tuple[int, int],
        padding: int = 0,
    ) -> None:
        super().__init__(before, after, kernel, (stride[0] * pool[0], stride[1] * pool[1]), padding)
        self.lines, self.columns = _averaging(kernel[0], stride[0], pool[0]), _averaging(kernel[1], stride[1], pool[1])

    def spread(self, weight: Tensor) -> Tensor:
        """The kernel that does both."""
        return self.lines @ weight @ self.columns.mT

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, channels_last(self.spread(self.weight)), self.bias, self.stride, self.padding)


@dataclass(frozen=True)
class FedEmbedSpeech(ImageNetwork):
    """The speech network of FedEmbed's Appendix B.2: three convolutions and a dense layer, each with LayerNorm.

    Bytes are taken to -2 ... 2: from 0 ... 1 it took twice as many steps to tell voices apart.

    Its sizes add up to the printed ones on spectrograms of 200 bands and 375 frames (16 x 50 x 41, 32 x 7 x 6 and
    64 x 3 x 3, hence 576) if the first convolution is padded by one, which is not printed. Smaller spectrograms do as
    well, from 83 x 135 on. The heads cannot have the printed 92 inputs, those of MNIST's network: 256 features and an
    embedding of 200 are 456. As printed it has no activations; `relu` puts one after each LayerNorm.
    """

    classes: int = 2
    frames: int = 375
    bands: int = 200
    channels: int = 1
    relu: bool = False

    def __post_init__(self) -> None:
        if min(self._sizes()[-1]) < 1:
            raise ValueError(f"{self.bands} bands x {self.frames} frames are too few for it: 83 x 135 at least")
        super().__post_init__()

    @property
    def plane(self) -> tuple[int, int]:
        return self.bands, self.frames

    def prepare(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.frames, self.bands).transpose(1, 2).contiguous()  # stored with frames first
        return channels_last(4 * Network.prepare(self, rows)[:, None] - 2)  # about -2 to 2, as SpectrogramCNN's

    def _sizes(self) -> list[tuple[int, int]]:
        """Lines and columns after each of the three LayerNorms."""
        one = ((self.bands - 1) // 2 + 1) // 2, ((self.frames - 3) // 3 + 1) // 3
        two = ((one[0] - 5) // 2 + 1) // 3, ((one[1] - 5) // 2 + 1) // 3
        return [one, two, ((two[0] - 3) // 2 + 1, (two[1] - 2) // 2 + 1)]

    def build(self) -> nn.Module:
        one, two, three = self._sizes()
        layers = [
            [AveragedConv2d(self.channels, 16, (3, 5), (2, 3), (2, 3), padding=1), nn.LayerNorm([16, *one])],
            [AveragedConv2d(16, 32, (5, 5), (2, 2), (3, 3)), nn.LayerNorm([32, *two])],
            [nn.Conv2d(32, 64, (3, 2), 2), nn.LayerNorm([64, *three])],
            [nn.Flatten(), nn.Linear(64 * three[0] * three[1], 256), nn.LayerNorm([256])],
        ]
        between = [nn.ReLU()] if self.relu else []
        features = nn.Sequential(*(layer for group in layers for layer in (*group, *between)))
        return Assembled(features, nn.Linear(256, self.classes))
