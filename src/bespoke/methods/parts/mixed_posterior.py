"""The mixed model's client computations (see mixed.py) and its variance steps, as functions of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bespoke.tensors import Tree, cholesky

TINY = 1e-10  # least variance between clients
FLAT = 1e-9  # a direction of which so small a part of the information is known is not told at all
INNER = 4  # variational steps of a client, if robust


# -- a client's posterior ----------------------------------------------------------------------------------------------
def posterior_of_squares(data: Tree, down: Tree, freedom: float | None) -> Tree:
    """A client's posterior of b: mean `m`, covariance `v`, and what they were made of; `freedom`: of robust tails."""
    centre, spread, (noise, shape) = down["centre"], down["spread"], down["noise"]
    weight = torch.ones_like(centre)
    gram, moment, rows = data["gram"], data["moment"] - data["gram"] @ centre, data["rows"]
    total = data["square"] - (data["moment"] + moment) @ centre  # of the squared errors at the centre
    precision = 1 / noise
    for _ in range(INNER if freedom else 1):
        root = root_of(spread) / weight.sqrt()[:, None]  # L L' = D, of each coefficient less where its weight is more
        a, r = gram * precision, moment * precision
        inner = torch.eye(len(centre), dtype=a.dtype) + root.mT @ a @ root
        factor = cholesky(inner)
        v = root @ torch.cholesky_solve(root.mT, factor)
        m = v @ r
        squares = (total - 2 * moment @ m + m @ gram @ m).clamp(min=0.0)
        if freedom:
            top, low = shape + rows / 2, shape * noise + (squares + (gram * v).sum()) / 2
            precision = top / low
            variance = spread.diagonal().clamp(min=TINY)
            weight = (freedom + 1) / (freedom + (m * m + v.diagonal()) / variance)
    log_determinant = 2 * factor.diagonal().log().sum()
    found = {
        "a": a, "r": r, "v": v, "m": m, "gram": gram, "design": gram, "squares": squares, "rows": rows,
        "loglik": -0.5 * (log_determinant - rows * precision.log() + precision * total - r @ m),
        "weight": weight, "precision": precision,
    }  # fmt: skip
    return {**found, "log_precision": torch.special.digamma(top) - low.log()} if freedom else found


def posterior_of_classes(problem: Any, down: Tree, freedom: float | None) -> Tree:
    """The same by Laplace's approximation: the mode of the posterior, and the curvature there."""
    centre, spread = down["centre"], down["spread"]
    weight = torch.ones_like(centre)
    eye = torch.eye(len(centre), dtype=centre.dtype)
    for _ in range(3 if freedom else 1):
        root = root_of(spread + TINY * eye) / weight.sqrt()[:, None]
        precision = torch.cholesky_inverse(root)
        mode = problem.mode(centre, precision)
        value, slope, a = problem.at(mode)
        m = mode - centre
        v = torch.linalg.inv(a + precision)
        variance = spread.diagonal().clamp(min=TINY)
        if freedom:
            weight = (freedom + 1) / (freedom + (m * m + v.diagonal()) / variance)
    inner = cholesky(eye + root.mT @ a @ root)
    loglik = -value - 0.5 * m @ precision @ m - inner.diagonal().log().sum()
    one = torch.ones_like(loglik)
    return {
        "a": a, "r": a @ m - slope, "v": v, "m": m, "gram": 0 * a, "design": problem.gram, "squares": 0 * one,
        "rows": problem.rows,
        "loglik": loglik, "weight": weight, "precision": one, "log_precision": 0 * one,
    }  # fmt: skip


# -- what it says of the variances -------------------------------------------------------------------------------------
def moments(found: Tree, doubt: Tensor) -> Tree:
    """For EM: the second moment of b, and of the errors."""
    a, v, m = found["a"], found["v"], found["m"]
    shift = v @ a
    kept = torch.eye(len(m), dtype=m.dtype) - shift
    residual = found["squares"] + (found["gram"] * (v + kept @ doubt @ kept.mT)).sum()
    return {"moment": torch.outer(m, m) + v + shift @ doubt @ shift.mT, "residual": residual}


