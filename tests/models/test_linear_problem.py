"""Fits to convergence, held against scikit-learn and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.svm import LinearSVC

from bespoke.models.linear_problem import LinearHead, LinearProblem
from bespoke.models.networks import MLP, Linear
from bespoke.models.task import Classification, Regression

SHAPES = [(50, 3, 2, 1.0), (30, 8, 2, 0.01), (200, 10, 3, 0.1), (120, 12, 8, 1.0)]  # rows, inputs, classes, pull


def problem(rows: int, inputs: int, classes: int, loss: str, seed: int = 0) -> LinearProblem:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, inputs))
    outputs = 2 * x @ rng.normal(size=(inputs, classes)) + rng.gumbel(size=(rows, classes))
    y = outputs[:, 0] if loss == "squares" else outputs.argmax(1)
    ones = torch.ones(rows, dtype=torch.float64)
    design = torch.from_numpy(np.column_stack([np.ones(rows), x]))
    return LinearProblem(design, torch.from_numpy(y), ones, loss, 1 if loss != "softmax" else classes)


def pulls(inputs: int, pull: float, intercept: float | None = None) -> torch.Tensor:
    found = torch.full((inputs + 1,), pull, dtype=torch.float64)
    found[0] = pull if intercept is None else intercept
    return found


def test_squares_are_ridge_regression() -> None:
    given = problem(40, 5, 1, "squares")
    found = given.solve(torch.zeros(1, 6, dtype=torch.float64), pulls(5, 3.0, 1e-12))
    oracle = Ridge(alpha=3.0).fit(given.x[:, 1:].numpy(), given.y.numpy())
    np.testing.assert_allclose(found[0].numpy(), [oracle.intercept_, *oracle.coef_], rtol=1e-8)


def test_an_anchor_by_hand() -> None:
    """One row x = 2, y = 3, without intercept's pull in play: (4 + k) v = 6 + k a, so v = (6 + 2 * 5) / 6 for k = 2."""
    x = torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    one = LinearProblem(x, torch.tensor([3.0]), torch.ones(1).double(), "squares", 1)
    found = one.solve(torch.tensor([[7.0, 5.0]], dtype=torch.float64), pulls(1, 2.0, 1.0))
    np.testing.assert_allclose(found.numpy(), [[7.0, 16 / 6]])


@pytest.mark.parametrize(("rows", "inputs", "classes", "pull"), SHAPES)
def test_classes_are_penalized_logistic_regression(rows: int, inputs: int, classes: int, pull: float) -> None:
    given = problem(rows, inputs, classes, "softmax")
    anchor = torch.from_numpy(np.random.default_rng(1).normal(size=(classes, inputs + 1)))
    weights = pulls(inputs, pull, 0.5)
    found = given.solve(anchor, weights)

    def objective(flat: np.ndarray) -> float:
        v = flat.reshape(classes, -1)
        outputs = given.x.numpy() @ v.T
        top = outputs.max(1, keepdims=True)
        norm = np.log(np.exp(outputs - top).sum(1)) + top[:, 0]
        lost = (norm - outputs[np.arange(rows), given.y.numpy()]).sum()
        return lost + 0.5 * (weights.numpy() * (v - anchor.numpy()) ** 2).sum()

    oracle = minimize(objective, anchor.numpy().ravel(), method="BFGS", options={"gtol": 1e-6})
    assert objective(found.numpy().ravel()) <= oracle.fun + 1e-6
    np.testing.assert_allclose(found.numpy().ravel(), oracle.x, atol=2e-3)


def test_two_classes_against_scikit_learn() -> None:
    """A pull k on both rows of coefficients is k / 2 on their difference: C = 2 / k."""
    given = problem(80, 4, 2, "softmax")
    found = given.solve(torch.zeros(2, 5, dtype=torch.float64), pulls(4, 0.8, 1e-9))
    oracle = LogisticRegression(C=2 / 0.8, tol=1e-10, max_iter=10_000).fit(given.x[:, 1:].numpy(), given.y.numpy())
    difference = (found[1] - found[0]).numpy()
    np.testing.assert_allclose(difference, [oracle.intercept_[0], *oracle.coef_[0]], atol=1e-4)


