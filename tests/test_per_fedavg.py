"""Per-FedAvg: numbers that can be checked by hand.

One row x = 1, y = 1: weight and bias are equal at all times, u say, and both slopes are 2 u - 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bespoke.methods import PerFedAvg
from bespoke.tensors import Params
from by_hand import TASK, ZERO, batches_of, numbers, rounds


@pytest.mark.parametrize(("variant", "expected"), [("first-order", 0.4), ("hessian-free", 0.32)])
def test_a_step_by_hand(variant: Any, expected: float) -> None:
    """alpha 0.1: from 0 to 0.1, where the slope is -0.8. First-order, lr 0.5: 0.4.

    The Hessian is all ones: along (-0.8, -0.8) it gives -1.6, and -0.8 + 0.1 * 1.6 = -0.64 leads to 0.32. The loss is
    quadratic, so the difference is exact for any probe.
    """
    made = PerFedAvg(TASK, lr=0.5, alpha=0.1, variant=variant, probe=0.5)
    server, _ = rounds(made, {0: batches_of([1.0], [1.0], made)}, 1)
    assert numbers(server["params"]) == pytest.approx((expected, expected), rel=1e-5)


def test_hessian_free_follows_the_gradient_of_the_loss_after_a_step() -> None:
    """With all rows in every batch it is the gradient of F(w) = f(w - alpha grad f(w)), here by autograd twice."""
    made = PerFedAvg(TASK, lr=0.2, alpha=0.1, variant="hessian-free")
    batches = batches_of([1.0, -2.0, 0.5], [2.0, 1.0, 0.0], made)
    start = {"weight": torch.tensor([[0.4]]), "bias": torch.tensor([-0.2])}
    live = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
    first = torch.autograd.grad(TASK.loss(live, batches[0]), list(live.values()), create_graph=True)
    after = {name: p - 0.1 * g for (name, p), g in zip(live.items(), first)}
    slopes = torch.autograd.grad(TASK.loss(after, batches[0]), list(live.values()))
    _, up = made.client_round({"params": start}, {}, batches)
    moved = [d / 3 for d in up["delta"].values()]
    for found, slope in zip(moved, slopes):
        assert found.flatten().tolist() == pytest.approx((-0.2 * slope).flatten().tolist(), rel=1e-3)


@pytest.mark.parametrize(("variant", "draws"), [("first-order", 2), ("hessian-free", 3)])
def test_the_batches_of_a_step_are_drawn_apart(variant: Any, draws: int) -> None:
    """Rows 0 ... 7, four to a batch, two epochs: each step has `draws` batches, of differently shuffled epochs."""
    seen: list[list[list[float]]] = []

    class Watched(PerFedAvg):
        def meta_step(self, params: Params, drawn: list[Any], lr: Any) -> Params:
            seen.append([batch[0]["x"].flatten().tolist() for batch in drawn])
            return params

    made = Watched(TASK, variant=variant, batch_size=4, epochs=2)
    rows = [float(n) for n in range(8)]
    made.client_round({"params": ZERO}, {}, batches_of(rows, rows, made))
    assert [len(step) for step in seen] == [draws] * 4
    for first, second in zip(seen[::2], seen[1::2]):  # the two steps of an epoch
        orders = [(*a, *b) for a, b in zip(first, second)]
        assert all(sorted(order) == rows for order in orders)
        assert len(set(orders)) == draws


def test_candidates_are_steps_on_all_support_rows() -> None:
    """From 0.4 with alpha 0.1: slopes -0.2 and then 0.84 - 1 = -0.16 lead to 0.42 and 0.436."""
    made = PerFedAvg(TASK, alpha=0.1, steps=2, batch_size=1)
    start = {"weight": torch.full((1, 1), 0.4), "bias": torch.full((1,), 0.4)}
    support = batches_of([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], made, support=True)
    models = list(made.personalize({"params": start}, {}, support))
    assert made.candidates() == ("global", "step 1", "step 2")
    assert [numbers(model)[0] for model in models] == pytest.approx([0.4, 0.42, 0.436])