def derivatives(found: Tree, sums: Tree, doubt: Tensor, noise_varies: bool) -> Tree:
    """For Fisher scoring: twice the gradient and the expected curvature in the variances, the noise's last.

    Those of D_jj are w_j^2 - W_jj (+ (W C W)_jj, REML) and W_jl^2; those of s come of Sigma^-2, which is
    (I - X V X' / s)^2 / s^2.
    """
    a, v, rows = found["a"], found["v"], found["rows"]
    w, score = sums["information"], sums["score"]
    # of a robust client D_jj is divided by its weight, and s is not the noise of all
    part, precision = 1 / found["weight"], found["precision"]
    slope = part * (score**2 - w.diagonal() + (w @ doubt @ w).diagonal())
    curve = part[:, None] * w**2 * part[None, :]
    kept = torch.eye(len(a), dtype=a.dtype) - v @ a
    twice = kept.mT @ a @ kept * precision  # X' Sigma^-2 X
    spent = (a * v).sum()
    trace = (rows - spent) * precision
    noise = found["squares"] * precision**2 - trace + (twice * doubt).sum()
    bent = (rows - 2 * spent + ((a @ v) * (v @ a)).sum()) * precision**2
    if not noise_varies:  # it is not a parameter here
        noise, twice, bent = 0 * noise, 0 * twice, torch.ones_like(bent)
    cross = (part * twice.diagonal())[:, None]
    top = torch.cat([curve, cross], dim=1)
    bottom = torch.cat([cross.mT, bent.reshape(1, 1)], dim=1)
    return {"slope": torch.cat([slope, noise.reshape(1)]), "curve": torch.cat([top, bottom])}


def scored(values: Tensor, slope: Tensor, curve: Tensor) -> Tensor:
    """Variances after a step of Fisher scoring, by a factor of ten at most: they stay positive, and may come to zero.

    `slope` is twice the gradient of the log-likelihood, `curve` twice its expected curvature. The step is the best of
    the quadratic model within its bounds: a variance that one of them stops changes what is best for the others. By
    pivoting: which variances are held at a bound is exchanged until all fits (Murty: singly, from the last, it ends).
    """
    least, most = (values / 10).clamp(min=TINY), 10 * values.clamp(min=1e-6)
    low, high = (values <= 10 * TINY) & (slope <= 0), torch.zeros_like(values, dtype=torch.bool)
    curve = curve + torch.diag(1e-9 * curve.diagonal().clamp(min=1e-30))
    for attempt in range(20 + 10 * len(values)):
        held = low | high
        stopped = torch.where(low, least - values, torch.where(high, most - values, 0.0))
        system = torch.where(held[:, None] | held[None, :], torch.diag(held.to(values.dtype)), curve)
        step = torch.linalg.solve(system, torch.where(held, stopped, slope - curve @ stopped))
        below, above = ~held & (values + step < least), ~held & (values + step > most)
        pull = slope - curve @ step
        wrong = below | above | (low & (pull > 0)) | (high & (pull < 0))
        if not wrong.any():
            break
        if attempt >= 20:
            wrong[: int(wrong.nonzero().max())] = False
        low, high = torch.where(wrong, below, low), torch.where(wrong, above, high)
    return torch.minimum(torch.maximum(values + step, least), most)


# -- matrices ----------------------------------------------------------------------------------------------------------
def positive(matrix: Tensor) -> Tensor:
    """The nearest symmetric matrix without negative eigenvalues: noise on a sum may have made some."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    made: Tensor = (vectors * values.clamp(min=TINY)) @ vectors.mT
    return made


def log_determinant(information: Tensor) -> Tensor:
    """Of what the data can tell."""
    values = torch.linalg.eigvalsh(information)
    total: Tensor = values[values > FLAT * values[-1]].log().sum()
    return total


def inverse(information: Tensor) -> Tensor:
    """The inverse on what the data can tell: indicators of all levels of a category leave directions open."""
    values, vectors = torch.linalg.eigh(information)
    known = values > FLAT * values[-1]
    made: Tensor = (vectors * torch.where(known, 1 / values, 0.0)) @ vectors.mT
    return made


def root_of(spread: Tensor) -> Tensor:
    """A root L of a covariance, L L' = spread."""
    return cholesky(spread + TINY * torch.eye(spread.shape[-1], dtype=spread.dtype))
