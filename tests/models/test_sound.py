"""FedEmbed's speech network: the printed sizes, averages taken together with convolutions, room for an embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bespoke.errors import UserError
from bespoke.models import build_task
from bespoke.models.conditioned import conditioned, diagonal_channel
from bespoke.models.sound import AveragedConv2d, FedEmbedSpeech

ABOUT = {"task": "classification", "input": "spectrogram", "classes": ["other", "preferred"], "kinds": ["a", "b"]}


def test_the_layers_have_the_sizes_that_are_printed() -> None:
    shapes = []
    seen = torch.zeros(1, 1, 200, 375)
    for layer in FedEmbedSpeech(2).body:  # type: ignore[attr-defined]
        seen = layer(seen)
        if isinstance(layer, nn.LayerNorm):
            shapes.append(tuple(layer.normalized_shape))
    assert shapes == [(16, 50, 41), (32, 7, 6), (64, 3, 3), (256,)]
    assert [type(layer) for layer in FedEmbedSpeech(2, relu=True).body].count(nn.ReLU) == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kernel", "stride", "pool", "padding", "plane"),
    [
        ((3, 5), (2, 3), (2, 3), 1, (200, 375)),
        ((5, 5), (2, 2), (3, 3), 0, (50, 41)),
        ((2, 3), (1, 2), (1, 2), 0, (7, 9)),
    ],
)
def test_a_convolution_and_the_average_after_it(kernel: Any, stride: Any, pool: Any, padding: int, plane: Any) -> None:
    both = AveragedConv2d(2, 4, kernel, stride, pool, padding)
    apart = nn.Conv2d(2, 4, kernel, stride, padding)
    apart.load_state_dict(both.state_dict())  # the same parameters, of the same names
    x = torch.rand(3, 2, *plane)
    expected = nn.functional.avg_pool2d(apart(x), pool)
    torch.testing.assert_close(both(x), expected)
    slopes = [
        torch.autograd.grad(y.square().sum(), layer.weight)[0] for y, layer in ((both(x), both), (expected, apart))
    ]
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-4)


def test_rows_are_stored_with_frames_first() -> None:
    network = FedEmbedSpeech(2, 135, 83)
    x = torch.zeros(2, 135, 83, dtype=torch.uint8)
    x[1, 7, 3] = 255  # frame 7, band 3
    prepared = network.prepare(x.flatten(1))
    assert prepared.shape == (2, 1, 83, 135)
    assert prepared[1, 0, 3, 7] == 2
    assert prepared.sum() == -2 * 2 * 83 * 135 + 4


def test_the_embedding_is_a_channel_and_joins_the_features() -> None:
    wide = conditioned(FedEmbedSpeech(2), 200)
    params = wide.init(0)
    assert params["head.weight"].shape == (2, 456)  # and not 92
    assert params["features.0.weight"].shape == (16, 2, 3, 5)
    params["embedding"] = torch.rand(200)
    x = torch.randint(0, 256, (3, 75_000), dtype=torch.uint8)
    channel = diagonal_channel(params["embedding"], (200, 375))
    assert channel[199, 199] == params["embedding"][199]
    assert channel[:, 200:].abs().max() == 0
    layers = FedEmbedSpeech(2, channels=2).body  # by hand: two channels, layer by layer
    layers.load_state_dict({n.removeprefix("features."): p for n, p in params.items() if n.startswith("features.")})
    both = torch.cat([wide.plain.prepare(x), channel.expand(3, 1, -1, -1)], 1)
    expected = torch.cat([layers(both), params["embedding"].expand(3, -1)], 1)
    torch.testing.assert_close(wide.features(params, x), expected, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit() -> None:
    small = {**ABOUT, "frames": 140, "bands": 100}
    assert build_task(small, "fedembed-speech", relu=True).network == FedEmbedSpeech(2, 140, 100, relu=True)
    with pytest.raises(
        UserError, match=r"size = 101 does not fit the diagonal of images of 100 x 140; use at most 100"
    ):
        conditioned(FedEmbedSpeech(2, 140, 100), 101)
    for frames, bands in ((134, 83), (135, 82)):
        with pytest.raises(UserError, match=rf"{bands} bands x {frames} frames are too few for it: 83 x 135 at least"):
            build_task({**ABOUT, "frames": frames, "bands": bands}, "fedembed-speech")
    with pytest.raises(UserError, match=r"'fedembed-speech' is for rows of the kind 'spectrogram'"):
        build_task({"task": "classification", "features": ["a"], "classes": ["a", "b"]}, "fedembed-speech")
