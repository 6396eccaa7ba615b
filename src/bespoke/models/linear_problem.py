"""Fits a linear model, or a network's linear last layer, to one client's rows until convergence, without SGD.

    minimise  sum_i loss_i(x_i' v) + 1/2 sum_j pull_j (v_j - anchor_j)^2

v has a row for each output and a column for each input, the intercept first. The loss is a sum over rows, so a pull
counts like so many rows: the same pull binds a client with few rows more than one with many. Squares are solved in
closed form. The cross-entropy is solved by Newton's method or, with many coefficients, by accelerated steps in the
metric of Boehning's bound (1992) on its Hessian, 1/2 (I - 11'/C) kron X'X, which never overshoot and need no learning
rate. The hinge is solved by an interior-point method. Everything is in double precision and without branches on values,
so it runs for many clients at once under torch.func.vmap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke.models.networks import Network
from bespoke.tensors import Params, cholesky

Loss = Literal["squares", "softmax", "hinge"]
JITTER = 1e-12  # relative to the mean diagonal; added to matrices that no pull makes definite
SMALL = 100  # up to so many coefficients, the cross-entropy's own Hessian is used
WIDE = 128  # beyond so many inputs, problems with fewer rows are solved in the span of the rows
NEWTON_STEPS, WARM_STEPS, MODE_STEPS, HALVINGS = 15, 7, 10, 6  # warm: from a fit under another pull
SOFTMAX_STEPS = 300
INTERIOR_STEPS, CENTRED = 40, 1e-10


@dataclass(frozen=True)
class LinearHead:
    """The last layer of a task's model, if it is one affine map under a loss that can be solved."""

    task: Any
    weight: str  # the names of its parameters
    bias: str
    outputs: int
    factor: float = 1.0  # squares: of half the squared error

    @classmethod
    def of(cls, task: Any, factor: float = 1.0) -> LinearHead | None:
        found = _affine(task.network)
        return None if found is None else cls(task, *found, factor)

    def problem(self, params: Params, batch: Params) -> LinearProblem:
        """The fit of the last layer to these rows, with the layers below fixed."""
        mask = batch["mask"].double()
        inputs = torch.cat([torch.ones_like(mask)[:, None], self.task.features(params, batch).double()], dim=1)
        return LinearProblem(
            inputs * mask[:, None], batch["y"], mask, self.task.kernel_of(), self.outputs, self.factor, self.task.l2
        )  # fmt: skip

    def coefficients(self, params: Params) -> Tensor:
        """The layer as (outputs, 1 + inputs), the intercepts first, in double precision."""
        return torch.cat([params[self.bias][..., None], params[self.weight]], dim=-1).double()

    def replaced(self, params: Params, v: Tensor) -> Params:
        """The parameters with this last layer."""
        kind = params[self.weight].dtype
        return {**params, self.weight: v[..., 1:].to(kind), self.bias: v[..., 0].to(kind)}


@cache
def _affine(network: Network) -> tuple[str, str, int] | None:
    """The names of the last layer's weight and bias, and its outputs; None if it is not one affine map."""
    last = network.last_layer
    layer = {name: p for name, p in network.init(0).items() if last and name.startswith(last)}
    names = {p.dim(): name for name, p in layer.items()}
    return (names[2], names[1], len(layer[names[1]])) if len(layer) == 2 and sorted(names) == [1, 2] else None


