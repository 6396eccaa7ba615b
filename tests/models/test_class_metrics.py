"""Balanced accuracy, F1 and AUC, against scikit-learn and by hand; the metric that is taken by default."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from bespoke.models import build_task, metric
from bespoke.models.metric import default_metric
from bespoke.models.networks import Linear
from bespoke.models.scores import finished
from bespoke.models.task import Classification

TASK = Classification(Linear(2, 2), metrics=("accuracy", "f1"))
NAMES = ("auc", "balanced_accuracy", "f1")


def f1(said: list[int], there: list[int], mask: list[float] | None = None) -> float:
    outputs = torch.nn.functional.one_hot(torch.tensor(said), 2).float()
    batch = {"y": torch.tensor(there), "mask": torch.tensor(mask or [1.0] * len(said))}
    return float(finished("f1", TASK.score(outputs, batch)))


def test_f1_by_hand() -> None:
    """Found 1 of 2, said 1: 2 / 3; of the others found 2 of 2, said 3: 4 / 5."""
    assert f1([1, 0, 0, 0], [1, 1, 0, 0]) == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert f1([1, 1, 1, 1], [1, 1, 0, 0]) == pytest.approx(1 / 3)  # a constant answer to balanced rows
    assert f1([1, 1], [1, 1]) == 1.0  # a class that is neither there nor said is not held against anybody
    assert f1([1, 0, 1], [1, 0, 0], [1.0, 1.0, 0.0]) == 1.0  # padding does not count


def scored(margins: list[float], y: list[int], mask: list[float] | None = None) -> dict[str, float]:
    """The metrics of two classes where class 1 leads by these margins."""
    outputs = torch.tensor([[0.0, margin] for margin in margins])
    batch = {"y": torch.tensor(y), "mask": torch.tensor(mask or [1.0] * len(y))}
    sums = Classification(Linear(1, 2)).score(outputs, batch)
    return {name: float(finished(name, sums)) for name in ("accuracy", *NAMES)}


def test_auc_and_balanced_accuracy_by_hand() -> None:
    """Ones at 3 and 1, zeros at 2, 1 and -1: of six pairs 3 + 1 are in order and one is tied, so 4.5 / 6."""
    found = scored([3.0, 1.0, 2.0, 1.0, -1.0], [1, 1, 0, 0, 0])
    assert found["auc"] == pytest.approx(4.5 / 6)
    assert found["balanced_accuracy"] == pytest.approx((1 + 1 / 3) / 2)  # both ones found, one of three zeros
    assert found["accuracy"] == pytest.approx(3 / 5)
    assert scored([9.0, 3.0, 1.0, 2.0, 1.0, -1.0], [0, 1, 1, 0, 0, 0], [0.0, 1, 1, 1, 1, 1]) == pytest.approx(found)
    assert scored([0.0] * 4, [0, 1, 1, 0])["auc"] == 0.5  # a constant


def test_a_client_of_one_class_has_no_auc() -> None:
    found = scored([1.0, -1.0, -1.0], [0, 0, 0])
    assert np.isnan(found["auc"])
    assert found["balanced_accuracy"] == pytest.approx(2 / 3)
    assert np.isnan(scored([1.0, 2.0], [1, 0], [0.0, 0.0])["f1"])  # nor one without rows anything


def test_a_model_that_diverged_has_no_scores_but_padding_may_be_anything() -> None:
    nan = float("nan")
    assert all(np.isnan(value) for value in scored([nan, 1.0], [0, 1]).values())
    assert scored([nan, 1.0, -1.0], [0, 1, 0], [0.0, 1.0, 1.0])["auc"] == 1.0


def batches(classes: int, clients: int, rows: int, seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Random outputs with many ties, and rows of which some are padding."""
    draw = np.random.default_rng(seed)
    outputs = draw.normal(size=(8, classes))[draw.integers(0, 8, (clients, rows))]
    y = draw.integers(0, classes, (clients, rows))
    y[0] = 0  # a client of one class
    mask = draw.random((clients, rows)) < 0.7
    mask[1] = False  # a client without rows
    mask[2, 1:] = True
    return torch.tensor(outputs, dtype=torch.float32), {"y": torch.tensor(y), "mask": torch.tensor(mask).float()}


