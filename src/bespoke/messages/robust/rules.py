"""Robust aggregation rules: one change from many clients' changes, some of which may be malicious.

Rows of `changes` are clients, each as one long vector. Every rule returns one change for all of them.

- median and trimmed mean, of every entry by itself: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.
- Krum and multi-Krum: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017. A client's score is the sum of
  squared distances to its n - f - 2 nearest neighbours. Krum takes the client with the lowest score, multi-Krum the
  mean of the n - f lowest.
"""

from __future__ import annotations

import torch
from torch import Tensor


def median(changes: Tensor) -> Tensor:
    """The middle of every entry; of an even number the mean of the two in the middle."""
    ordered = changes.sort(0).values
    many = len(ordered)
    return (ordered[(many - 1) // 2] + ordered[many // 2]) / 2


def trimmed_mean(changes: Tensor, trim: float) -> Tensor:
    """The mean of every entry without the `trim` (a fraction) lowest and as many of the highest."""
    cut = int(trim * len(changes) + 1e-9)
    return changes.sort(0).values[cut : len(changes) - cut].mean(0)


def krum_scores(changes: Tensor, f: int) -> Tensor:
    """Each client's sum of squared distances to its n - f - 2 nearest (one at least)."""
    # not by products of rows, which lose the others' differences to rounding beside a change of 1e6
    squares = torch.cdist(changes, changes, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    squares.fill_diagonal_(torch.inf)
    nearest = min(max(len(changes) - f - 2, 1), len(changes) - 1)
    return squares.sort(1).values[:, :nearest].sum(1)


def krum(changes: Tensor, f: int, many: int) -> Tensor:
    """The places of the `many` clients with the lowest scores, in ascending order."""
    return krum_scores(changes, f).argsort(stable=True)[:many].sort().values


def allowed(f: int | float, clients: int) -> int:
    """The assumed number of malicious clients: `f`, or this fraction of them. Krum needs clients > 2 f + 2."""
    asked = int(f) if f >= 1 or f == 0 else int(f * clients + 1e-9)
    return max(min(asked, (clients - 3) // 2), 0)