@dataclass(frozen=True)
class LinearProblem:
    """One client's rows as inputs of the last layer."""

    x: Tensor  # (rows, 1 + inputs): a one, then the last layer's inputs; zero where a row is padding
    y: Tensor  # (rows,)
    mask: Tensor  # (rows,)
    loss: Loss
    outputs: int
    factor: float = 1.0  # squares: of half the squared error
    decay: float = 0.0  # the model's own l2, for each row

    # -- sums over rows ------------------------------------------------------------------------------------------------
    @cached_property
    def rows(self) -> Tensor:
        return self.mask.sum()

    @cached_property
    def gram(self) -> Tensor:
        """X'X, the intercept's column first."""
        return self.x.mT @ self.x

    @cached_property
    def moment(self) -> Tensor:
        """X'y of squares, (outputs, 1 + inputs)."""
        return (self.y.double() @ self.x)[None]

    @cached_property
    def _targets(self) -> Tensor:
        hot = F.one_hot(self.y.long(), self.outputs).double()
        return hot * self.mask[:, None]

    def value(self, v: Tensor) -> Tensor:
        """The sum of the rows' losses, without pulls and decay."""
        outputs = self.x @ v.mT
        if self.loss == "squares":
            return 0.5 * self.factor * (((outputs[:, 0] - self.y) * self.mask) ** 2).sum()
        if self.loss == "hinge":
            return ((1 - _sign(self.y) * outputs[:, 0]).clamp(min=0) * self.mask).sum()
        return -(F.log_softmax(outputs, -1) * self._targets).sum()

    def gradient(self, v: Tensor) -> Tensor:
        """The gradient of `value`; of the hinge a subgradient."""
        outputs = self.x @ v.mT
        if self.loss == "squares":
            slope = self.factor * (outputs - self.y[:, None])
        elif self.loss == "hinge":
            sign = _sign(self.y)
            slope = (-sign * (sign * outputs[:, 0] < 1))[:, None]
        else:
            slope = F.softmax(outputs, -1) - F.one_hot(self.y.long(), self.outputs)
        return (slope * self.mask[:, None]).mT @ self.x

    def hessian(self, v: Tensor) -> Tensor:
        """The Hessian of `value` in v, row by row: (outputs x (1 + inputs)) squared."""
        if self.loss != "softmax":
            return self.factor * self.gram  # of the hinge: what stands in for it
        return self._curved(F.softmax(self.x @ v.mT, -1))

    def _curved(self, p: Tensor) -> Tensor:
        """The cross-entropy's Hessian at these probabilities: X'(diag(p) - pp')X, a block for each pair of outputs."""
        weights = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) * self.mask[:, None, None]
        outputs = p.shape[-1]  # all, or the free ones
        size = outputs * self.x.shape[-1]
        left = (weights[..., None] * self.x[:, None, None, :]).flatten(1)  # (rows, outputs x outputs x inputs)
        blocks = (left.mT @ self.x).unflatten(0, (outputs, outputs, -1))
        hessian: Tensor = blocks.permute(0, 2, 1, 3).reshape(size, size)
        return hessian

    # -- the coefficients that the loss can tell -----------------------------------------------------------------------
    @property
    def free(self) -> int:
        """The number of identifiable rows of coefficients: for classes, all but the first, which stays zero."""
        return self.outputs - 1 if self.loss == "softmax" else 1

    def expanded(self, u: Tensor) -> Tensor:
        """All coefficients (outputs, 1 + inputs) from the free ones, in one row."""
        v = u.reshape(self.free, -1)
        return torch.cat([torch.zeros_like(v[:1]), v]) if self.loss == "softmax" else v

    def at(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The value, gradient and Hessian in the free coefficients."""
        v, held = self.expanded(u), (self.outputs - self.free) * self.x.shape[-1]
        if self.loss != "softmax":
            return self.value(v), self.gradient(v).flatten(), self.hessian(v)
        p = F.softmax(self.x @ v.mT, -1)
        return self.value(v), self.gradient(v).flatten()[held:], self._curved(p[:, 1:])

    def mode(self, centre: Tensor, precision: Tensor) -> Tensor:
        """The free coefficients u of least value + 1/2 (u - centre)' precision (u - centre), by Newton's method.

        For the cross-entropy. Outputs are linear in the length of a step, so all lengths are tried at once.
        """
        lengths, u, hot = _lengths(centre), centre, self._targets
        for _ in range(MODE_STEPS):
            outputs, apart = self.x @ self.expanded(u).mT, u - centre
            p = F.softmax(outputs, -1)
            slope = ((p * self.mask[:, None] - hot).mT @ self.x)[1:].flatten() + precision @ apart
            step = solve_definite(self._curved(p[:, 1:]) + precision, slope[:, None])[:, 0]
            tried = outputs - lengths[:, None, None] * (self.x @ self.expanded(step).mT)
            bent, held = step @ precision @ step, step @ precision @ apart
            lost = 0.5 * lengths**2 * bent - lengths * held - (F.log_softmax(tried, -1) * hot).sum((-1, -2))
            u = u - lengths[lost.argmin().reshape(1)] * step
        return u

    def smoothness(self, batch: int) -> Tensor:
        """The largest curvature that a mean over `batch` random rows is expected to have (Gower et al., 2019).

        It joins the largest eigenvalue over all rows, for large batches, with the largest of a single row.
        """
        n = self.rows.clamp(min=1.0)
        size = torch.minimum(n, torch.tensor(float(batch), dtype=n.dtype))
        top = torch.linalg.eigvalsh(self.gram / n)[..., -1]
        longest = (self.x * self.x).sum(-1).amax(-1)
        rest = (n - 1).clamp(min=1.0) * size
        joined = n * (size - 1) / rest * top + (n - size) / rest * longest
        return torch.where(n > 1, joined, longest) * self._steepest

    @property
    def _steepest(self) -> float:
        """The largest second derivative of a row's loss in its outputs; for the hinge, which has none, squares'."""
        return {"squares": self.factor, "softmax": 0.5, "hinge": 1.0}[self.loss]

    # -- the fit -------------------------------------------------------------------------------------------------------
    def solve(self, anchor: Tensor, pull: Tensor, start: Tensor | None = None) -> Tensor:
        """The minimum; `anchor` is (outputs, 1 + inputs), `pull` (1 + inputs,) or a scalar."""
        if self.x.shape[-1] > max(WIDE, 2 * self.x.shape[-2]):
            return self._in_span(anchor, pull, start)
        decay = self.decay * self.rows
        pulls = (pull + decay).expand(self.x.shape[-1])
        centre = torch.where(pulls > 0, pull * anchor / pulls.clamp(min=1e-300), anchor)
        if self.loss == "squares":
            return solve_definite(self.factor * self.gram + torch.diag_embed(pulls),
                                  (self.factor * self.moment + pulls * centre).mT).mT  # fmt: skip
        begin = centre if start is None else start
        if self.loss == "hinge":
            return self._hinge(centre, pulls, begin)
        steps = NEWTON_STEPS if start is None else WARM_STEPS
        if self.outputs == 2:
            return self._logistic(centre, pulls, begin, steps)
        if begin.numel() <= SMALL:
            return self._newton(centre, pulls, begin, steps)
        return self._softmax(centre, pulls, begin)

    def _in_span(self, anchor: Tensor, pull: Tensor, start: Tensor | None) -> Tensor:
        """The same minimum with more inputs than rows, as with words: it differs from the anchor along the rows only.

        In units in which every pull is one, it solves for the coefficients' part in the span of the rows.
        """
        pulls = (pull + self.decay * self.rows).expand(self.x.shape[-1]).clamp(min=JITTER)
        centre, unit = pull * anchor / pulls, pulls**-0.5
        basis, inside = torch.linalg.qr((self.x * unit).mT)
        held = (centre / unit) @ basis
        begin = None if start is None else (start / unit) @ basis
        narrow = replace(self, x=inside.mT, decay=0.0)
        moved = narrow.solve(held, torch.ones((), dtype=held.dtype), begin) - held
        solution: Tensor = centre + moved @ basis.mT * unit
        return solution

    def _logistic(self, anchor: Tensor, pulls: Tensor, start: Tensor, steps: int) -> Tensor:
        """Two classes: only u = v_1 - v_0 is felt by the loss, and the sum of the two rows stays where it is pulled to.

        The pulls on both rows, 1/2 pull (v - anchor)^2 each, are 1/4 pull (u - its anchor)^2 in u. Newton's steps, each
        of the length, among halvings, that lowers the objective most.
        """
        half, centre, u = pulls / 2, anchor[1] - anchor[0], start[1] - start[0]
        lengths = _lengths(u)
        for _ in range(steps):
            outputs = self.x @ u
            p = outputs.sigmoid()
            slope = ((p - self.y) * self.mask) @ self.x + half * (u - centre)
            curved = self.x.mT @ (self.x * (p * (1 - p))[:, None]) + torch.diag_embed(half)
            step = solve_definite(curved, slope[:, None])[:, 0]
            tried = outputs - lengths[:, None] * (self.x @ step)  # outputs are linear in the length
            lost = ((F.softplus(tried) - self.y * tried) * self.mask).sum(-1)
            best = (lost + (half * (u - lengths[:, None] * step - centre) ** 2).sum(-1) / 2).argmin()
            u = u - lengths[best.reshape(1)] * step
        middle = (anchor[0] + anchor[1]) / 2
        return torch.stack([middle - u / 2, middle + u / 2])

    def _softmax(self, anchor: Tensor, pulls: Tensor, start: Tensor) -> Tensor:
        """Nesterov's steps with restarts (O'Donoghue and Candes, 2015) in the metric of the bound."""
        metric = _definite(0.5 * self.gram + torch.diag_embed(pulls))
        factor = cholesky(metric)
        floor = pulls.clamp(min=JITTER)
        v = ahead = start
        time = torch.ones((), dtype=v.dtype)
        for _ in range(SOFTMAX_STEPS):
            slope = self.gradient(ahead) + pulls * (ahead - anchor)
            common = slope.mean(0)  # equal changes of all outputs change no probability
            step = torch.cholesky_solve((slope - common).mT, factor).mT + common / floor
            new = ahead - step
            uphill = ((slope * (new - v)).sum() > 0).to(v.dtype)  # the momentum overshoots: restart
            time = time * (1 - uphill) + uphill
            later = (1 + (1 + 4 * time * time).sqrt()) / 2
            ahead = new + (1 - uphill) * (time - 1) / later * (new - v)
            v, time = new, later
        return v

    def _newton(self, anchor: Tensor, pulls: Tensor, start: Tensor, steps: int) -> Tensor:
        """The same for several classes."""
        penalty = torch.diag_embed(pulls.repeat(self.outputs))
        lengths = _lengths(start)
        v, hot = start, self._targets
        for _ in range(steps):
            outputs = self.x @ v.mT
            p = F.softmax(outputs, -1)
            slope = ((p * self.mask[:, None] - hot).mT @ self.x) + pulls * (v - anchor)
            step = solve_definite(self._curved(p) + penalty, slope.reshape(-1, 1)).reshape(v.shape)
            tried = outputs - lengths[:, None, None] * (self.x @ step.mT)  # outputs are linear in the length
            held = (pulls * (v - lengths[:, None, None] * step - anchor) ** 2).sum((-1, -2)) / 2
            best = (held - (F.log_softmax(tried, -1) * hot).sum((-1, -2))).argmin()
            v = v - lengths[best.reshape(1)] * step
        return v

    def _hinge(self, anchor: Tensor, pulls: Tensor, start: Tensor) -> Tensor:
        """The dual, a quadratic programme in a box, by an interior-point method.

        v = anchor + K^-1 S'a with K = diag(pulls), S the rows times their signs, and 0 <= a <= 1 one number a row:
        minimise 1/2 a'S K^-1 S'a - c'a, c = 1 - S anchor. Each step solves a system of 1 + inputs unknowns.
        """
        signed = self.x * (_sign(self.y) * self.mask)[:, None]
        weight = torch.diag_embed(pulls.clamp(min=JITTER))
        ahead = self.mask - (signed @ anchor.mT)[:, 0]
        a = torch.full_like(ahead, 0.5)
        low, high = torch.ones_like(a), torch.ones_like(a)  # multipliers of a >= 0 and of a <= 1
        for _ in range(INTERIOR_STEPS):
            gap = (low * a + high * (1 - a)).mean()
            target = (0.1 * gap).clamp(min=CENTRED)
            slope = ((signed @ (a @ signed / pulls.clamp(min=JITTER))) - ahead) - target / a + target / (1 - a)
            barrier = low / a + high / (1 - a)
            thin = signed / barrier[:, None]
            inner = solve_definite(weight + signed.mT @ thin, (thin.mT @ -slope)[:, None])[:, 0]
            move = -slope / barrier - thin @ inner
            to_low, to_high = target / a - low - low / a * move, target / (1 - a) - high + high / (1 - a) * move
            reach = torch.stack([_room(a, move), _room(1 - a, -move), _room(low, to_low), _room(high, to_high)]).min()
            length = (0.995 * reach).clamp(max=1.0)
            a = (a + length * move).clamp(CENTRED, 1 - CENTRED)
            low, high = low + length * to_low, high + length * to_high
        return anchor + (a @ signed / pulls.clamp(min=JITTER))[None]


def _lengths(like: Tensor) -> Tensor:
    """Lengths of a step that are tried: the whole, halvings, and none."""
    return torch.cat([torch.zeros(1), 0.5 ** torch.arange(HALVINGS)]).to(like.dtype)


def _room(value: Tensor, move: Tensor) -> Tensor:
    """The largest step along a move before an entry becomes zero."""
    return torch.where(move < 0, -value / move.clamp(max=-1e-300), torch.inf).min()


def solve_definite(matrix: Tensor, right: Tensor) -> Tensor:
    """The solution of a symmetric system that is definite or nearly definite."""
    return torch.cholesky_solve(right, cholesky(_definite(matrix)))


def _definite(matrix: Tensor) -> Tensor:
    """The matrix with a small diagonal added, because a constant feature without a pull makes it singular."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    size = diagonal.abs().mean(-1, keepdim=True).clamp(min=1e-30)
    return matrix + torch.diag_embed((JITTER * size).expand_as(diagonal))


def _sign(y: Tensor) -> Tensor:
    return 2.0 * y - 1.0
