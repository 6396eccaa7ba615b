"""Knobs end where they belong."""

from __future__ import annotations

from typing import Any

import pytest

from bespoke.methods import FedAvg, FedProx, FineTune, Local
from bespoke.models.networks import Linear
from bespoke.models.task import Regression

TASK = Regression(Linear(2))


@pytest.mark.parametrize("kind", [FineTune, Local])
@pytest.mark.parametrize("on", [True, False])
def test_personalization_batches_as_told(kind: Any, on: bool) -> None:
    batching = kind(TASK, batch_size=7, epochs=4, drop_last=on, reshuffle=not on).support_batching()
    assert (batching.size, batching.epochs, batching.drop_last, batching.reshuffle) == (7, 4, on, not on)
    assert batching.shuffle


@pytest.mark.parametrize("kind", [FedAvg, FedProx])
@pytest.mark.parametrize("on", [True, False])
def test_training_batches_as_told(kind: Any, on: bool) -> None:
    batching = kind(TASK, batch_size=7, epochs=4, drop_last=on, shuffle=not on).batching()
    assert (batching.size, batching.epochs, batching.drop_last, batching.shuffle) == (7, 4, on, not on)


def test_epochs_kept_include_the_last() -> None:
    assert FineTune(TASK, epochs=7, every=3).epochs_kept() == [3, 6, 7]
    assert FineTune(TASK, epochs=3, every=1, lrs=(0.1, 0.2)).candidates()[:3] == (
        "epoch 0",
        "lr 0.1, epoch 1",
        "lr 0.1, epoch 2",
    )
