"""The networks of the published experiments: their sizes, features and gradients, in a loop and under vmap."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from bespoke.errors import UserError
from bespoke.models import MODELS, NETWORKS, build_task
from bespoke.models.language import LanguageModel
from bespoke.models.mobilenet import MobileNetV2
from bespoke.models.networks import CNN, LSTM, MLP, FedAvgCNN, FedEmbedCNN, LeNet, Linear, Network
from bespoke.models.scores import finished
from bespoke.models.sound import FedEmbedSpeech, SpectrogramCNN
from bespoke.models.task import BaseTask, Classification, Regression
from bespoke.models.transformer import Transformer, positions
from bespoke.tensors import Params

# network, parameters by hand, width of the features
PUBLISHED = [
    (FedAvgCNN(62, 28), 832 + 51_264 + 1_606_144 + 513 * 62, 512),  # McMahan et al. have 1,663,370 with ten classes
    (FedAvgCNN(1, 32), 832 + 51_264 + (4096 + 1) * 512 + 513, 512),
    (MobileNetV2(), 2_223_872 + 1281 * 2028, 1280),  # Sandler et al.'s 3,504,872 with 1,000 classes
    (SpectrogramCNN(2, 39, 24), 9 * (8 + 8 * 16 + 16 * 32 + 32 * 32) + 2 * (8 + 16 + 32 + 32) + 2 * 33, 32),
    # with LayerNorm over 16 x 50 x 41, 32 x 7 x 6, 64 x 3 x 3 and 256
    (FedEmbedSpeech(2), 16 * 16 + 401 * 32 + 193 * 64 + 577 * 256 + 2 * (32_800 + 1_344 + 576 + 256) + 2 * 257, 256),
    (Transformer(15_818), 15_818 * 96 + 97 * 512 + 4 * 513 * 512 + 513 * 2048 + 2049 * 512 + 4 * 512 + 513 * 96, 96),
    # torch has two biases in an LSTM where TensorFlow has one
    (LSTM(10_004, 96, 670, 1, 96), 10_004 * 96 + 4 * 670 * (96 + 670 + 2) + 671 * 96 + 97 * 10_004, 670),
]


def batch_for(network: Network, rows: int = 3, seed: int = 0) -> Params:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows)
    if hasattr(network, "vocabulary"):
        tokens = torch.randint(1, network.vocabulary, (rows, 6), generator=draw).short()
        return {"x": tokens[:, :-1], "y": tokens[:, 1:], "mask": mask}
    pixels = network.frames * network.bands if hasattr(network, "frames") else network.channels * network.side**2  # type: ignore[attr-defined]
    x = torch.randint(0, 256, (rows, pixels), generator=draw, dtype=torch.uint8)
    return {"x": x, "y": torch.arange(rows), "mask": mask}


def task_for(network: Network) -> BaseTask:
    if hasattr(network, "vocabulary"):
        return LanguageModel(network)
    return Regression(network) if getattr(network, "outputs", 0) == 1 else Classification(network)


@pytest.mark.parametrize(("network", "parameters", "width"), PUBLISHED, ids=lambda v: type(v).__name__)
def test_published_sizes(network: Any, parameters: Any, width: Any) -> None:
    params = network.init(0)
    assert sum(p.numel() for p in params.values()) == parameters
    batch = batch_for(network, rows=1)
    features = network.features(params, batch["x"])
    expected = (1, 5, width) if hasattr(network, "vocabulary") else (1, width)  # for language, per token
    assert features.shape == expected
    assert network.head(params, features).shape[:-1] == expected[:-1]
    torch.testing.assert_close(network(params, batch["x"]), network.head(params, features))
    assert any(name.startswith(network.last_layer) for name in params)


SMALL = [
    FedAvgCNN(4, 8), FedAvgCNN(1, 8), MobileNetV2(4, 32), SpectrogramCNN(3, 17, 16, 4, 2),
    FedEmbedSpeech(3, 135, 83), Transformer(11, 6, 8, 10, 2, 2), LSTM(11, 3, 5, 1, 4),
]  # fmt: skip


@pytest.mark.parametrize("network", SMALL, ids=lambda network: type(network).__name__)
def test_gradients_are_finite_and_reach_everything(network: Any) -> None:
    task = task_for(network)
    gradient = task.gradient(task.init(1), batch_for(network))
    for name, part in gradient.items():
        assert part.isfinite().all(), name
        if not name.endswith("key.bias"):  # a bias of the keys adds the same to all scores: softmax takes it out
            assert part.abs().max() > 0, name


@pytest.mark.parametrize("network", [n for n in SMALL if n.vectorizes], ids=lambda network: type(network).__name__)
def test_loop_and_vmap_agree(network: Any) -> None:
    task = task_for(network)
    models = [task.init(seed) for seed in range(3)]
    batches = [batch_for(network, seed=seed) for seed in range(3)]
    stacked = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    rows = {name: torch.stack([batch[name] for batch in batches]) for name in batches[0]}
    found = torch.func.vmap(task.differentiated("func").gradient)(stacked, rows)
    scores = torch.func.vmap(lambda p, b: task.score(task.predict(p, b), b))(stacked, rows)
    for place, (model, batch) in enumerate(zip(models, batches)):
        for name, expected in task.gradient(model, batch).items():
            torch.testing.assert_close(found[name][place], expected, rtol=1e-3, atol=1e-5)
        for name, expected in task.score(task.predict(model, batch), batch).items():
            torch.testing.assert_close(scores[name][place], expected, rtol=1e-4, atol=1e-5)


def test_who_vectorizes() -> None:
    assert [type(n).__name__ for n in SMALL if not n.vectorizes] == ["MobileNetV2", "LSTM"]


def test_a_transformer_does_not_look_ahead() -> None:
    network = Transformer(11, 6, 8, 10, 2, 2)
    params = network.init(0)
    first = torch.tensor([[1, 2, 3, 4]])
    second = torch.tensor([[1, 2, 9, 10]])
    same = network(params, first)[0, :2] - network(params, second)[0, :2]
    assert same.abs().max() < 1e-6
    assert (network(params, first)[0, 2] - network(params, second)[0, 2]).abs().max() > 1e-4


def test_positions_by_hand() -> None:
    table = positions(3, 4)
    assert table[0].tolist() == [0, 1, 0, 1]
    assert table[2].tolist() == pytest.approx([math.sin(2), math.cos(2), math.sin(0.02), math.cos(0.02)])


def test_the_last_layer_of_a_projected_lstm() -> None:
    network = LSTM(11, 3, 5, 1, 4)
    assert [name for name in network.init(0) if name.startswith(network.last_layer)] == ["head.1.weight", "head.1.bias"]
    assert LSTM(11).last_layer == ("head.",)


def test_accuracy_leaves_out_unscored_tokens() -> None:
    """Targets 1, 2, 3 (unscored), padding; the model always says 2: right once in two, and the loss counts three."""
    task = LanguageModel(Linear(1), unscored=(3,))
    batch = {"y": torch.tensor([[1, 2, 3, 0]]), "mask": torch.ones(1)}
    outputs = torch.tensor([0.0, 0.0, 5.0, 0.0]).expand(1, 4, 4)
    sums = task.score(outputs, batch)
    assert float(finished("accuracy", sums)) == 0.5
    assert float(sums["count"]) == 3
    plain = LanguageModel(Linear(1)).score(outputs, batch)
    assert float(finished("accuracy", plain)) == pytest.approx(1 / 3)


def test_the_whole_squared_error() -> None:
    """Error 3 at x = 1: the loss is 9 and its slope 6; half of it 4.5 and 3; the reported error is the same."""
    batch = {"x": torch.ones(1, 1), "y": torch.zeros(1), "mask": torch.ones(1)}
    params = {"weight": torch.tensor([[3.0]]), "bias": torch.zeros(1)}
    for factor in (0.5, 1.0):
        task = Regression(Linear(1), factor=factor)
        for how in ("autograd", "func", "closed-form", "fused"):
            assert float(task.differentiated(how).gradient(params, batch)["weight"]) == 6 * factor
        sums = task.score(task.predict(params, batch), batch)
        assert (float(sums["loss"]), float(sums["mse"])) == (9 * factor, 9)
    assert Regression(Linear(1), "fused", factor=1.0).descend(params, None, 0.1, 0.0, None, 0.0) is None


@pytest.mark.parametrize(
    ("about", "name", "expected"),
    [
        ({"task": "regression", "input": "image", "side": 32}, "auto", FedAvgCNN(1, 32, 1)),
        ({"task": "language", "input": "tokens", "vocabulary": 9}, "transformer", Transformer(9)),
        ({"task": "classification", "input": "image", "side": 64, "channels": 3, "classes": ["a", "b"]}, "mobilenet",
         MobileNetV2(2, 64, 3)),
    ],
)  # fmt: skip
def test_models_by_name(about: Any, name: str, expected: Any) -> None:
    assert build_task(about, name).network == expected


def test_models_that_do_not_fit() -> None:
    with pytest.raises(UserError, match="'transformer' does not fit a regression task"):
        build_task({"task": "regression", "features": ["a"]}, "transformer")
    with pytest.raises(UserError, match="'mobilenet' is for images"):
        build_task({"task": "classification", "features": ["a"], "classes": ["a", "b"]}, "mobilenet")
    with pytest.raises(
        UserError, match=r"'spectrogram-cnn' is for rows of the kind 'spectrogram', and these .* 'table'"
    ):
        build_task({"task": "classification", "features": ["a"], "classes": ["a", "b"]}, "spectrogram-cnn")
    sound = {"task": "classification", "input": "spectrogram", "frames": 39, "bands": 24, "classes": ["a", "b"]}
    with pytest.raises(UserError, match=r"spectrogram-cnn: .*divisible"):
        build_task(sound, norm_groups=3)
    with pytest.raises(UserError, match=r"unknown key 'head' in \[model\] of 'transformer'.*Did you mean 'heads'"):
        build_task({"task": "language", "input": "tokens", "vocabulary": 9}, "transformer", head=2)
    with pytest.raises(UserError, match=r"transformer: width = 10 has to be a multiple of heads = 8"):
        build_task({"task": "language", "input": "tokens", "vocabulary": 9}, "transformer", width=10)
    image = {"task": "classification", "input": "image", "side": 32, "channels": 3, "classes": ["a", "b"]}
    with pytest.raises(UserError, match=r"mobilenet: .*divisible"):
        build_task(image, "mobilenet", norm_groups=7)


WIDE = {"side": 20, "columns": 32}  # lines and columns


@pytest.mark.parametrize(
    ("network", "flat", "layer"),
    [
        (CNN(5, channels=3, **WIDE), 64 * 8 * 14, "features.6.weight"),
        (FedAvgCNN(1, channels=3, **WIDE), 64 * 5 * 8, "features.7.weight"),
        (LeNet(5, channels=3, **WIDE), 16 * 2 * 5, "features.7.weight"),
        (FedEmbedCNN(5, channels=3, **WIDE), 32 * 5 * 8, "features.5.weight"),
        (MobileNetV2(5, channels=3, **WIDE), 1280, "head.weight"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_images_need_not_be_square(network: Any, flat: Any, layer: str) -> None:
    """What convolutions and poolings leave of 20 x 32, by hand; lines and columns are not mixed up."""
    params, x = network.init(0), torch.rand(2, 3 * 20 * 32)
    assert params[layer].shape[1] == flat
    images = x.reshape(2, 3, 20, 32)
    if isinstance(network, CNN):
        seen = F.relu(F.conv2d(images, params["features.0.weight"], params["features.0.bias"]))
        seen = F.max_pool2d(F.relu(F.conv2d(seen, params["features.2.weight"], params["features.2.bias"])), 2)
        expected = F.relu(F.linear(seen.flatten(1), params["features.6.weight"], params["features.6.bias"]))
        torch.testing.assert_close(network.features(params, x), expected, rtol=1e-4, atol=1e-5)
    assert network(params, x).shape == (2, network.outputs if isinstance(network, FedAvgCNN) else 5)
    assert network.prepare(x).shape == images.shape


def test_models_of_images_that_are_not_square() -> None:
    """The keys `height` and `width` of what data say of themselves."""
    image = {"task": "classification", "input": "image", "height": 20, "width": 32, "classes": ["a", "b"]}
    assert build_task(image, "auto").network == CNN(2, 20, 1, columns=32)
    assert build_task(image, "mlp").network.inputs == 640  # type: ignore[attr-defined]
    assert build_task({**image, "height": 8}, "auto").network == MLP(256, 2)
    assert build_task({**image, "width": 20}, "cnn").network == CNN(2, 20, 1)
    with pytest.raises(UserError, match="images of 4 x 32 are too small for it: 6 x 6 at least"):
        build_task({**image, "height": 4}, "cnn")


def test_every_network_can_be_made_from_its_description() -> None:
    """As a personal model on disk has it: a name and its fields."""
    for network in SMALL:
        assert NETWORKS[type(network).__name__](**asdict(network)) == network
    assert set(MODELS) >= {"fedavg-cnn", "mobilenet", "transformer", "lstm"}
