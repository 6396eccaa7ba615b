"""Models by name: `build_task` joins a network with the task that the data ask for."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from bespoke.errors import UserError, unknown
from bespoke.models.mobilenet import MobileNetV2
from bespoke.models.networks import CNN, LSTM, MLP, FedAvgCNN, FedEmbedCNN, Linear, Network
from bespoke.models.task import BaseTask, Classification, LanguageModel, Regression
from bespoke.models.transformer import Transformer

MODELS = {
    "linear": "linear or (for classes) logistic regression",
    "logistic": "logistic regression",
    "svm": "linear support vector machine, two classes (hinge loss)",
    "mlp": "fully connected network, `hidden` layers with ReLU",
    "cnn": "the EMNIST network of Reddi et al.: two convolutions, two dense layers, 1.2M parameters",
    "fedavg-cnn": "the network of McMahan et al.: two pooled 5 x 5 convolutions, a layer of 512; also for regression",
    "fedembed-cnn": "the MNIST network of FedEmbed: three convolutions with LayerNorm, 64 features",
    "mobilenet": "MobileNetV2 with GroupNorm, for larger images, 4.8M parameters with 2,028 classes",
    "lstm": "embedding, LSTM layers and a dense layer (two with `projection`), for the next token",
    "transformer": "embedding, causal attention and the embedding again, for the next token",
}
NETWORKS: dict[str, type[Network]] = {
    kind.__name__: kind for kind in (Linear, MLP, CNN, FedAvgCNN, FedEmbedCNN, MobileNetV2, LSTM, Transformer)
}
_KINDS = {
    "mlp": MLP, "cnn": CNN, "fedavg-cnn": FedAvgCNN, "fedembed-cnn": FedEmbedCNN, "mobilenet": MobileNetV2,
    "lstm": LSTM, "transformer": Transformer,
}  # fmt: skip
_IMAGES = ("cnn", "fedavg-cnn", "fedembed-cnn", "mobilenet")
GIVEN = ("inputs", "outputs", "classes", "side", "channels", "vocabulary")  # a network's fields that the data decide


def build_task(about: dict[str, Any], name: str = "auto", **options: Any) -> BaseTask:
    """The task for a population described by `about` (see docs/data.md), with the model of this name.

    'auto' is the model that the source's own paper has (`about["model"]`: name and options), or one that fits its rows.
    Options: hidden (list of widths for mlp; width for lstm, transformer), embedding, layers (lstm, transformer),
    projection (lstm), width, heads (transformer), norm_groups (mobilenet), relu (fedembed-cnn), l2, random_init
    (linear).
    """
    kind, shape = about["task"], about.get("input", "table")
    if name == "auto":
        advised = dict(about.get("model", {}))
        name = advised.pop("name", "") or _fitting(about)
        options = {**advised, **options}
    if name not in MODELS:
        raise unknown("model", name, [*MODELS, "auto"], "[model]")
    fits = {
        "regression": ("linear", "mlp", "fedavg-cnn"),
        "classification": ("linear", "logistic", "svm", "mlp", *_IMAGES),
        "language": ("lstm", "transformer"),
    }
    if name not in fits[kind]:
        raise UserError(f"model {name!r} does not fit a {kind} task; models that do: {', '.join(fits[kind])}")
    if name in _IMAGES and shape != "image":
        raise UserError(f"model {name!r} is for images, and these are rows of a table; use 'linear' or 'mlp'")
    _check_options(name, options)
    l2 = float(options.pop("l2", 0.0))
    inputs = about["side"] ** 2 * about.get("channels", 1) if shape == "image" else len(about.get("features", ()))
    classes = len(about.get("classes", ())) or 1
    if name == "svm" and classes != 2:
        raise UserError(f"model 'svm' separates two classes; the target has {classes}; use 'logistic'")
    network = _network(name, about, inputs, 1 if name == "svm" else classes, options)
    if kind == "regression":
        return Regression(network, l2=l2, unit=float(about.get("unit", 1.0)), factor=float(about.get("factor", 0.5)))
    if kind == "language":
        return LanguageModel(network, l2=l2, unscored=tuple(about.get("unscored", ())))
    metrics = Classification.metrics + (("f1",) if classes == 2 else ())
    kinds = len(about.get("kinds", ()))
    return Classification(network, l2=l2, kinds=kinds, hinge=name == "svm", metrics=metrics)


def _fitting(about: dict[str, Any]) -> str:
    """The name of a model for the rows of a source that asks for none."""
    if about.get("input") == "image":
        small = "mlp" if about.get("side", 28) < 16 else "cnn"
        return small if about["task"] == "classification" else "fedavg-cnn"
    return {"table": "linear", "tokens": "lstm"}[about.get("input", "table")]


def _check_options(name: str, options: dict[str, Any]) -> None:
    """Refuse an option that the model does not have, or a value that it cannot take."""
    kind: Any = _KINDS.get(name, Linear)
    known = ["l2", *(entry.name for entry in fields(kind) if entry.name not in GIVEN)]
    for option, value in options.items():
        if option not in known:
            raise unknown("key", option, known, f"[model] of {name!r}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if option == "l2":
            fits, wanted = number and 0 <= value < float("inf"), "a number of zero or more"
        elif option in ("random_init", "relu"):
            fits, wanted = isinstance(value, bool), "true or false"
        elif isinstance(value, list | tuple) and name == "mlp":
            fits = all(isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in value)
            wanted = "a list of whole numbers, the layers' widths"
        else:
            fits, wanted = number and isinstance(value, int) and value > 0, "a whole number of one or more"
        if not fits:
            raise UserError(f"[model] of {name!r}: {option} = {value!r}: it has to be {wanted}")


def _network(name: str, about: dict[str, Any], inputs: int, outputs: int, options: dict[str, Any]) -> Network:
    try:
        if name in ("linear", "logistic", "svm"):
            return Linear(inputs, outputs, **options)
        if name == "mlp":
            hidden = options.pop("hidden", (64,))
            return replace(
                MLP(inputs, outputs, **options), hidden=tuple(hidden if hasattr(hidden, "__iter__") else [hidden])
            )
        if name in _IMAGES:
            return _KINDS[name](outputs, about["side"], about.get("channels", 1), **options)
        return _KINDS[name](about["vocabulary"], **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"[model] {name}: {str(error).split('() ')[-1]}") from None
