"""pFedMe: numbers that can be checked by hand.

One row x = 1, y = 1: weight and bias are equal at all times, u say, and both slopes are 2 u - 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bespoke.methods import PFedMe
from bespoke.methods.parts.server_optimizer import ServerOptimizer
from by_hand import TASK, ZERO, batches_of, numbers, rounds


def row(made: PFedMe, support: bool = False) -> Any:
    return batches_of([1.0], [1.0], made, support=support)


def test_a_round_by_hand() -> None:
    """lam 2, eta_p 0.1, K 2, lam eta = 0.5. First batch: theta = 0.1, then 0.1 - 0.1 (-0.8 + 2 * 0.1) = 0.16; w = 0.08.

    Second batch, theta carried over: 0.16 - 0.1 (-0.68 + 2 * 0.08) = 0.212, then 0.212 - 0.1 (-0.576 + 2 * 0.132) =
    0.2432; w = 0.08 + 0.5 (0.2432 - 0.08) = 0.1616.
    """
    made = PFedMe(TASK, lr=0.25, lam=2.0, personal_lr=0.1, inner_steps=2)
    server, private = rounds(made, {0: row(made)}, 1)
    assert numbers(server["params"]) == pytest.approx((0.08, 0.08))
    assert private[0] == {}
    made = PFedMe(TASK, lr=0.25, lam=2.0, personal_lr=0.1, inner_steps=2, epochs=2)
    server, _ = rounds(made, {0: row(made)}, 1)
    assert numbers(server["params"]) == pytest.approx((0.1616, 0.1616))
    shared, personal = made.personalize({"params": ZERO}, {}, row(made, support=True))
    assert numbers(shared) == (0.0, 0.0)
    assert numbers(personal) == pytest.approx((0.2432, 0.2432))


def test_weight_decay_by_hand() -> None:
    """As above with decay 0.5: the second inner step is 0.1 - 0.1 (-0.8 + 0.2 + 0.05) = 0.155; w = 0.0775."""
    made = PFedMe(TASK, lr=0.25, lam=2.0, personal_lr=0.1, inner_steps=2, weight_decay=0.5)
    server, _ = rounds(made, {0: row(made)}, 1)
    assert numbers(server["params"]) == pytest.approx((0.0775, 0.0775))


def test_the_server_mixes_old_and_new() -> None:
    """beta = 2 goes twice as far as the mean of the clients."""
    made = PFedMe(TASK, lr=0.25, lam=2.0, personal_lr=0.1, inner_steps=2, server=ServerOptimizer(lr=2.0))
    server, _ = rounds(made, {0: row(made), 1: row(made)}, 1)
    assert numbers(server["params"]) == pytest.approx((0.16, 0.16))


def test_the_step_is_the_gradient_of_the_moreau_envelope() -> None:
    """With many inner steps theta solves 2 u - 1 + lam (u - w) = 0: u = (1 + lam w) / (2 + lam) = 0.4 for lam 3, w 1/3.

    The envelope's gradient is lam (w - u) = -0.2, and w moves by -eta times that.
    """
    made = PFedMe(TASK, lr=0.1, lam=3.0, personal_lr=0.1, inner_steps=300)
    start = {"weight": torch.full((1, 1), 1 / 3), "bias": torch.full((1,), 1 / 3)}
    w, theta = made.local(start, row(made))
    assert numbers(theta) == pytest.approx((0.4, 0.4), rel=1e-5)
    assert numbers(w) == pytest.approx((1 / 3 + 0.02, 1 / 3 + 0.02), rel=1e-5)


def test_epochs_of_the_personal_model() -> None:
    assert PFedMe(TASK, epochs=3).support_batching().epochs == 3
    assert PFedMe(TASK, epochs=3, adapt_epochs=7).support_batching().epochs == 7
    assert PFedMe(TASK, inner_steps=4).batching().uses == 4  # steps are counted
