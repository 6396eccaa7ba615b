"""Linear fits to convergence, for many clients at once: ridge in closed form, softmax regression by Newton's method.

Both minimize, at each client c, a sum over its rows and a pull towards a centre w0 (one penalty for each coefficient):

    ridge      sum (y - x'w)^2 + sum_j p_j (w_j - w0_j)^2
    softmax    -sum log softmax(x'w)_y + 1/2 sum_kj p_j (w_kj - w0_kj)^2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STEPS = 60  # maximum number of steps of Newton's method; ten are usually enough
HALVINGS = 20
TOLERANCE = 1e-8  # of the gradient's largest entry, for each row


@dataclass(frozen=True)
class Sums:
    """X'X and X'y of every client."""

    xx: Floats  # (clients, d, d)
    xy: Floats  # (clients, d)

    @classmethod
    def of(cls, x: Floats, y: Floats, client: Ints, clients: int) -> Sums:
        width = x.shape[1]
        xx, xy = np.zeros((clients, width, width)), np.zeros((clients, width))
        order = np.argsort(client, kind="stable")
        ends = np.cumsum(np.bincount(client, minlength=clients))
        for c, (begin, end) in enumerate(zip([0, *ends], ends)):
            rows = x[order[begin:end]]
            xx[c], xy[c] = rows.T @ rows, rows.T @ y[order[begin:end]]
        return cls(xx, xy)

    def pooled(self) -> Sums:
        return Sums(self.xx.sum(0, keepdims=True), self.xy.sum(0, keepdims=True))

    def ridge(self, penalty: Floats, centre: Floats) -> Floats:
        """The coefficients of every client: (clients, d)."""
        right = self.xy - self.xx @ centre
        return centre + np.linalg.solve(self.xx + np.diag(penalty), right[..., None])[..., 0]


@dataclass(frozen=True)
class Padded:
    """Rows of every client, padded to the same number, and their classes as indicators."""

    x: Floats  # (clients, rows, d), zero where there is no row
    y: Floats  # (clients, rows, classes), likewise

    @classmethod
    def of(cls, x: Floats, y: Ints, classes: int, client: Ints, clients: int) -> Padded:
        sizes = np.bincount(client, minlength=clients)
        order = np.argsort(client, kind="stable")
        place = np.arange(len(client)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows, labels = np.zeros((clients, sizes.max(), x.shape[1])), np.zeros((clients, sizes.max(), classes))
        rows[client[order], place] = x[order]
        labels[client[order], place, y[order]] = 1.0
        return cls(rows, labels)

    def softmax(self, penalty: Floats, centre: Floats, start: Floats | None = None) -> Floats:
        """The coefficients of every client, (clients, classes, d): Newton's method, steps halved until they descend."""
        clients, classes, width = len(self.x), self.y.shape[2], self.x.shape[2]
        w = np.broadcast_to(centre, (clients, classes, width)).copy() if start is None else start.copy()
        pull = np.diag(np.tile(penalty, classes))
        rows = self.y.sum((1, 2))
        open_ = np.flatnonzero(rows)  # clients that have not converged; one without rows stays at the centre
        w[rows == 0] = centre
        for _ in range(STEPS):
            x, y, there = self.x[open_], self.y[open_], self.y[open_].sum(2, keepdims=True)
            p = probabilities(x @ w[open_].swapaxes(1, 2)) * there
            slope = (p - y).swapaxes(1, 2) @ x + penalty * (w[open_] - centre)
            moving = np.abs(slope).max((1, 2)) > TOLERANCE * rows[open_]
            if not moving.any():
                break
            open_, x, y, p, slope = open_[moving], x[moving], y[moving], p[moving], slope[moving]
            curvature = np.empty((len(open_), classes, width, classes, width))
            for a in range(classes):
                for b in range(a, classes):
                    weight = p[:, :, a] * (float(a == b) - p[:, :, b])
                    curvature[:, a, :, b] = curvature[:, b, :, a] = (x * weight[:, :, None]).swapaxes(1, 2) @ x
            size = classes * width
            matrix = curvature.reshape(-1, size, size) + pull
            step = np.linalg.solve(matrix, slope.reshape(-1, size, 1)).reshape(slope.shape)
            w[open_] -= step * self._lengths(x, y, w[open_], step, slope, penalty, centre)
        return w

    def _lengths(
        self, x: Floats, y: Floats, w: Floats, step: Floats, slope: Floats, penalty: Floats, centre: Floats
    ) -> Floats:
        """For every client the largest of 1, 1/2, 1/4, ... at which the objective falls as it should (Armijo)."""
        length = np.ones((len(w), 1, 1))
        before, wanted = _objective(x, y, w, penalty, centre), 1e-4 * (slope * step).sum((1, 2))
        for _ in range(HALVINGS):
            after = _objective(x, y, w - length * step, penalty, centre)
            short = after > before - wanted * length[:, 0, 0] + 1e-12 * np.abs(before)
            if not short.any():
                break
            length[short] /= 2
        return length


def _objective(x: Floats, y: Floats, w: Floats, penalty: Floats, centre: Floats) -> Floats:
    chances = probabilities(x @ w.swapaxes(1, 2))
    return -(y * np.log(np.maximum(chances, 1e-300))).sum((1, 2)) + (penalty * (w - centre) ** 2).sum((1, 2)) / 2


def probabilities(z: Any) -> Floats:
    """The softmax over the last axis."""
    z = np.exp(z - z.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)
