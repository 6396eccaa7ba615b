"""Networks that take an embedding of the client as a further input, and networks reduced to their last layer.

FedEmbed joins an embedding e to a network's input and to its features. For a row of a table, e becomes further columns;
for an image, one further channel with e on its diagonal (Section 4 of the paper).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from bespoke.errors import UserError
from bespoke.models.networks import ImageNetwork, Linear, Network, channels_last
from bespoke.models.sound import AveragedConv2d
from bespoke.tensors import Params


@dataclass(frozen=True)
class Conditioned(Network):
    """A network with an embedding as further input of its first layers (`wide`) and of its last layer.

    Its parameters are those of `wide` without the last layer, one affine `head`, and the `embedding`.
    """

    plain: Network
    wide: Network
    size: int  # of the embedding
    width: int  # of the features
    outputs: int

    last_layer = ("head.",)

    @property
    def vectorizes(self) -> bool:  # type: ignore[override]
        return self.wide.vectorizes

    def init(self, seed: int) -> Params:
        body = {name: p for name, p in self.wide.fresh(seed).items() if not name.startswith(self.wide.last_layer)}
        head = {f"head.{name}": p for name, p in self.new_head(self.outputs, seed).items()}
        return {**body, **head, "embedding": torch.full((self.size,), 0.5)}

    def new_head(self, outputs: int, seed: int) -> Params:
        """A random affine layer above the joined features, initialized like torch.nn.Linear."""
        return Linear(self.width + self.size, outputs).fresh(seed)

    def body(self, plain: Params, seed: int) -> Params:
        """A body that starts with a plain network's parameters; the embedding's additional ones are drawn."""
        body = self.wide.fresh(seed)
        for name, wide in body.items():
            if name in plain:
                wide[tuple(slice(0, length) for length in plain[name].shape)] = plain[name]
        return {name: p for name, p in body.items() if not name.startswith(self.wide.last_layer)}

    def features(self, params: Params, x: Tensor) -> Tensor:
        embedding, rows = params["embedding"], self.plain.prepare(x)
        beside = embedding.expand(len(rows), -1)
        if isinstance(self.wide, ImageNetwork):
            features = _image_features(self.wide, params, rows, embedding)
        else:
            features = self.wide.features(params, torch.cat([rows.flatten(1), beside], 1))
        return torch.cat([features, beside], 1)

    def head(self, params: Params, features: Tensor) -> Tensor:
        return affine(params, "head", features)


def affine(params: Params, name: str, features: Tensor) -> Tensor:
    return features @ params[f"{name}.weight"].mT + params[f"{name}.bias"]


def diagonal_channel(embedding: Tensor, plane: tuple[int, int]) -> Tensor:
    """A channel with the embedding on its diagonal, zeros elsewhere."""
    size = embedding.shape[-1]
    return F.pad(torch.diag_embed(embedding), (0, plane[1] - size, 0, plane[0] - size))


def _image_features(wide: ImageNetwork, params: Params, images: Tensor, embedding: Tensor) -> Tensor:
    """The features of images with the embedding for a further channel.

    The channel is the same for all of a client's images, and the first layer is a convolution, which is linear. So the
    channel is convolved once and added to every image, which saves the gradient of every image's input.
    """
    layers: Any = wide.body
    first, channels = layers[0], images.shape[1]
    own = {name.removeprefix("features."): p for name, p in params.items() if name.startswith("features.")}
    weight, how = own["0.weight"], (first.stride, first.padding)
    if isinstance(first, AveragedConv2d):
        weight = first.spread(weight)
    seen = F.conv2d(images, channels_last(weight[:, :channels]), own.get("0.bias"), *how)
    seen = seen + F.conv2d(diagonal_channel(embedding, wide.plane)[None, None], weight[:, channels:], None, *how)
    for place, layer in enumerate(layers):
        if place:
            mine = {n.removeprefix(f"{place}."): p for n, p in own.items() if n.startswith(f"{place}.")}
            seen = functional_call(
                layer, {n: channels_last(p) if p.dim() == 4 else p for n, p in mine.items()}, (seen,)
            )
    return seen


@cache  # building a module draws random numbers, which vmap does not allow, so it is built once, before
def conditioned(network: Any, size: int) -> Conditioned:
    """The network with an embedding of this size."""
    named = {entry.name for entry in fields(network)}
    last = [p for name, p in network.init(0).items() if name.startswith(network.last_layer)]
    weight = next((p for p in last if p.dim() == 2), None)
    if weight is None or not named & {"inputs", "channels"}:
        raise UserError(
            f"fedembed joins an embedding to rows of a table or to images; {type(network).__name__} takes neither; use "
            "another model, or another method"
        )
    if "inputs" in named:
        grown = size if network.is_linear else 0  # a linear model's features are its inputs
        wide = replace(network, inputs=network.inputs + size)
        return Conditioned(network, wide, size, weight.shape[1] + grown, len(weight))
    if size > min(network.plane):
        raise UserError(
            f"an embedding of size = {size} does not fit the diagonal of images of {network.plane[0]} x "
            f"{network.plane[1]}; use at most {min(network.plane)}"
        )
    wide = replace(network, channels=network.channels + 1)
    return Conditioned(network, wide, size, weight.shape[1], len(weight))


@dataclass(frozen=True)
class LastLayer(Network):
    """The last layer of a network alone, whose inputs are features."""

    whole: Network

    @property
    def last_layer(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.whole.last_layer

    @property
    def vectorizes(self) -> bool:  # type: ignore[override]
        return self.whole.vectorizes

    def features(self, params: Params, x: Tensor) -> Tensor:
        return x

    def head(self, params: Params, features: Tensor) -> Tensor:
        return self.whole.head(params, features)
