"""Models by name: `build_task` joins a network with the task that the data need."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from bespoke.data.about import About, plane
from bespoke.errors import UserError, unknown
from bespoke.models.char_lstm import AdaptiveCharLSTM, CharLSTM
from bespoke.models.frozen import FrozenLM
from bespoke.models.language import LanguageModel
from bespoke.models.lora import LoraLM
from bespoke.models.metric import MOST_CLASSES
from bespoke.models.mobilenet import MobileNetV2
from bespoke.models.networks import (
    CNN,
    LSTM,
    MLP,
    FedAvgCNN,
    FedEmbedCNN,
    LeNet,
    Linear,
    Network,
)
from bespoke.models.own.build import own_task
from bespoke.models.own.model import is_own
from bespoke.models.own.task import OwnTask
from bespoke.models.own_loss import OwnLoss
from bespoke.models.prefix import prefix_task
from bespoke.models.sound import FedEmbedSpeech, SpectrogramCNN
from bespoke.models.task import BaseTask, Classification, Regression
from bespoke.models.transformer import Transformer
from bespoke.models.word_vectors import SentimentLSTM
from bespoke.plain import Knobs
from bespoke.registry import Registry
from bespoke.tensors import Params

MODELS = {
    "linear": "linear or (for classes) logistic regression",
    "logistic": "logistic regression",
    "svm": "linear support vector machine, two classes (hinge loss)",
    "mlp": "fully connected network, `hidden` layers with ReLU",
    "cnn": "the EMNIST network of Reddi et al.: two convolutions, two dense layers, 1.2M parameters",
    "fedavg-cnn": "the network of McMahan et al.: two pooled 5 x 5 convolutions, a layer of 512; also for regression",
    "lenet": "the network of PyTorch's CIFAR-10 tutorial: two small convolutions, layers of 120 and 84, 62k parameters",
    "fedembed-cnn": "the MNIST network of FedEmbed: three convolutions with LayerNorm, 64 features",
    "fedembed-speech": "the speech network of FedEmbed: three convolutions, a dense layer, LayerNorm, 256 features",
    "mobilenet": "MobileNetV2 with GroupNorm, for larger images, 4.8M parameters with 2,028 classes",
    "spectrogram-cnn": "four pooled convolutions with GroupNorm, for sound, 15,300 parameters",
    "lstm": "embedding, LSTM layers and a dense layer (two with `projection`), for the next token",
    "char-lstm": "words by a character CNN, LSTM layers of 512, softmax over all words (`tied`: their own vectors)",
    "char-lstm-adaptive": "the same with an adaptive softmax, in which rare words share narrow layers",
    "sentiment-lstm": "LSTM layers over frozen word vectors and a dense layer, for classes of sentences",
    "frozen": "a pretrained language model, `pretrained` by folder, GGUF file or hub name; a prefix or LoRA is learned",
    "transformer": "embedding, causal attention and the embedding again, for the next token",
}
# others' models by a short name; models/own reads what it stands for
OFFERED: Registry[Any] = Registry("model", "bespoke.models", MODELS, lambda found, where: found)
NETWORKS: dict[str, type[Network]] = {
    kind.__name__: kind
    for kind in (
        Linear,
        MLP,
        CNN,
        FedAvgCNN,
        LeNet,
        FedEmbedCNN,
        FedEmbedSpeech,
        MobileNetV2,
        SpectrogramCNN,
        LSTM,
        CharLSTM,
        AdaptiveCharLSTM,
        SentimentLSTM,
        Transformer,
        FrozenLM,
        LoraLM,
    )
}
_KINDS: dict[str, Callable[..., Network]] = {
    "mlp": MLP, "cnn": CNN, "fedavg-cnn": FedAvgCNN, "lenet": LeNet, "fedembed-cnn": FedEmbedCNN,
    "fedembed-speech": FedEmbedSpeech, "mobilenet": MobileNetV2, "spectrogram-cnn": SpectrogramCNN, "lstm": LSTM,
    "char-lstm": CharLSTM, "char-lstm-adaptive": AdaptiveCharLSTM, "sentiment-lstm": SentimentLSTM,
    "transformer": Transformer,
}  # fmt: skip
_IMAGES = ("cnn", "fedavg-cnn", "lenet", "fedembed-cnn", "mobilenet")
_SPELLED = ("char-lstm", "char-lstm-adaptive")
_ONLY = {
    "fedembed-speech": "spectrogram",
    "spectrogram-cnn": "spectrogram",
    "sentiment-lstm": "tokens",
}  # models of classes for one kind of rows
# a network's fields that the data decide
GIVEN = (
    "inputs", "outputs", "classes", "side", "columns", "channels", "frames", "bands", "vocabulary", "vectors",
    "dimension", "words",
)  # fmt: skip


def build_task(
    about: About, name: str = "auto", safe: bool = False, rows: Callable[[], Params] | None = None,
    loss: str | None = None, **options: Any,
) -> BaseTask:  # fmt: skip
    """The task for a population described by `about` (see docs/data.md), with the model of this name.

    'auto' is the model that the source's own paper has (`about["model"]`: name and options), or one that fits its rows.
    Options: hidden (list of widths for mlp; width for lstms, transformer), embedding, layers (lstms, transformer),
    projection (lstm), character (char-lstms), tied (char-lstm), width (transformer, spectrogram-cnn), heads
    (transformer), norm_groups (mobilenet, spectrogram-cnn), relu (fedembed-cnn, fedembed-speech), l2, random_init
    (linear), pretrained, given, adapt, rank, alpha (frozen). A name "package.module:name" is a model of the user's own,
    whose options go to its factory; it is tried on a few of the data's rows, which `rows` gives. `loss` names a loss of
    the user's own, which is tried, too.
    """
    if loss is not None:
        return _under(loss, build_task(about, name, safe, rows, **options), rows)
    if name in OFFERED.offered():
        name = OFFERED.recorded(name, "[model]")
    if is_own(name):
        if rows is None:
            raise UserError(f"[model] {name!r} is tried on rows of the data, and here are none")
        return own_task(about, name, safe, options, rows())
    kind, shape = about["task"], about.get("input", "table")
    if name == "auto":
        advised = dict(about.get("model", {}))
        name = advised.pop("name", "") or _fitting(about)
        options = {**advised, **options}
    if name not in MODELS:
        raise unknown("model", name, [*MODELS, *OFFERED.offered(), "auto", "package.module:name"], "[model]")
    if shape == "named":
        named = ", ".join(about.get("inputs", ()))
        raise UserError(
            f"model {name!r} takes one input, and these rows have several ({named}); give a model of your own that "
            "takes them: model=bespoke.model(..., inputs=(...))"
        )
    fits = {
        "regression": ("linear", "mlp", "fedavg-cnn"),
        "classification": ("linear", "logistic", "svm", "mlp", *_IMAGES, *_ONLY),
        "language": ("lstm", "transformer", *_SPELLED, "frozen"),
    }
    if name not in fits[kind]:
        raise UserError(f"model {name!r} does not fit a {kind} task; models that do: {', '.join(fits[kind])}")
    if name in _IMAGES and shape != "image":
        raise UserError(f"model {name!r} is for images, and these are rows of a table; use 'linear' or 'mlp'")
    if shape != _ONLY.get(name, shape):
        raise UserError(f"model {name!r} is for rows of the kind {_ONLY[name]!r}, and these are of the kind {shape!r}")
    if kind == "classification" and shape == "tokens" and name != "sentiment-lstm":
        raise UserError(f"model {name!r} takes numbers, and these are tokens; use 'sentiment-lstm'")
    if name in _SPELLED and len(about.get("words", ())) + 4 != about["vocabulary"]:
        raise UserError(f"model {name!r} reads words by their characters, and these tokens are not words; use 'lstm'")
    if name == "frozen":
        return prefix_task(about, safe, options)
    _check_options(name, options)
    l2 = float(options.pop("l2", 0.0))
    inputs = len(about.get("features", ()))
    if shape == "image":
        inputs = about.get("channels", 1) * math.prod(plane(about))
    classes = len(about.get("classes", ())) or 1
    if name == "svm" and classes != 2:
        raise UserError(f"model 'svm' separates two classes; the target has {classes}; use 'logistic'")
    network = _network(name, about, inputs, 1 if name == "svm" else classes, options)
    if kind == "regression":
        return Regression(
            network, l2=l2, safe=safe, unit=float(about.get("unit", 1.0)), factor=float(about.get("factor", 0.5))
        )  # fmt: skip
    if kind == "language":
        metrics = (*LanguageModel.metrics, *(["bits_per_character"] if about.get("characters") else []))
        return LanguageModel(network, l2=l2, safe=safe, unscored=tuple(about.get("unscored", ())), metrics=metrics)
    metrics = tuple(name for name in Classification.metrics if name != "auc" or classes <= MOST_CLASSES)
    kinds = len(about.get("kinds", ()))
    return Classification(network, l2=l2, safe=safe, kinds=kinds, hinge=name == "svm", metrics=metrics)


def _under(loss: str, task: BaseTask, rows: Callable[[], Params] | None) -> BaseTask:
    """The task under a loss of the user's own."""
    where = f"[model] loss = {loss!r}"
    if not isinstance(task, Classification | Regression):
        raise UserError(f"{where}: losses are for classes and numbers, and of these texts the next word is predicted")
    if not task.smooth:
        raise UserError(f"{where}: model 'svm' is the one with the hinge loss; use 'logistic', or leave the loss out")
    if isinstance(task, OwnTask) and task.network.model.loss is not None:
        raise UserError(f"{where}: the model {task.network.model.title!r} has a loss already; give one of the two")
    if rows is None:
        raise UserError(f"{where} is tried on rows of the data, and here are none")
    batch = rows()
    with torch.no_grad():
        seen = task.for_own(task.predict({**task.init(0), **task.layers}, batch), batch["y"])
    return replace(task, own_loss=OwnLoss.found(loss, "[model]").tried(*seen))


