"""A user's own losses: a number for each row, in place of the cross-entropy or of half the squared error.

A loss is a function of (outputs, y). Of classes, `outputs` are (rows, classes) and `y` whole numbers; of a regression
both are (rows,), standardized as for training. Its gradient comes from autograd: closed forms, compiled kernels and
exact fits belong to bespoke's own losses and are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bespoke.errors import UserError
from bespoke.models.own_metric import Metric
from bespoke.registry import Registry

Function = Callable[[Tensor, Tensor], Any]
NO_VMAP = "a loss that torch.func.vmap cannot run"


def _checked(found: Any, where: str) -> Function:
    if not callable(found) or isinstance(found, type | Metric):
        raise UserError(
            f"{where} is not a loss, a function of (outputs, y) with a number for each row; it is {found!r}"
        )
    function: Function = found
    return function


LOSSES: Registry[Function] = Registry("loss", "bespoke.losses", {}, _checked)


@dataclass(frozen=True)
class OwnLoss:
    """A loss under the name by which every process finds it."""

    name: str
    function: Function
    looped: str = ""  # the reason if torch.func.vmap cannot run it

    @classmethod
    def found(cls, given: str, where: str) -> OwnLoss:
        """The loss of this name."""
        if given.endswith("<lambda>"):
            raise UserError(
                f"{where}: a lambda has no name to be known by in run folders; write def my_loss(outputs, y)"
            )
        return cls(LOSSES.recorded(given, where), LOSSES.find(given, where))

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return losses_of(self.function, f"the loss {self.name}", outputs, y)

    def tried(self, outputs: Tensor, y: Tensor) -> OwnLoss:
        """The same loss after a trial on these outputs and on others; says whether clients can be vectorized."""
        check_loss(self, f"the loss {self.name}", outputs, y)
        two, both = torch.stack([outputs, outputs]).detach(), torch.stack([y, y])
        try:
            slopes = torch.func.vmap(torch.func.grad(lambda outputs, y: self(outputs, y).sum()))(two, both)
        except Exception:  # whatever vmap does not know
            return replace(self, looped=NO_VMAP)
        if not self(outputs, torch.zeros_like(y)).isfinite().all():
            return replace(self, looped="a loss that is not defined for targets of zero, which rows of padding have")
        alone = outputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self(alone, y).sum(), alone)
        same = torch.allclose(slopes[0], slope, rtol=1e-3, atol=1e-5)
        return self if same else replace(self, looped="a loss that torch.func.vmap computes differently")

    def __reduce__(self) -> Any:
        return _again, (self.name, self.looped)  # worker processes import it


def _again(name: str, looped: str) -> OwnLoss:
    return replace(OwnLoss.found(name, "a worker process"), looped=looped)


def losses_of(function: Function, said: str, outputs: Tensor, y: Tensor, whole: bool = False) -> Tensor:
    """The losses that a user's function gives for these rows; `whole`: their mean may be one number instead."""
    try:
        losses = function(outputs, y)
    except Exception as error:
        raise UserError(
            f"{said} fails on {len(y)} rows with outputs of shape {tuple(outputs.shape)} and y of {tuple(y.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if isinstance(losses, Tensor) and (losses.shape == y.shape[:1] or (whole and not losses.dim())):
        return losses
    found = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
    wanted = f"a tensor of shape ({len(y)},), a loss for each row" + (", or of shape (), their mean" if whole else "")
    advice = ', as reduction="none" gives in torch' if isinstance(losses, Tensor) and not losses.dim() else ""
    raise UserError(
        f"{said} gave {found} for {len(y)} rows, from outputs of shape {tuple(outputs.shape)} and y of shape "
        f"{tuple(y.shape)}; it has to give {wanted}{advice}"
    )


def check_loss(loss: Callable[[Tensor, Tensor], Tensor], said: str, outputs: Tensor, y: Tensor) -> None:
    """Refuses a loss that is not finite, has no gradient, or mixes rows, on these outputs and on others."""
    for some in (outputs, outputs + torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0))):
        _check(loss, said, some.detach().requires_grad_(), y)


def _check(loss: Callable[[Tensor, Tensor], Tensor], said: str, outputs: Tensor, y: Tensor) -> None:
    losses = loss(outputs, y)
    if not losses.isfinite().all():
        at = int((~losses.reshape(-1).isfinite()).nonzero()[0])
        raise UserError(
            f"{said} is {losses.reshape(-1)[at].item()} for the outputs {outputs[at].tolist()} and y = {y[at].item()}; "
            "outputs may be any numbers, so a loss of probabilities or positive numbers has to make such of them first"
        )
    slope = torch.autograd.grad(losses.sum(), outputs, allow_unused=True)[0] if losses.requires_grad else None
    if slope is None:
        raise UserError(
            f"{said} has no gradient: it has to compute with the tensors that it is given, by functions of torch, not "
            "by NumPy, item() or detach()"
        )
    if not slope.isfinite().all():
        raise UserError(f"{said} has a gradient that is not finite; correct it where its value is finite, too")
    if not losses.dim():
        return
    alone = torch.cat([loss(outputs[row : row + 1], y[row : row + 1]) for row in range(len(y))])
    if not torch.allclose(alone, losses, rtol=1e-3, atol=1e-5):
        raise UserError(
            f"{said} gives a row another number beside other rows than alone ({losses[0].item():.4g} and "
            f"{alone[0].item():.4g} for the first); each row's loss has to follow from its own outputs and y"
        )
