"""Tasks of a user's own network: training mode in training, and optionally its own loss and metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from bespoke.errors import UserError
from bespoke.models.linear_problem import LinearHead
from bespoke.models.own.network import Forward, OwnHead, OwnNetwork
from bespoke.models.own_loss import losses_of
from bespoke.models.task import BaseTask, Classification, Regression
from bespoke.tensors import Params, is_buffer, without_buffers


@dataclass(frozen=True)
class OwnTask(BaseTask):
    """What the tasks of own networks share."""

    network: OwnNetwork

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return self.network.facts.draws

    @property
    def looped(self) -> str:
        return self.network.facts.looped or super().looped

    @property
    def portable(self) -> bool:  # type: ignore[override]
        return self.network.model.portable

    # -- outputs -------------------------------------------------------------------------------------------------------
    def predict(self, params: Params, batch: Params) -> Tensor:
        return self._shaped(self.network.run(params, batch, "eval")[0])

    def features(self, params: Params, batch: Params) -> Tensor:
        return self.network.features_of(params, batch)

    def above_features(self) -> Self:
        head: Any = OwnHead(self.network)
        return replace(self, network=head)

    def linear(self) -> LinearHead | None:
        return None

    def work(self, x: Tensor) -> int:
        return self.network.facts.work * len(x)

    def _shaped(self, outputs: Tensor) -> Tensor:
        """A single number for each row as a column."""
        return outputs[:, None] if outputs.dim() == 1 else outputs

    # -- training ------------------------------------------------------------------------------------------------------
    def loss(self, params: Params, batch: Params) -> Tensor:
        if self.network.facts.moving and self.network.model.buffers != "frozen":
            raise UserError(
                f"the model {self.network.model.title!r} has buffers that training changes, and this method computes "
                "gradients by itself, so that they would stay as they are; use buffers='frozen', or a method such as "
                "fedavg, ditto or finetune"
            )
        return self._loss(params, batch, "train")[0]

    def _loss(self, params: Params, batch: Params, how: Forward) -> tuple[Tensor, Params]:
        outputs, buffers = self.network.run(params, batch, how, seeded=self.how == "autograd")
        return self._penalized(self.mean_loss(self._shaped(outputs), batch), params), buffers

    def stepped(self, params: Params, batch: Params, still: bool = False) -> tuple[Params, Params]:
        how: Forward = "held" if still else "train"
        free, rest = without_buffers(params), {name: p for name, p in params.items() if is_buffer(name)}
        left: Params = {}

        def losses(p: Params) -> tuple[Tensor, ...]:
            value, buffers = self._loss({**p, **rest}, batch, how)
            left.update(buffers)
            return (value,)

        return self._bounded(self.slopes(losses, free)[0]), left

    # -- layers that stay on the client --------------------------------------------------------------------------------
    @property
    def layers(self) -> Params:
        return self.network.layers

    def settled(self, layers: Params, params: Params, batches: Any) -> Params:
        return self.network.settled(layers, params, batches.rows())

    # -- its own loss and metrics --------------------------------------------------------------------------------------
    def example_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self.network.model.loss is None:
            return super().example_losses(outputs, y)
        losses = self.own_losses(*self.for_own(outputs, y))
        return losses if losses.dim() else losses.expand(len(y))

    def own_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """What the model's own loss gives: a number for each row, or their mean."""
        own, said = self.network.model.loss, f"the loss of the model {self.network.model.title!r}"
        assert own is not None
        return losses_of(own, said, outputs, y, whole=True)

    def row_metric(self, metric: str) -> str | None:
        if metric in self.network.model.metrics or not self.network.facts.known:
            return None if self.network.facts.whole else "loss"
        found = super().row_metric(metric)
        return None if found == "loss" and self.network.facts.whole else found

    def score(self, outputs: Tensor, batch: Params) -> Params:
        model, mask = self.network.model, batch["mask"]
        if self.network.facts.known:
            sums = super().score(outputs, batch)
        else:
            sums = {"loss": (self.example_losses(outputs, batch["y"]) * mask).sum(), "count": mask.sum()}
        if not model.metrics:
            return sums
        rows = mask > 0
        said, y = self.for_own(outputs.detach()[rows], batch["y"][rows])
        if self.network.facts.known:
            said, y = self.in_units(said), self.in_units(y)
        for name, metric in model.metrics.items():
            sums[name] = torch.tensor(self._measured(name, metric, said, y))
            sums[f"{name}_count"] = torch.ones(())
        return sums

    def _measured(self, name: str, metric: Any, outputs: Tensor, y: Tensor) -> float:
        if not len(y) or not outputs.isfinite().all():
            return float("nan")
        try:
            value = metric(outputs, y)
        except Exception as error:
            raise UserError(
                f"the metric {name!r} fails on a client's {len(y)} rows: {type(error).__name__}: {error}; where it is "
                "not defined it has to give float('nan')"
            ) from error
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"the metric {name!r} gave a {type(value).__name__}; it has to give a number") from None


@dataclass(frozen=True)
class OwnClassification(OwnTask, Classification):
    """Classes by a network of the user's own."""

    network: OwnNetwork


@dataclass(frozen=True)
class OwnRegression(OwnTask, Regression):
    """A number by a network of the user's own."""

    network: OwnNetwork

    def for_own(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().for_own(outputs, y) if self.network.facts.known else (outputs, y)
