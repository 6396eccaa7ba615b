"""F1 of two classes, against scikit-learn and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from bespoke.models import build_task
from bespoke.models.networks import Linear
from bespoke.models.task import Classification, finished

TASK = Classification(Linear(2, 2), metrics=("accuracy", "f1"))


def f1(said: list[int], there: list[int], mask: list[float] | None = None) -> float:
    outputs = torch.nn.functional.one_hot(torch.tensor(said), 2).float()
    batch = {"y": torch.tensor(there), "mask": torch.tensor(mask or [1.0] * len(said))}
    return float(finished("f1", TASK.score(outputs, batch)))


def test_by_hand() -> None:
    """Found 1 of 2, said 1: 2 / 3; of the others found 2 of 2, said 3: 4 / 5."""
    assert f1([1, 0, 0, 0], [1, 1, 0, 0]) == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert f1([1, 1, 1, 1], [1, 1, 0, 0]) == pytest.approx(1 / 3)  # a constant answer to balanced rows
    assert f1([1, 1], [1, 1]) == 1.0  # a class that is neither there nor said is not held against anybody
    assert f1([1, 0, 1], [1, 0, 0], [1.0, 1.0, 0.0]) == 1.0  # padding does not count


def test_against_scikit_learn() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        said, there = random.integers(0, 2, (2, 12)).tolist()
        expected = f1_score(there, said, average="macro", labels=sorted({*said, *there}))
        if len({*said, *there}) == 2:
            assert f1(said, there) == pytest.approx(expected, abs=1e-6)


def test_two_classes_have_it_and_three_have_not() -> None:
    about = {"task": "classification", "features": ["a"]}
    assert "f1" in build_task({**about, "classes": ["no", "yes"]}).metrics
    assert "f1" not in build_task({**about, "classes": ["a", "b", "c"]}).metrics