def expected(outputs: np.ndarray, y: np.ndarray, name: str) -> float:
    """The metric by scikit-learn; where a class is not there, one-vs-rest over those that are."""
    if not len(y):
        return float("nan")
    if name == "balanced_accuracy":
        return float(balanced_accuracy_score(y, outputs.argmax(1)))
    if name == "f1":
        return float(f1_score(y, outputs.argmax(1), average="macro"))
    shares = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    present = [c for c in range(outputs.shape[1]) if 0 < (y == c).sum() < len(y)]
    if outputs.shape[1] == 2:
        present = present[:1] and [1]
    return float(np.mean([roc_auc_score(y == c, shares[:, c]) for c in present])) if present else float("nan")


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("rows", [1, 12, 60])
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true", "ignore:A single label was found")
def test_against_scikit_learn_looped_and_vectorized(classes: int, rows: int, monkeypatch: Any) -> None:
    task = Classification(Linear(2, classes))
    outputs, batch = batches(classes, 9, rows, seed=classes)
    together = torch.func.vmap(task.score)(outputs, batch)
    monkeypatch.setattr(metric, "CELLS", 2 * rows)  # two classes at a time
    for client in range(9):
        kept = batch["mask"][client].bool().numpy()
        own = outputs[client].numpy()[kept], batch["y"][client].numpy()[kept]
        alone = task.score(outputs[client], {name: column[client] for name, column in batch.items()})
        for name in NAMES:
            wanted = expected(*own, name)
            assert float(finished(name, alone)) == pytest.approx(wanted, abs=1e-6, nan_ok=True), (name, client)
            assert float(finished(name, together)[client]) == pytest.approx(wanted, abs=1e-6, nan_ok=True), name


def test_auc_of_a_margin_and_of_a_large_client() -> None:
    """A linear SVM has one output; thousands of rows lose no digits."""
    draw = np.random.default_rng(0)
    y, noise = draw.integers(0, 2, 30_000), draw.normal(size=30_000)
    margins = torch.tensor(noise + y, dtype=torch.float32)[:, None]
    sums = Classification(Linear(1, 1), hinge=True).score(margins, {"y": torch.tensor(y), "mask": torch.ones(30_000)})
    assert float(finished("auc", sums)) == pytest.approx(roc_auc_score(y, margins[:, 0].numpy()), abs=1e-5)
    right = balanced_accuracy_score(y, margins[:, 0].numpy() > 0)
    assert float(finished("balanced_accuracy", sums)) == pytest.approx(right, abs=1e-6)


def test_metrics_of_a_task() -> None:
    about = {"task": "classification", "features": ["a"]}
    few = build_task({**about, "classes": ["no", "yes"]}).metrics
    assert few == ("accuracy", "error", "loss", "balanced_accuracy", "f1", "auc")
    assert "auc" in build_task({**about, "classes": [*"abcdefghijklmnopqrst"]}).metrics
    many = build_task({**about, "classes": [*"abcdefghijklmnopqrstu"]}).metrics  # 21
    assert many == few[:-1]


@pytest.mark.parametrize(
    ("task", "y", "name", "reason"),
    [
        ("regression", [0.0, 1.0], "mse", "squared"),
        ("classification", [0, 1], "accuracy", "50 % of the training rows"),
        ("classification", [0] * 4 + [1], "accuracy", "80 % of the training rows"),  # 80 % is not more than 80 %
        ("classification", [0] * 5 + [1], "loss", "83 % of the training rows are of one class, so a constant answer"),
        ("classification", [2] * 47 + [0, 1, 1], "loss", "94 % of the training rows"),
        ("classification", [0] * 999 + [1], "loss", "over 99 % of the training rows"),
        ("language", [[1, 2]], "accuracy", "right"),
    ],
)
def test_default_metric(task: str, y: list[Any], name: str, reason: str) -> None:
    found, why = default_metric({"task": task}, torch.tensor(y))
    assert found == name
    assert reason in why
    assert why.endswith(".")