@pytest.mark.parametrize("pull", [0.01, 1.0, 10.0])
def test_the_hinge_against_liblinear(pull: float) -> None:
    given = problem(60, 4, 2, "hinge")
    found = given.solve(torch.zeros(1, 5, dtype=torch.float64), pulls(4, pull))
    fit = LinearSVC(C=1 / pull, loss="hinge", dual=True, max_iter=1_000_000, tol=1e-9)
    oracle = fit.fit(given.x[:, 1:].numpy(), given.y.numpy())
    expected = [oracle.intercept_[0], *oracle.coef_[0]]
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("loss", ["squares", "softmax", "hinge"])
def test_padding_changes_nothing_and_many_clients_are_solved_at_once(loss: str) -> None:
    parts = [problem(n, 3, 2, loss, seed=n) for n in (5, 9, 12)]
    anchor = torch.zeros(parts[0].outputs, 4, dtype=torch.float64)

    def padded(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows, rows.new_zeros(12 - len(rows), *rows.shape[1:])])

    stacked = [torch.stack([padded(getattr(p, name)) for p in parts]) for name in ("x", "y", "mask")]

    def one(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return LinearProblem(x, y, mask, loss, parts[0].outputs).solve(anchor, pulls(3, 0.3))

    together = torch.func.vmap(one)(*stacked)
    for place, part in enumerate(parts):
        alone = part.solve(anchor, pulls(3, 0.3))
        torch.testing.assert_close(together[place], alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("classes", [2, 3])
def test_a_warm_start_from_another_pull_ends_at_the_same_fit(classes: int) -> None:
    """Along a path of pulls from strong to weak, each fit starts from the one before and takes fewer steps."""
    given = problem(60, 4, classes, "softmax")
    anchor = start = torch.zeros(classes, 5, dtype=torch.float64)
    for pull in (1e3, 100.0, 10.0, 1.0, 0.1, 0.01):
        start = given.solve(anchor, pulls(4, pull), start)
        torch.testing.assert_close(start, given.solve(anchor, pulls(4, pull)), rtol=1e-4, atol=1e-4)


def test_the_gradient_and_hessian_are_those_of_the_value() -> None:
    given = problem(20, 3, 4, "softmax")
    v = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(given.gradient(v), torch.func.grad(given.value)(v))
    numeric = torch.func.hessian(lambda flat: given.value(flat.reshape(4, 4)))(v.flatten())
    torch.testing.assert_close(given.hessian(v), numeric)


def test_the_mode_under_a_full_prior() -> None:
    given = problem(25, 2, 3, "softmax")
    root = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    precision, centre = root @ root.mT + torch.eye(6), torch.ones(6, dtype=torch.float64)
    found = given.mode(centre, precision)
    _, slope, _ = given.at(found)
    torch.testing.assert_close(slope + precision @ (found - centre), torch.zeros(6).double(), atol=1e-8, rtol=0)


def test_smoothness_between_all_rows_and_a_single_one() -> None:
    """Batches of all rows have the largest eigenvalue of X'X / n, batches of one row the longest row's square."""
    given = problem(30, 3, 1, "squares")
    top = np.linalg.eigvalsh((given.x.T @ given.x / 30).numpy())[-1]
    longest = float((given.x**2).sum(1).max())
    assert float(given.smoothness(30)) == pytest.approx(top)
    assert float(given.smoothness(1)) == pytest.approx(longest)
    assert top < float(given.smoothness(4)) < longest


def test_which_models_have_a_linear_last_layer() -> None:
    assert isinstance(Regression(Linear(3)).linear(), LinearHead)
    head = Classification(MLP(3, 5)).linear()
    assert isinstance(head, LinearHead)
    params = head.task.init(0)
    changed = head.replaced(params, 2 * head.coefficients(params))
    assert [name for name in params if not torch.equal(params[name], changed[name])] == [head.weight, head.bias]
