"""APFL: numbers that can be checked by hand.

One row x = 1, y = 1: weight and bias are equal at all times, so one number stands for a model u, with slopes 2 u - 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.methods import APFL, FedAvg
from bespoke.methods.parts.descend import descend
from by_hand import TASK, ZERO, batches_of, numbers, rounds
from small_worlds import BATCH, world

LOOP = Choice(False, 1, 0, 1, "autograd", "")


@pytest.mark.parametrize(("adapt", "alpha"), [("step", 0.4915), ("round", 0.5), ("never", 0.5)])
def test_two_steps_by_hand(adapt: Any, alpha: float) -> None:
    """lr 0.1, alpha 0.5. First step: mixture 0, slopes -1, so v = 0.05; v - w = 0, so alpha stays; w = 0.1.

    Second: mixture 0.075, slopes -0.85: v = 0.05 + 0.1 * 0.5 * 0.85 = 0.0925; alpha moves by -0.1 * 2 * (0.05 - 0.1) *
    (-0.85) = -0.0085; w = 0.1 + 0.1 * 0.8 = 0.18.
    """
    made = APFL(TASK, lr=0.1, alpha=0.5, epochs=2, adapt=adapt)
    server, private = rounds(made, {0: batches_of([1.0], [1.0], made)}, 1)
    assert numbers(server["params"]) == pytest.approx((0.18, 0.18))
    assert numbers(private[0]["model"]) == pytest.approx((0.0925, 0.0925))
    assert private[0]["alpha"].item() == pytest.approx(alpha)
    shared, personal = made.personalize(made.broadcast(server), private[0], batches_of([1.0], [1.0], made))
    assert numbers(shared) == pytest.approx((0.18, 0.18))
    mixed = alpha * 0.0925 + (1 - alpha) * 0.18
    assert numbers(personal) == pytest.approx((mixed, mixed))


def test_alpha_once_a_round_by_hand() -> None:
    """The second round begins with v 0.0925 and w 0.18: mixture 0.13625, slopes -0.7275.

    alpha = 0.5 - 0.1 * 2 * (0.0925 - 0.18) * (-0.7275) = 0.48726875, and stays so in the round's second step.
    """
    made = APFL(TASK, lr=0.1, alpha=0.5, epochs=2, adapt="round")
    _, private = rounds(made, {0: batches_of([1.0], [1.0], made)}, 2)
    assert private[0]["alpha"].item() == pytest.approx(0.48726875)


def test_alpha_stays_between_0_and_1() -> None:
    """lr 1, shared model 5. Own model 10: mixture 7.5, slopes 14, alpha moves by -2 * 5 * 14; own -10: by -2 * 15 * 6.

    Own model 0.5, which fits the row: mixture 2.75, slopes 4.5, alpha moves by 2 * 4.5 * 4.5.
    """
    made = APFL(TASK, lr=1.0)
    batches = batches_of([1.0], [1.0], made)
    shared = {"weight": torch.full((1, 1), 5.0), "bias": torch.full((1,), 5.0)}
    found = []
    for own in (10.0, -10.0, 0.5):
        model = {"weight": torch.full((1, 1), own), "bias": torch.full((1,), own)}
        private, _ = made.client_round({"params": shared}, {"model": model, "alpha": torch.tensor(0.5)}, batches)
        found.append(private["alpha"].item())
    assert found == [0.0, 0.0, 1.0]


def test_the_ends_are_local_training_and_the_shared_model() -> None:
    x, y = [1.0, 2.0, -1.0, 0.5, 3.0], [2.0, 1.0, 0.0, 1.0, 4.0]
    made = APFL(TASK, lr=0.1, alpha=1.0, adapt="never", batch_size=2, epochs=2)
    batches = batches_of(x, y, made)
    private, up = made.client_round({"params": ZERO}, made.init_private(ZERO), batches)
    alone = descend(TASK, ZERO, batches, lr=0.1)
    assert numbers(private["model"]) == pytest.approx(numbers(alone))
    assert numbers(up["delta"]) == pytest.approx(tuple(5 * n for n in numbers(alone)))  # w_k takes the same steps
    made = APFL(TASK, lr=0.1, alpha=0.0, adapt="never", batch_size=2)
    private, _ = made.client_round({"params": ZERO}, made.init_private(ZERO), batches_of(x, y, made))
    assert numbers(private["model"]) == (0.0, 0.0)
    _, personal = made.personalize({"params": alone}, private, batches)
    assert numbers(personal) == pytest.approx(numbers(alone))


def test_it_shares_the_model_that_fedavg_trains() -> None:
    """Whatever the clients' own models do."""
    place = world("linear")
    knobs: Any = {"lr": 0.1, "epochs": 2, "batch_size": BATCH}
    found = []
    for made in (FedAvg(place.task, **knobs), APFL(place.task, **knobs)):
        with Engine(place.population, LOOP) as engine:
            engine.open(ClientWork(made, place.split.train), place.task.init(5))
            found.append(engine.round(made.init_server(place.task.init(5)), np.arange(7), key=1).cohort.sums["delta"])
    for name, leaf in found[0].items():
        torch.testing.assert_close(found[1][name], leaf)


def test_a_client_that_never_trained_makes_its_model_beside_a_still_shared_one() -> None:
    """Shared model 0, two epochs on one row: v = 0.05; then mixture 0.025, slopes -0.95: v = 0.05 + 0.1 * 0.5 * 0.95.

    alpha: 0.5 - 0.1 * 2 * 0.05 * (-0.95) = 0.5095. What the untrained state says of a model does not matter.
    """
    made = APFL(TASK, lr=0.1, alpha=0.5, adapt_epochs=2)
    old = made.init_private({"weight": torch.full((1, 1), 9.0), "bias": torch.full((1,), 9.0)})
    private = made.newcomer({"params": ZERO}, old, batches_of([1.0], [1.0], made, support=True))
    assert numbers(private["model"]) == pytest.approx((0.0975, 0.0975))
    assert private["alpha"].item() == pytest.approx(0.5095)
