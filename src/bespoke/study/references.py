"""The references of every comparison: a constant prediction, and the same model fitted to all rows in one place.

Neither is federated. Each is a shared model with which a run starts, so it is chosen, scored and stored like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bespoke.data.splits import Rows
from bespoke.experiment.experiment import Experiment
from bespoke.models.language import LanguageModel
from bespoke.models.linear_problem import LinearProblem
from bespoke.randomness import generator, mix
from bespoke.tensors import Params

PULLS = (1e-3, 0.1, 1.0, 10.0, 100.0, 1e3)  # of a linear model fitted in one place: the best on validation rows
EPOCHS, PATIENCE, BATCH = 200, 10, 256  # of a network fitted in one place
RATES = (1e-3, 3e-3)

REFERENCES = {
    "constant": ("Constant", "the training rows' mean, or the frequencies of their classes or words, for everyone"),
    "pooled": ("Pooled", "the same model fitted to all training rows in one place: not federated"),
}


def reference(name: str, experiment: Experiment) -> Params:
    """The parameters of a reference."""
    made: dict[str, Callable[[Experiment], Params]] = {"constant": constant, "pooled": pooled}
    return made[name](experiment)


def references_for(experiment: Experiment) -> list[str]:
    """The references for these data and this model: tables with a linear last layer, or words with a bias in it."""
    task, about = experiment.task, experiment.population.about
    if about["task"] == "language":
        return ["constant"] if _bias(task.init(0)) else []
    if about.get("input", "table") != "table" or task.linear() is None:
        return []
    return ["constant", "pooled"] if task.smooth else ["constant"]


def constant(experiment: Experiment) -> Params:
    """A constant prediction: zero weights in the last layer, and the mean or the log class frequencies as its bias."""
    task = experiment.task
    params = _begun(experiment)
    if experiment.population.about["task"] == "language":
        return _unigram(experiment, params)
    y = _rows(experiment.split.train)["y"]
    v = torch.zeros_like(task.linear().coefficients(params))
    if experiment.population.about["task"] == "regression":
        v[0, 0] = y.double().mean()
    elif not task.smooth:
        v[0, 0] = 1.0 if y.double().mean() >= 0.5 else -1.0
    else:
        counts = torch.bincount(y.long(), minlength=len(v)).double()
        v[:, 0] = ((counts + 0.5) / (counts.sum() + 0.5 * len(v))).log()
    model: Params = task.linear().replaced(params, v)
    return model


def _bias(params: Params) -> str:
    """The name of the bias of a language model's last layer, which is the last parameter; empty if it has none."""
    *_, name = params
    return name if name.endswith("bias") and name.removesuffix("bias") + "weight" in params else ""


def _unigram(experiment: Experiment, params: Params) -> Params:
    """The frequency of each token in the training rows, without context."""
    name, task = _bias(params), experiment.task
    assert isinstance(task, LanguageModel)
    tokens = _rows(experiment.split.train)["y"].long().flatten()
    counts = torch.bincount(tokens[tokens != task.padding], minlength=len(params[name])).double()
    counts[task.padding] = -0.5 + 1e-6  # never a target
    bias = ((counts + 0.5) / (counts + 0.5).sum()).log().float()
    weight = name.removesuffix("bias") + "weight"
    return {**params, name: bias, weight: torch.zeros_like(params[weight])}


def pooled(experiment: Experiment) -> Params:
    """The model fitted to all training rows in one place; choices are made on the validation rows."""
    return _solved(experiment) if experiment.task.network.is_linear else _trained(experiment)


def _solved(experiment: Experiment) -> Params:
    head, params = experiment.task.linear(), _begun(experiment)
    problem: LinearProblem = head.problem(params, _rows(experiment.split.train))
    anchor = torch.zeros_like(head.coefficients(params))
    fits: list[Params] = []
    start: Tensor | None = None
    for pull in sorted(PULLS, reverse=True):
        pulls = torch.full(anchor.shape[-1:], pull, dtype=anchor.dtype)
        pulls[0] = min(pull, 1e-3)
        start = problem.solve(anchor, pulls, start)
        fits.append(head.replaced(params, start))
    return min(fits, key=_validated(experiment))


def _trained(experiment: Experiment) -> Params:
    """Trains by Adam on shuffled rows until the validation loss stops improving; returns the best of two rates."""
    task, rows = experiment.task.differentiated("autograd"), _rows(experiment.split.train)
    judged, best = _validated(experiment), (math.inf, _begun(experiment))
    for rate in RATES:
        params = {name: p.clone().requires_grad_() for name, p in _begun(experiment).items()}
        optimizer = torch.optim.Adam(list(params.values()), lr=rate)
        waited, lowest = 0, math.inf
        for epoch in range(EPOCHS):
            order = torch.from_numpy(generator("pooled", experiment.seed, epoch).permutation(len(rows["y"])))
            for part in order.split(BATCH):
                optimizer.zero_grad()
                task.loss(params, {name: column[part] for name, column in rows.items()}).backward()
                optimizer.step()
            kept = {name: p.detach().clone() for name, p in params.items()}
            value = judged(kept)
            best = min(best, (value, kept), key=lambda pair: pair[0])
            waited = 0 if value < lowest * (1 - 1e-3) else waited + 1
            lowest = min(lowest, value)
            if waited >= PATIENCE:
                break
    return best[1]


def _begun(experiment: Experiment) -> Params:
    params: Params = experiment.task.init(int(mix("init", experiment.seed)) & 0x7FFFFFFF)
    return params


def _rows(part: Rows) -> Params:
    """All clients' rows of a part, as one batch."""
    rows, _ = part.of(part.clients)
    index = torch.from_numpy(rows)
    batch = {name: part.population.columns[name][index] for name in ("x", "y")}
    return {**batch, "mask": torch.ones(len(index))}


def _validated(experiment: Experiment) -> Callable[[Params], float]:
    """The loss of a model on the validation rows, or on the training rows if there are none."""
    selection = experiment.split.selection.validation
    part: Any = selection if selection.sizes().sum() else experiment.split.train
    rows, task = _rows(part), experiment.task

    def loss(params: Params) -> float:
        with torch.no_grad():
            found = float(task.mean_loss(task.predict(params, rows), rows))
        return found if math.isfinite(found) else math.inf

    return loss