def _fitting(about: About) -> str:
    """The name of the default model for the rows of a source."""
    if about.get("input") == "image":
        small = "mlp" if min(plane(about)) < 16 else "cnn"
        return small if about["task"] == "classification" else "fedavg-cnn"
    fitting = {"table": "linear", "named": "linear", "tokens": "lstm", "spectrogram": "spectrogram-cnn"}
    return fitting[about.get("input", "table")]


def _check_options(name: str, options: Knobs) -> None:
    """Refuses an option that the model does not have, or a value that it cannot take."""
    kind: Any = _KINDS.get(name, Linear)
    known = ["l2", *(entry.name for entry in fields(kind) if entry.name not in GIVEN)]
    for option, value in options.items():
        if option not in known:
            raise unknown("key", option, known, f"[model] of {name!r}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if option == "l2":
            fits, wanted = number and 0 <= value < float("inf"), "a number of zero or more"
        elif option in ("random_init", "relu", "tied"):
            fits, wanted = isinstance(value, bool), "true or false"
        elif isinstance(value, list | tuple) and name == "mlp":
            fits = all(isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in value)
            wanted = "a list of whole numbers, the layers' widths"
        else:
            fits, wanted = number and isinstance(value, int) and value > 0, "a whole number of one or more"
        if not fits:
            raise UserError(f"[model] of {name!r}: {option} = {value!r}: it has to be {wanted}")


def _network(name: str, about: About, inputs: int, outputs: int, options: Knobs) -> Network:
    try:
        if name in ("linear", "logistic", "svm"):
            return Linear(inputs, outputs, **options)
        if name == "mlp":
            hidden = options.pop("hidden", (64,))
            return replace(
                MLP(inputs, outputs, **options), hidden=tuple(hidden if hasattr(hidden, "__iter__") else [hidden])
            )
        if name in _IMAGES:
            lines, columns = plane(about)
            if lines != columns:
                options["columns"] = columns
            return _KINDS[name](outputs, lines, about.get("channels", 1), **options)
        if name in ("fedembed-speech", "spectrogram-cnn"):
            return _KINDS[name](outputs, about["frames"], about["bands"], **options)
        if name == "sentiment-lstm":
            return SentimentLSTM(outputs, about["vectors"], about["dimension"], **options)
        if name in _SPELLED:
            return _KINDS[name](tuple(about["words"]), **options)
        return _KINDS[name](about["vocabulary"], **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"[model] {name}: {str(error).split('() ')[-1]}") from None
