"""Linear problems with more inputs than rows: solved in the span of the rows, to the same minimum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from bespoke.models.linear_problem import WIDE, LinearProblem

ROWS, INPUTS = 30, WIDE + 40


def problem(loss: Any, outputs: int, padded: int = 0) -> LinearProblem:
    rng = np.random.default_rng(3)
    x = np.column_stack([np.ones(ROWS), rng.normal(size=(ROWS, INPUTS - 1))])
    y = rng.integers(0, outputs, ROWS) if outputs > 1 else rng.normal(size=ROWS)
    mask = np.r_[np.ones(ROWS - padded), np.zeros(padded)]
    return LinearProblem(torch.tensor(x * mask[:, None]), torch.tensor(y), torch.tensor(mask), loss, outputs)


@pytest.mark.parametrize("padded", [0, 7])
def test_squares_in_closed_form(padded: int) -> None:
    made = problem("squares", 1, padded)
    pull, anchor = np.r_[0.1, np.full(INPUTS - 1, 3.0)], np.linspace(-1, 1, INPUTS)
    x, y = made.x.numpy(), made.y.numpy()
    wanted = np.linalg.solve(x.T @ x + np.diag(pull), x.T @ y + pull * anchor)
    found = made.solve(torch.tensor(anchor)[None], torch.tensor(pull))
    assert found.numpy()[0] == pytest.approx(wanted, abs=1e-9)


def test_classes_as_scikit_learn_has_them() -> None:
    """A common intercept penalty cannot be told to scikit-learn: the column of ones is one of its features."""
    for outputs in (2, 4):
        made = problem("softmax", outputs)
        found = made.solve(torch.zeros(outputs, INPUTS, dtype=torch.double), torch.tensor(2.0, dtype=torch.double))
        model = LogisticRegression(C=0.5, fit_intercept=False, tol=1e-10, max_iter=5000)
        if outputs == 2:  # scikit-learn has one row u = v_1 - v_0, and u^2 / 4 is the penalty of both
            wanted = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-10, max_iter=5000).fit(made.x, made.y).coef_
            assert (found[1] - found[0]).numpy() == pytest.approx(wanted[0], abs=1e-4)
        else:
            assert found.numpy() == pytest.approx(model.fit(made.x, made.y).coef_, abs=1e-3)


def test_clients_side_by_side() -> None:
    made = problem("softmax", 3)
    anchors = torch.randn(2, 3, INPUTS, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    pull = torch.tensor(1.0, dtype=torch.double)
    both = torch.func.vmap(lambda anchor: made.solve(anchor, pull))(anchors)
    assert both[1] == pytest.approx(made.solve(anchors[1], pull).numpy(), abs=1e-6)
