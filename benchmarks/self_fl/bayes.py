"""Hierarchies of Gaussians in closed form: the best possible estimates of clients, as an oracle for learned values.

Two levels (Chen et al., Self-Aware Personalized Federated Learning, NeurIPS 2022; numbers of its equations below):
theta_m ~ N(theta_0, between), z_m ~ N(theta_m, variances_m), a flat prior on theta_0. Three levels (Group Personalized
Federated Learning, Section 4): groups around theta_0, clients around their group, an observation of each client. All
variances are known. Everything is in double precision, with one entry per client.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Posterior:
    """Means and variances, of each client or of the one global parameter."""

    mean: Floats
    variance: Floats


# -- two levels --------------------------------------------------------------------------------------------------------
def weights(variances: ArrayLike, between: float) -> Floats:
    """w_m = 1 / (sigma_0^2 + sigma_m^2): how much a client says of theta_0."""
    return 1 / (between + np.asarray(variances, float))


def global_optimal(z: ArrayLike, variances: ArrayLike, between: float) -> Posterior:
    """Eq. 2: theta_0, given all."""
    w = weights(variances, between)
    return Posterior((w * np.asarray(z, float)).sum() / w.sum(), 1 / w.sum())


def others(z: ArrayLike, variances: ArrayLike, between: float) -> Posterior:
    """Eq. 7: theta_0, given all but oneself, which is where Self-FL's clients ought to start. Eq. 9 is the same."""
    w = weights(variances, between)
    rest, total = w * np.asarray(z, float), w.sum() - w
    return Posterior((rest.sum() - rest) / total, 1 / total)


def fl_optimal(z: ArrayLike, variances: ArrayLike, between: float) -> Posterior:
    """Eq. 3: a parameter, given all, as the paper looks at client m: theta_m is theta_0, the others are draws."""
    prior = others(z, variances, between)
    return _combined(np.asarray(z, float), np.asarray(variances, float), prior.mean, 1 / prior.variance)


def posterior(z: ArrayLike, variances: ArrayLike, between: float) -> Posterior:
    """A client's parameter, given all, if it too is a draw around theta_0: nobody could know it better."""
    prior = others(z, variances, between)
    return _combined(np.asarray(z, float), np.asarray(variances, float), prior.mean, 1 / (between + prior.variance))


def gain(variances: ArrayLike, between: float) -> Floats:
    """Eq. 4: a client's variance without sharing by that with it, at least 1."""
    variances = np.asarray(variances, float)
    return variances / fl_optimal(np.zeros_like(variances), variances, between).variance


def left(variances: ArrayLike, between: float) -> Floats:
    """Eq. 8's right side: what is left, after a client's training, of the way from where it started to z_m."""
    variances = np.asarray(variances, float)
    w = weights(variances, between)
    share: Floats = (w.sum() - w) / (1 / variances + w.sum() - w)
    return share


def contraction(variances: ArrayLike, between: float) -> float:
    """Eq. 12: q, by which a round of Self-FL shrinks the largest error of a client at least."""
    return float(left(variances, between).max())


def self_fl_limit(z: ArrayLike, variances: ArrayLike, between: float) -> Floats:
    """Where the rounds (10), (8), (11) end: theta = (1 - r) z + r A theta, with A theta the mean of the others.

    Not Eq. 3's value, which has A z in A theta's place: for M clients they are about 1 / sqrt(M) apart, the second term
    of Proposition 3.1.
    """
    z, r, w = np.asarray(z, float), left(variances, between), weights(variances, between)
    mean_of_others = (w - np.diag(w)) / (w.sum() - w)[:, None]
    return np.linalg.solve(np.eye(len(z)) - r[:, None] * mean_of_others, (1 - r) * z)


# -- three levels ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Groups:
    """What a client knows alone, with its group, and with everybody."""

    local: Posterior
    group: Posterior
    all: Posterior

    @property
    def group_to_local(self) -> Floats:
        """The first ratio: what of a client's variance is left when its group shares."""
        return self.group.variance / self.local.variance

    @property
    def all_to_group(self) -> Floats:
        """The second: what of that is left when all groups share."""
        return self.all.variance / self.group.variance


def three_levels(
    x: ArrayLike, variances: ArrayLike, groups: ArrayLike, between_groups: float, within_groups: float = 0.0,
    as_printed: bool = False,
) -> Groups:  # fmt: skip
    """theta_g ~ N(theta_0, between_groups), theta_mn ~ N(theta_g, within_groups), x_mn ~ N(theta_mn, variances_mn).

    The paper assumes within_groups = 0: clients of a group differ in how well they see one parameter. Its formula for
    what other groups say of theta_0 counts each of their clients as if it had a parameter of its own; but clients of a
    group share its deviation from theta_0. `as_printed` gives the paper's, which is right if those groups have one
    client each, and too sure of itself otherwise.
    """
    x, variances, groups = np.asarray(x, float), np.asarray(variances, float), np.asarray(groups)
    says = 1 / (within_groups + variances)  # how well a client tells its group's parameter
    names, place = np.unique(groups, return_inverse=True)
    total, sums = _sums(place, says), _sums(place, says * x)
    # how well a group tells theta_0, and what it says
    tells, means = 1 / (between_groups + 1 / total), sums / total
    if as_printed:
        each = 1 / (between_groups + variances)
        tells = _sums(place, each)
        means = _sums(place, each * x) / tells
    rest, other = tells.sum() - tells, (tells * means).sum() - tells * means
    alone = len(names) == 1
    top = np.zeros_like(rest) if alone else 1 / (between_groups + 1 / rest)  # how well other groups tell this one's
    centre = np.zeros_like(rest) if alone else other / rest
    own, mine = total[place] - says, sums[place] - says * x  # the same of the other clients of the group

    def given(precision: Floats, weighted: Floats) -> Posterior:
        """The client's own look joined with what others say of its group."""
        known = precision > 0
        safe = np.where(known, precision, 1.0)
        prior = np.where(known, 1 / (within_groups + 1 / safe), 0.0)
        return _combined(x, variances, weighted / safe, prior)

    return Groups(
        Posterior(x, variances), given(own, mine), given(own + top[place], mine + (top * centre)[place])
    )  # fmt: skip


def _sums(place: NDArray[np.int64], values: Floats) -> Floats:
    """Sums by group."""
    return np.bincount(place, values).astype(np.float64)


def _combined(z: Floats, variances: Floats, prior: Floats, precision: Floats) -> Posterior:
    """A look z at a parameter joined with a prior of this mean and precision."""
    variance = 1 / (1 / variances + precision)
    return Posterior(variance * (z / variances + precision * prior), variance)
