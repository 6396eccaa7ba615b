"""Closed forms against conditioning of the joint Gaussian, and against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from self_fl import bayes

FLAT = 1e9  # the variance of a prior that says nothing, as far as six digits go


def conditioned(z: np.ndarray, target: np.ndarray, cross: np.ndarray, joint: np.ndarray) -> tuple[float, float]:
    """Mean and variance of a Gaussian with prior variance `target`, given z with covariance `joint`."""
    solved = np.linalg.solve(joint, cross)
    return float(solved @ z), float(target - solved @ cross)


def test_two_clients_by_hand() -> None:
    """between 1, variances 1 and 3: w = 1/2, 1/4. z = 0, 6.

    Global: (6/4) / (3/4) = 2, variance 4/3. Client 0: precision 1 + 1/4, mean (6/4) / (5/4) = 1.2, gain 1.25.
    Client 1: precision 1/3 + 1/2 = 5/6, mean (6/3) / (5/6) = 2.4, gain 2.5. What is left: (1/4) / (5/4) and
    (1/2) / (5/6). As a draw itself client 0 has a prior of variance 1 + 4 around 6: precision 6/5, mean 1.
    """
    z, variances = [0.0, 6.0], [1.0, 3.0]
    assert bayes.global_optimal(z, variances, 1.0).mean == pytest.approx(2.0)
    assert bayes.global_optimal(z, variances, 1.0).variance == pytest.approx(4 / 3)
    best = bayes.fl_optimal(z, variances, 1.0)
    assert best.mean == pytest.approx([1.2, 2.4])
    assert best.variance == pytest.approx([0.8, 1.2])
    assert bayes.gain(variances, 1.0) == pytest.approx([1.25, 2.5])
    assert bayes.left(variances, 1.0) == pytest.approx([0.2, 0.6])
    assert bayes.contraction(variances, 1.0) == pytest.approx(0.6)
    assert bayes.posterior(z, variances, 1.0).mean[0] == pytest.approx(1.0)
    assert bayes.posterior(z, variances, 1.0).variance[0] == pytest.approx(5 / 6)


def test_starting_from_the_others_and_stopping_early_reaches_the_fl_optimal_value() -> None:
    """Eq. 6 to 9: (1 - r) z + r others is Eq. 3, and others is theta_G - w / (W - w) (z - theta_G)."""
    random = np.random.default_rng(1)
    z, variances, between = random.normal(size=9), random.uniform(0.1, 3, 9), 0.7
    r, w = bayes.left(variances, between), bayes.weights(variances, between)
    start = bayes.others(z, variances, between).mean
    assert (1 - r) * z + r * start == pytest.approx(bayes.fl_optimal(z, variances, between).mean, rel=1e-12)
    centre = bayes.global_optimal(z, variances, between).mean
    assert centre - w / (w.sum() - w) * (z - centre) == pytest.approx(start, rel=1e-12)


def test_extremes() -> None:
    """Remark 2.1: clients that have nothing in common learn alone; alike, all learn the same; one good client helps."""
    z, variances = np.array([0.0, 6.0, 1.0]), np.array([1.0, 3.0, 2.0])
    apart = bayes.fl_optimal(z, variances, 1e9)
    assert apart.mean == pytest.approx(z, abs=1e-6)
    assert bayes.gain(variances, 1e9) == pytest.approx(np.ones(3))
    assert bayes.global_optimal(z, variances, 1e9).mean == pytest.approx(z.mean())
    alike = bayes.fl_optimal(z, variances, 1e-12)
    assert alike.mean == pytest.approx(np.full(3, bayes.global_optimal(z, variances, 0.0).mean))
    good = bayes.gain([1e-6, 1.0], 1e-3)
    assert good[0] == pytest.approx(1.0, abs=1e-5)
    assert good[1] > 900


def test_posteriors_are_those_of_the_joint_gaussian() -> None:
    """Two levels, with a prior on theta_0 so wide that it says nothing."""
    random = np.random.default_rng(2)
    z, variances, between = random.normal(size=5), random.uniform(0.5, 2, 5), 0.6
    joint = FLAT + np.diag(between + variances)
    found = bayes.posterior(z, variances, between)
    for m in range(5):
        cross = np.full(5, FLAT) + between * (np.arange(5) == m)
        mean, variance = conditioned(z, np.array(FLAT + between), cross, joint)
        assert found.mean[m] == pytest.approx(mean, abs=1e-5)
        assert found.variance[m] == pytest.approx(variance, abs=1e-5)
    mean, variance = conditioned(z, np.array(FLAT), np.full(5, FLAT), joint)
    assert bayes.global_optimal(z, variances, between).mean == pytest.approx(mean, abs=1e-5)
    # Eq. 3: client 0's parameter is theta_0 itself
    joint[0, 0] -= between
    mean, variance = conditioned(z, np.array(FLAT), np.full(5, FLAT), joint)
    assert bayes.fl_optimal(z, variances, between).mean[0] == pytest.approx(mean, abs=1e-5)
    assert bayes.fl_optimal(z, variances, between).variance[0] == pytest.approx(variance, abs=1e-5)


@pytest.mark.parametrize("within", [0.0, 0.4])
def test_three_levels_are_those_of_the_joint_gaussian(within: float) -> None:
    random = np.random.default_rng(3)
    groups = np.array([0, 0, 0, 1, 1, 2])
    x, variances, between = random.normal(size=6), random.uniform(0.5, 2, 6), 0.8
    same = (groups[:, None] == groups).astype(float)
    found = bayes.three_levels(x, variances, groups, between, within)
    latent = FLAT + between * same + within * np.eye(6)
    joint = latent + np.diag(variances)
    for n in range(6):
        mean, variance = conditioned(x, latent[n, n], latent[n], joint)
        assert found.all.mean[n] == pytest.approx(mean, abs=1e-5)
        assert found.all.variance[n] == pytest.approx(variance, abs=1e-5)
        here = groups == groups[n]
        mean, variance = conditioned(x[here], latent[n, n], latent[n, here], joint[np.ix_(here, here)])
        assert found.group.mean[n] == pytest.approx(mean, abs=1e-5)
        assert found.group.variance[n] == pytest.approx(variance, abs=1e-5)
    assert (found.group_to_local <= 1).all()
    assert (found.all_to_group < 1).all()


def test_three_levels_as_printed() -> None:
    """The formulas of Section 4 for client (1, 1): group 0 has variances 1, 2, group 1 has 1 and 3, sigma_0^2 = 1.

    First ratio 1 / (1 + 1/2) = 2/3. What group 1 says: 1/2 + 1/4 = 3/4, so (1 + 4/3)^-1 = 3/7; second ratio
    1 / (1 + (3/7) / (3/2)) = 7/9. In truth group 1 says (1 + 3/4)^-1 = 4/7 of theta_0, and (1 + 7/4)^-1 = 4/11 of group
    0: 1 / (1 + (4/11) / (3/2)) = 33/41. The mean of x = 0, 0 and 1, 5, as printed: others (1/2 + 5/4) / (3/4) = 7/3,
    (3/7) (7/3) / (3/2 + 3/7) = 14/27; in truth they say (1 + 5/3) / (4/3) = 2, and (4/11) 2 / (3/2 + 4/11) = 16/41.
    """
    arguments = ([0.0, 0.0, 1.0, 5.0], [1.0, 2.0, 1.0, 3.0], [0, 0, 1, 1], 1.0)
    printed, exact = bayes.three_levels(*arguments, as_printed=True), bayes.three_levels(*arguments)
    for found in (printed, exact):
        assert found.group_to_local[0] == pytest.approx(2 / 3)
    assert printed.all_to_group[0] == pytest.approx(7 / 9)
    assert printed.all.mean[0] == pytest.approx(14 / 27)
    assert exact.all_to_group[0] == pytest.approx(33 / 41)
    assert exact.all.mean[0] == pytest.approx(16 / 41)


def test_groups_of_one_are_the_two_level_model() -> None:
    """Then what is printed is exact, and is the two-level posterior of a client that is a draw itself."""
    random = np.random.default_rng(4)
    x, variances = random.normal(size=6), random.uniform(0.5, 2, 6)
    two = bayes.posterior(x, variances, 0.8)
    for as_printed in (False, True):
        three = bayes.three_levels(x, variances, np.arange(6), 0.8, as_printed=as_printed)
        assert three.all.mean == pytest.approx(two.mean, rel=1e-12)
        assert three.all.variance == pytest.approx(two.variance, rel=1e-12)
        assert three.group_to_local == pytest.approx(np.ones(6))
    single = bayes.three_levels(x, variances, np.zeros(6), 0.8)  # no other group to learn from
    assert single.all_to_group == pytest.approx(np.ones(6))


def test_the_limit_of_self_fl_is_about_one_over_the_root_of_clients_from_the_fl_optimal_value() -> None:
    """Proposition 3.1's second term: 16 times the clients, about a quarter of the distance."""
    distance = {}
    for clients in (64, 1024):
        gaps = []
        for seed in range(20):
            random = np.random.default_rng(seed)
            variances = random.uniform(0.2, 1.0, clients)
            z = random.normal(size=clients) * np.sqrt(1.0 + variances)
            gap = bayes.self_fl_limit(z, variances, 1.0) - bayes.fl_optimal(z, variances, 1.0).mean
            gaps.append(np.abs(gap).max())
        distance[clients] = float(np.mean(gaps))
    assert distance[64] / distance[1024] == pytest.approx(4.0, rel=0.35)
