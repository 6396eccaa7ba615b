"""Makes the task of a user's own model, or of a described or exported one."""

from __future__ import annotations

import json
from typing import Any

from bespoke.data.about import About, plane
from bespoke.errors import UserError
from bespoke.models.metric import MOST_CLASSES
from bespoke.models.own.model import found_model
from bespoke.models.own.network import OwnNetwork, Reading, rebuilt
from bespoke.models.own.probe import examined, judged
from bespoke.models.own.task import OwnClassification, OwnRegression, OwnTask
from bespoke.tensors import Params

_made: dict[str, OwnTask] = {}  # cached: a module may take long to make


def own_task(about: About, name: str, safe: bool, options: dict[str, Any], rows: Params) -> OwnTask:
    """The task of the model of this name, which is tried on a few `rows` of the data."""
    if about["task"] == "language":
        raise UserError(
            f"[model] {name!r}: a model of your own is for classes and numbers, and of these texts the next word is "
            "predicted; use a model of bespoke's own, such as 'lstm'"
        )
    shapes = {column: (str(value.dtype), tuple(value.shape[1:])) for column, value in rows.items()}
    scales = [about.get(key) for key in ("classes", "unit", "centre", "factor")]
    key = json.dumps([name, safe, options, about["task"], scales, about.get("input"), shapes], default=str)
    if key not in _made:
        model, given = found_model(name, options, "[model]")
        network = examined(OwnNetwork(model, given, _reading(about)), rows)
        _made[key] = judged(described_task(network, about, safe), rows, len(about.get("classes", ())))
    return _made[key]


def _reading(about: About) -> Reading:
    kind = about.get("input", "table")
    if kind == "image":
        return Reading(kind, (about.get("channels", 1), *plane(about)))
    return Reading(kind, (1, about["frames"], about["bands"]) if kind == "spectrogram" else ())


def described_task(network: OwnNetwork, about: About, safe: bool = False) -> OwnTask:
    """The task for data with this description, before its trial."""
    own = network.model
    kind = OwnClassification if about["task"] == "classification" else OwnRegression
    usual = kind.metrics
    if kind is OwnClassification and len(about.get("classes", ())) > MOST_CLASSES:
        usual = tuple(metric for metric in usual if metric != "auc")
    lower = tuple(metric for metric in kind.lower_is_better if metric not in own.metrics)
    more = tuple(metric for metric in own.metrics if metric not in usual)
    said: dict[str, Any] = {"metrics": (*usual, *more), "lower_is_better": (*lower, *own.lower_is_better), "safe": safe}
    if kind is OwnRegression:
        said |= {"unit": float(about.get("unit", 1.0)), "centre": float(about.get("centre", 0.0))}
        said["factor"] = float(about.get("factor", 0.5))
        return OwnRegression(network, **said)
    return OwnClassification(network, **said, kinds=len(about.get("kinds", ())))


def exported_task(record: dict[str, Any], about: dict[str, Any], where: str) -> OwnTask:
    """The task of an exported model."""
    network = rebuilt(record, where)
    return OwnRegression(network) if about["task"] == "regression" else OwnClassification(network)
