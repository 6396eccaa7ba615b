"""FedRep by hand: a body of one weight, a head of one weight, one row.

x = 1, the body's h = w x + b with w = 2, b = 0, the head says p h + c with p = 1, c = 0; the target is 1, the loss half
the square.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bespoke.data.population import Population
from bespoke.data.splits import everything
from bespoke.federation.batches import Orders, SlicedBatches
from bespoke.method import Batching, Cohort, Setting
from bespoke.methods import FedRep
from bespoke.models.networks import MLP
from bespoke.models.task import Regression

TASK = Regression(MLP(1, 1, (1,)))
BODY = {"features.1.weight": torch.tensor([[2.0]]), "features.1.bias": torch.zeros(1)}
HEAD = {"head.weight": torch.tensor([[1.0]]), "head.bias": torch.zeros(1)}


def batches(method: FedRep, support: bool = False, rows: int = 1) -> SlicedBatches:
    columns: dict[str, Any] = {"x": torch.arange(1.0, rows + 1)[:, None], "y": torch.arange(1.0, rows + 1)}
    population = Population.build(columns, np.repeat(["a"], rows))
    batching = method.support_batching() if support else method.batching()
    return Orders.draw(everything(population), np.array([0]), batching, 1).sliced(0)


def test_head_first_then_the_body_with_the_head_held() -> None:
    """Head, two epochs: it says 2, slope 1: p = 1 - 0.1 * 2 = 0.8, c = -0.1; then 1.5, slope 0.5: p = 0.7, c = -0.15.

    Body, one epoch: it says 1.25, slope 0.25 * 0.7: w and b by -0.1 * 0.175.
    """
    method = FedRep(TASK, lr=0.1, head_epochs=2)
    private, up = method.client_round({"params": BODY}, {"head": HEAD}, batches(method))
    assert private["head"]["head.weight"].item() == pytest.approx(0.7)
    assert private["head"]["head.bias"].item() == pytest.approx(-0.15)
    assert set(up["delta"]) == set(BODY)  # the head stays
    assert up["delta"]["features.1.weight"].item() == pytest.approx(-0.0175, rel=1e-5)
    assert up["delta"]["features.1.bias"].item() == pytest.approx(-0.0175, rel=1e-5)


def test_the_head_is_held_in_every_epoch_of_the_body() -> None:
    """Head, one epoch: p = 0.8, c = -0.1. Body, w = 2, b = 0: it says 1.5, slope 0.5 * 0.8: both by -0.04.

    Second epoch, the head as it was: it says 0.8 * (1.96 - 0.04) - 0.1 = 1.436, slope 0.436 * 0.8: both by -0.03488. A
    head that moved along would be p = 0.7, c = -0.15 by then.
    """
    method = FedRep(TASK, lr=0.1, head_epochs=1, epochs=2)
    private, up = method.client_round({"params": BODY}, {"head": HEAD}, batches(method))
    assert up["delta"]["features.1.weight"].item() == pytest.approx(-0.07488, rel=1e-5)
    assert up["delta"]["features.1.bias"].item() == pytest.approx(-0.07488, rel=1e-5)
    assert private["head"]["head.weight"].item() == pytest.approx(0.8)
    assert private["head"]["head.bias"].item() == pytest.approx(-0.1)


def test_decay_by_hand() -> None:
    """0.5 of decay. Head: p = 1 - 0.1 * (2 + 0.5) = 0.75, c = -0.1. Body: it says 1.4, slope 0.4 * 0.75 = 0.3."""
    method = FedRep(TASK, lr=0.1, head_epochs=1, weight_decay=0.5)
    private, up = method.client_round({"params": BODY}, {"head": HEAD}, batches(method))
    assert private["head"]["head.weight"].item() == pytest.approx(0.75)
    assert up["delta"]["features.1.weight"].item() == pytest.approx(-0.1 * (0.3 + 0.5 * 2), rel=1e-5)
    assert up["delta"]["features.1.bias"].item() == pytest.approx(-0.03, rel=1e-5)


def test_momentum_by_hand() -> None:
    """0.25 of momentum. Head: velocities (2, 1), then (0.5 + 1, 0.25 + 0.5): p = 0.65, c = -0.175.

    Body: it says 1.125, slope 0.08125; w = 1.991875, b = -0.008125. Then it says 1.1144375, slope 0.074384375, and the
    velocity is 0.0203125 + 0.074384375.
    """
    method = FedRep(TASK, lr=0.1, head_epochs=2, epochs=2, momentum=0.25)
    private, up = method.client_round({"params": BODY}, {"head": HEAD}, batches(method))
    assert private["head"]["head.weight"].item() == pytest.approx(0.65)
    assert private["head"]["head.bias"].item() == pytest.approx(-0.175)
    assert up["delta"]["features.1.bias"].item() == pytest.approx(-0.0175946875, rel=1e-4)


def test_batches_are_those_of_the_knobs() -> None:
    """Four epochs of the head and three of the body in a round, in one order of the rows."""
    method = FedRep(TASK, batch_size=5, head_epochs=4, epochs=3, adapt_epochs=6, drop_last=True, shuffle=False)
    assert method.batching() == Batching(5, 7, drop_last=True, shuffle=False, reshuffle=False)
    assert method.support_batching() == Batching(5, 6, drop_last=True, reshuffle=False)


def test_a_client_begins_with_the_head_of_the_first_model() -> None:
    assert FedRep(TASK).init_private({**BODY, **HEAD}) == {"head": HEAD}


def test_a_rate_of_its_own_for_the_head() -> None:
    method = FedRep(TASK, lr=0.1, head_lr=0.2, head_epochs=1)
    private, _ = method.client_round({"params": BODY}, {"head": HEAD}, batches(method))
    assert private["head"]["head.weight"].item() == pytest.approx(0.6)


def test_the_server_averages_bodies_and_keeps_the_first_head() -> None:
    method = FedRep(TASK)
    server = method.init_server({**BODY, **HEAD}, Setting(0, 1))
    sums = {"delta": {n: torch.ones_like(p) for n, p in BODY.items()}, "weight": torch.tensor(2.0)}
    new = method.server_round(server, Cohort(sums, {}, (0, 1)))
    assert new["params"]["features.1.weight"].item() == 2.5
    assert set(method.broadcast(new)["params"]) == set(BODY)
    assert method.params(new)["head.weight"].item() == 1.0


def test_in_the_end_everyone_fits_its_head_to_the_final_body() -> None:
    method = FedRep(TASK, lr=0.1, adapt_epochs=2)
    before, after = method.personalize({"params": BODY}, {"head": HEAD}, batches(method, support=True))
    assert before["head.weight"].item() == 1.0
    assert after["head.weight"].item() == pytest.approx(0.7)
    assert torch.equal(after["features.1.weight"], BODY["features.1.weight"])


def test_the_body_is_asked_once_for_each_batch() -> None:
    """Three batches in a head's five epochs: three times, not fifteen; the same head as with the body asked anew."""
    asked = []

    class Counting(Regression):
        def features(self, params: Any, batch: Any) -> Any:
            asked.append(1)
            return super().features(params, batch)

    method = FedRep(Counting(MLP(1, 1, (1,))), lr=0.01, head_epochs=5, batch_size=2)
    given = batches(method, rows=5).part(0, 5)
    found = method.fit(BODY, HEAD, given)
    assert len(asked) == 3
    from bespoke.methods.parts.descend import descend

    expected = descend(TASK, {**BODY, **HEAD}, given, lr=0.01, only=("head.",))
    for name in HEAD:
        torch.testing.assert_close(found[name], expected[name])
