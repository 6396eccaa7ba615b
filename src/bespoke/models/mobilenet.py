"""MobileNetV2 (Sandler et al. 2018) with GroupNorm in place of BatchNorm, as Hsu et al. 2020 train it on Landmarks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from bespoke.models.networks import Assembled, ImageNetwork

# Expansion, channels, blocks, stride of the first block: table 2 of Sandler et al.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
FIRST, LAST = 32, 1280  # channels before and after them


def _convolution(
    inputs: int, outputs: int, norm_groups: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.GroupNorm(norm_groups, outputs),
    ]


class _InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int, norm_groups: int) -> None:
        super().__init__()
        wide = inputs * expansion
        layers: list[nn.Module] = []
        if expansion > 1:
            layers += [*_convolution(inputs, wide, norm_groups, 1), nn.ReLU6()]
        layers += [*_convolution(wide, wide, norm_groups, 3, stride, groups=wide), nn.ReLU6()]
        layers += _convolution(wide, outputs, norm_groups, 1)
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x) if self.residual else self.layers(x)
        return out


@dataclass(frozen=True)
class MobileNetV2(ImageNetwork):
    """17 inverted residual blocks, 1,280 features, 4.8M parameters with the 2,028 classes of Landmarks."""

    classes: int = 2028
    side: int = 128
    channels: int = 3
    norm_groups: int = 8  # as in Motley
    columns: int = 0

    # Channels last make the loop a quarter faster, and GroupNorm has no vmap rule for them; of this size it is looped.
    vectorizes = False

    def build(self) -> nn.Module:
        layers: list[nn.Module] = [*_convolution(self.channels, FIRST, self.norm_groups, 3, 2), nn.ReLU6()]
        before = FIRST
        for expansion, width, blocks, stride in STAGES:
            for block in range(blocks):
                step = stride if block == 0 else 1
                layers.append(_InvertedResidual(before, width, expansion, step, self.norm_groups))
                before = width
        layers += [*_convolution(before, LAST, self.norm_groups, 1), nn.ReLU6()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return Assembled(nn.Sequential(*layers), nn.Linear(LAST, self.classes))

    def prepare(self, x: Tensor) -> Tensor:
        """Pixels to -1 ... 1, as the published pipeline has them."""
        return super().prepare(x) * 2 - 1
