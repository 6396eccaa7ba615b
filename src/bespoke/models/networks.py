"""Networks as pure functions of their parameters, without BatchNorm, so that they vectorize over clients."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bespoke.plain import JsonObject
from bespoke.tensors import Params


class Network:
    """A function (params, inputs) -> outputs, with an initial value for params and a named last layer."""

    is_linear = False
    vectorizes = True  # False: torch.func.vmap cannot run it
    last_layer: tuple[str, ...] = ()  # prefixes of the parameters of the last layer
    tied = False  # True: the features use the last layer's weights, too, which therefore cannot be stepped apart
    table = ""  # the parameter whose rows the inputs index, if the first step is a lookup: see `after_lookup`

    @property
    def called(self) -> str:
        """Its name in reports."""
        return type(self).__name__

    def described(self) -> JsonObject:
        """Everything needed to make it again, as JSON."""
        known: Any = self  # subclasses are dataclasses
        return {"name": type(self).__name__, **asdict(known)}

    def init(self, seed: int) -> Params:
        raise NotImplementedError

    def fresh(self, seed: int) -> Params:
        """A random start, because models with the same start would stay the same."""
        return self.init(seed)

    def prepare(self, x: Tensor) -> Tensor:
        """Converts stored inputs (images are bytes on disk) to inputs of the network."""
        return x.float() / 255.0 if x.dtype == torch.uint8 else x

    def features(self, params: Params, x: Tensor) -> Tensor:
        raise NotImplementedError

    def after_lookup(self, params: Params, rows: Tensor) -> Tensor:
        """The features, from the inputs' rows of the table."""
        raise NotImplementedError

    def head(self, params: Params, features: Tensor) -> Tensor:
        raise NotImplementedError

    def output_layer(self, params: Params) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of a last layer that is one affine map of `before_output`; else None."""
        return (params["head.weight"], params.get("head.bias")) if "head.weight" in params else None

    def before_output(self, params: Params, features: Tensor) -> Tensor:
        return features

    def item_losses(self, params: Params, features: Tensor, targets: Tensor) -> Tensor | None:
        """The losses of a last layer that can compute them faster than by all outputs; else None."""
        return None

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return self.head(params, self.features(params, x))


@dataclass(frozen=True)
class Linear(Network):
    """One affine layer: linear and logistic regression, linear SVM. Starts at zero unless `random_init`."""

    inputs: int
    outputs: int = 1
    random_init: bool = False

    is_linear = True
    last_layer = ("weight", "bias")

    def init(self, seed: int) -> Params:
        weight = torch.zeros(self.outputs, self.inputs)
        if self.random_init:
            generator = torch.Generator().manual_seed(seed)
            weight = torch.randn(self.outputs, self.inputs, generator=generator) / self.inputs**0.5
        return {"weight": weight, "bias": torch.zeros(self.outputs)}

    def fresh(self, seed: int) -> Params:
        """Initial values like torch.nn.Linear: weights and bias uniform within 1 / sqrt(inputs)."""
        generator = torch.Generator().manual_seed(seed)
        bound = max(self.inputs, 1) ** -0.5
        drawn = (2 * torch.rand(self.outputs, self.inputs + 1, generator=generator) - 1) * bound
        return {"weight": drawn[:, :-1].contiguous(), "bias": drawn[:, -1].contiguous()}

    def features(self, params: Params, x: Tensor) -> Tensor:
        return self.prepare(x).flatten(1)

    def head(self, params: Params, features: Tensor) -> Tensor:
        return features @ params["weight"].mT + params["bias"]


class ModuleNetwork(Network):
    """A network whose layers are an nn.Module with `features` and `head` submodules."""

    last_layer = ("head.",)

    def __post_init__(self) -> None:
        _ = self._module  # built now, because building draws random numbers, which vmap does not allow

    def __reduce__(self) -> Any:
        known: Any = self  # subclasses are dataclasses; a pickle holds their fields, not the module's weights
        return type(self), tuple(getattr(self, entry.name) for entry in fields(known))

    def build(self) -> nn.Module:
        raise NotImplementedError

    @cached_property
    def _module(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # building draws initial values; the caller's generator must not change
            return self.build()

    def init(self, seed: int) -> Params:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.build()
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    def _part(self, part: str, params: Params, x: Tensor) -> Tensor:
        own = {name.removeprefix(f"{part}."): p for name, p in params.items() if name.startswith(f"{part}.")}
        out: Tensor = functional_call(self._module.get_submodule(part), own, (x,))
        return out

    def features(self, params: Params, x: Tensor) -> Tensor:
        return self._part("features", params, self.prepare(x))

    def head(self, params: Params, features: Tensor) -> Tensor:
        return self._part("head", params, features)


class Assembled(nn.Module):
    """A body, which computes the features, and a last layer."""

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features, self.head = features, head


@dataclass(frozen=True)
class MLP(ModuleNetwork):
    """Fully connected layers with ReLU."""

    inputs: int
    outputs: int
    hidden: tuple[int, ...] = (64,)

    def build(self) -> nn.Module:
        widths = [self.inputs, *self.hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return Assembled(nn.Sequential(*layers), nn.Linear(widths[-1], self.outputs))


class ImageNetwork(ModuleNetwork):
    """A network of images, which are stored as rows: channels, lines, columns.

    The dataclass has the channels and the side (the lines, and the columns unless `columns` gives them).
    """

    side: int
    channels: int
    columns: int

    least = 1  # the fewest lines and columns that its layers accept

    def __post_init__(self) -> None:
        if min(self.plane) < self.least:
            lines, columns = self.plane
            raise ValueError(
                f"images of {lines} x {columns} are too small for it: {self.least} x {self.least} at least"
            )
        super().__post_init__()

    @property
    def body(self) -> nn.Module:
        """The layers below the last one, a convolution first."""
        return self._module.get_submodule("features")

    @property
    def plane(self) -> tuple[int, int]:
        """Lines and columns of a channel."""
        return self.side, self.columns or self.side

    def prepare(self, x: Tensor) -> Tensor:
        return channels_last(super().prepare(x).reshape(-1, self.channels, *self.plane))

    def features(self, params: Params, x: Tensor) -> Tensor:
        return super().features(kernels_last(params), x)


def kernels_last(params: Params) -> Params:
    return {name: channels_last(p) if p.dim() == 4 else p for name, p in params.items()}


def channels_last(x: Tensor) -> Tensor:
    """Moves channels last in memory, which makes convolutions on a CPU a third faster (in a form that vmap accepts)."""
    if x.shape[1] == 1:  # the same memory with explicit strides, without which later layers fall back
        return x.reshape(x.shape[0], *x.shape[2:], 1).permute(0, 3, 1, 2)
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


@dataclass(frozen=True)
class CNN(ImageNetwork):
    """The EMNIST network of Reddi et al. (Adaptive Federated Optimization), 1.2M parameters, without dropout.

    It has no dropout, which would make a client's update depend on more than its data. With the numbers of rounds here
    the network does not overfit.
    """

    classes: int = 62
    side: int = 28
    channels: int = 1
    columns: int = 0

    least = 6

    def build(self) -> nn.Module:
        lines, columns = ((length - 4) // 2 for length in self.plane)
        flat = 64 * lines * columns
        features = nn.Sequential(
            nn.Conv2d(self.channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.MaxPool2d(2),
            nn.ReLU(),  # after pooling, which is the same and a quarter of the work
            nn.Flatten(),
            nn.Linear(flat, 128),
            nn.ReLU(),
        )
        return Assembled(features, nn.Linear(128, self.classes))


@dataclass(frozen=True)
class FedEmbedCNN(ImageNetwork):
    """The MNIST network of FedEmbed's Appendix B.1: three convolutions, each followed by LayerNorm, 64 features.

    As printed it has no activations; `relu` puts one after each LayerNorm. The last convolution covers all that is left
    of the image and is written as the dense layer that it is. With an embedding of 28 the heads have the 92 inputs of
    the paper.
    """

    classes: int = 2
    side: int = 28
    channels: int = 1
    relu: bool = False
    columns: int = 0

    def build(self) -> nn.Module:
        half = [-(-length // 2) for length in self.plane]
        quarter = [-(-length // 2) for length in half]
        layers = [
            [nn.Conv2d(self.channels, 16, 3, stride=2, padding=1), nn.LayerNorm([16, *half])],
            [nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.LayerNorm([32, *quarter])],
            [nn.Flatten(), nn.Linear(32 * quarter[0] * quarter[1], 64), nn.LayerNorm([64])],
        ]
        between = [nn.ReLU()] if self.relu else []
        features = nn.Sequential(*(layer for group in layers for layer in (*group, *between)))
        return Assembled(features, nn.Linear(64, self.classes))


@dataclass(frozen=True)
class FedAvgCNN(ImageNetwork):
    """The network of McMahan et al. 2017: 5 x 5 convolutions of 32 and 64 channels, each pooled, and a layer of 512.

    Motley has it for EMNIST (62 classes, 1.7M parameters) and, with one output, for the regression of ADNI.
    """

    outputs: int = 62
    side: int = 28
    channels: int = 1
    columns: int = 0

    least = 4

    def build(self) -> nn.Module:
        lines, columns = self.plane
        features = nn.Sequential(
            nn.Conv2d(self.channels, 32, 5, padding=2),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * (lines // 4) * (columns // 4), 512),
            nn.ReLU(),
        )
        return Assembled(features, nn.Linear(512, self.outputs))


@dataclass(frozen=True)
class LeNet(ImageNetwork):
    """The CIFAR-10 network of PyTorch's tutorial: 5 x 5 convolutions of 6 and 16 channels, layers of 120 and 84."""

    classes: int = 10
    side: int = 32
    channels: int = 3
    columns: int = 0

    least = 16

    def build(self) -> nn.Module:
        lines, columns = (((length - 4) // 2 - 4) // 2 for length in self.plane)
        features = nn.Sequential(
            nn.Conv2d(self.channels, 6, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(6, 16, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * lines * columns, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
        )
        return Assembled(features, nn.Linear(84, self.classes))

    def prepare(self, x: Tensor) -> Tensor:
        return 2 * super().prepare(x) - 1  # from -1 to 1, as in the tutorial


class _Recurrent(nn.Module):
    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=layers, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        states: Tensor = self.lstm(self.embedding(tokens))[0]
        return states


@dataclass(frozen=True)
class LSTM(ModuleNetwork):
    """Embedding, LSTM, and a dense layer over the vocabulary, at every position.

    With `projection`, a dense layer of that width stands between, as in the StackOverflow network of Reddi et al.
    (embedding 96, hidden 670, one layer, projection 96: 4.1M parameters). Features are the LSTM's output either way.
    """

    vocabulary: int
    embedding: int = 8
    hidden: int = 256
    layers: int = 2
    projection: int = 0

    vectorizes = False  # vmap has no rule for nn.LSTM without gradients, and a slow one with them
    table = "features.embedding.weight"

    def __post_init__(self) -> None:
        if self.projection:
            object.__setattr__(self, "last_layer", ("head.1.",))
        super().__post_init__()

    def build(self) -> nn.Module:
        body = _Recurrent(self.vocabulary, self.embedding, self.hidden, self.layers)
        if not self.projection:
            return Assembled(body, nn.Linear(self.hidden, self.vocabulary))
        narrowed = nn.Linear(self.hidden, self.projection), nn.Linear(self.projection, self.vocabulary)
        return Assembled(body, nn.Sequential(*narrowed))

    def after_lookup(self, params: Params, rows: Tensor) -> Tensor:
        return self._part("features.lstm", params, rows)[0]

    def prepare(self, x: Tensor) -> Tensor:
        return x.long()
