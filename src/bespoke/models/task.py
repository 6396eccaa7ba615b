"""Tasks: a network joined with a loss and a score. A task knows nothing of federation.

A batch is a dict of tensors: `x`, `y` and `mask` (1.0 for a row, 0.0 for padding). Losses are means over the rows that
count, so padding changes nothing. Scores are sums over rows together with their `count`, so that any mean can follow.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke.errors import UserError
from bespoke.models.conditioned import LastLayer, conditioned
from bespoke.models.linear_problem import LinearHead, Loss
from bespoke.models.metric import class_sums
from bespoke.models.networks import Network
from bespoke.models.own_loss import OwnLoss
from bespoke.models.own_metric import Metric
from bespoke.models.scores import cut, joined, log_mixture, mean_over, shares
from bespoke.models.work import multiply_adds
from bespoke.task import Gradient, Precision
from bespoke.tensors import Params, is_buffer, scale

ROOM = 2**24  # output numbers in memory at once if rows are scored in blocks
STEEPEST = 10.0  # norm to which gradients are clipped for safe steps


@dataclass(frozen=True)
class BaseTask:
    """What all tasks share; a subclass defines `example_losses` and `score`."""

    network: Network
    how: Gradient = "autograd"  # the engine chooses: see `gradient`
    precision: Precision = "float32"  # of the products in training; scores are always float32
    l2: float = 0.0  # half of this times the squared norm of all parameters is added to the loss
    kinds: int = 0  # number of kinds of rows (a batch's `kind`), if the data distinguish kinds
    safe: bool = False  # no step overshoots: see `safe_rate` for linear models; for others, gradients are clipped

    metrics: tuple[str, ...] = ()
    lower_is_better: tuple[str, ...] = ("loss",)
    own: tuple[Metric, ...] = ()  # the user-defined ones among them
    own_loss: OwnLoss | None = None  # in place of the task's own
    centre: float = 0.0  # subtracted from the target; user-defined metrics get it added

    portable = True  # other processes can make it
    draws = False  # training draws random numbers, so batches have a `draw`
    batches_clients = False  # one batch may hold the rows of many clients
    own_head = False  # its parameters are the last layer of a frozen language model

    @property
    def contexts(self) -> int:
        """The number of contexts; 1 if the data distinguish none."""
        return 1

    def differentiated(self, how: Gradient, precision: Precision = "float32") -> Self:
        """The same task with another computation of gradients (the closed form falls back if there is none)."""
        return replace(self, how=how, precision=precision)

    def lowered(self, params: Params) -> AbstractContextManager[None]:
        """Within it products are computed in bfloat16, if the precision says so; parameters stay float32."""
        if self.precision != "bf16":
            return nullcontext()
        where = next((leaf.device.type for leaf in params.values()), "cpu")
        return torch.autocast(where, torch.bfloat16)

    @property
    def has_closed_form(self) -> bool:
        return self.network.is_linear and self.own_loss is None

    @property
    def smooth(self) -> bool:
        """Whether the loss has a second derivative."""
        return True

    @property
    def looped(self) -> str:
        """The reason if torch.func.vmap cannot run it, as far as it is known."""
        return self.own_loss.looped if self.own_loss else ""

    @property
    def vectorizes(self) -> bool:
        return self.network.vectorizes and not self.looped

    @property
    def last_layer(self) -> tuple[str, ...]:
        return self.network.last_layer

    def init(self, seed: int) -> Params:
        return self.network.init(seed)

    def fresh(self, seed: int) -> Params:
        """Random parameters: those of `init`, or a draw if `init` does not depend on the seed."""
        return self.network.fresh(seed)

    def conditioned(self, size: int) -> Self:
        """The same task with a network that has an embedding of this size."""
        return replace(self, network=conditioned(self.network, size))

    def above_features(self) -> Self:
        """The task of the last layer alone, whose rows are features."""
        return replace(self, network=LastLayer(self.network))

    def with_head(self) -> BaseTask:
        """For a frozen language model, the task that trains its last layer; any other task is returned unchanged."""
        return self

    @property
    def layers(self) -> Params:
        """Initial parameters and buffers that stay on each client: none here. See models/own."""
        return {}

    def settled(self, layers: Params, params: Params, batches: Any) -> Params:
        """The same for a client that never trained, on the rows it adapts on."""
        return layers

    def known_kinds(self, who: str) -> int:
        """The number of kinds of rows, for a method that needs kinds."""
        if not self.kinds:
            raise UserError(
                f"{who} goes by the kind of rows that a client likes, and these data have no column 'kind'; use "
                "assignment = 'som' or 'personal', or data that have one, such as mnist-preferences"
            )
        return self.kinds

    def predict(self, params: Params, batch: Params) -> Tensor:
        return self.network(params, batch["x"])

    def features(self, params: Params, batch: Params) -> Tensor:
        """The representation before the last layer."""
        return self.network.features(params, batch["x"])

    def items(self, params: Params, batch: Params) -> tuple[Tensor, Tensor, Tensor]:
        """The items of a batch for a memory: features (items, dim), targets (items), and which items count."""
        return self.features(params, batch), batch["y"], batch["mask"]

    def chosen(self, outputs: Tensor) -> Tensor:
        """The targets that these outputs predict."""
        return outputs[..., 0]

    def asked(self, params: Params, batch: Params) -> tuple[Any, Tensor]:
        """The query to a memory for these rows: the model's outputs, and the items' features."""
        features = self.features(params, batch)
        return self.predict(params, batch), features.reshape(-1, features.shape[-1])

    def vote(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """The vote of weighted neighbours, (items, neighbours) each, in the form of `outputs`: their mean target."""
        return (weights * targets).sum(-1).reshape(outputs.shape)

    def mixed(self, outputs: Tensor, vote: Tensor, part: Tensor) -> Tensor:
        """part * vote + (1 - part) * outputs; `part` is a number, or one for each item."""
        return part * vote + (1 - part) * outputs

    def example_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of each row, by the user's own function if there is one."""
        return (
            self.usual_losses(outputs, y) if self.own_loss is None else self.own_loss(*self.for_own(outputs.float(), y))
        )

    def usual_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def for_own(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets as functions of the user's own are given them."""
        return outputs, y

    def row_numbers(self, x: Tensor) -> int:
        """The outputs per row that may be freed after their block; 0: scores need all rows at once."""
        return 0

    def blocks(self, rows: Params) -> list[Params]:
        """The rows in blocks, so that memory holds the outputs of one block."""
        numbers = self.row_numbers(rows["x"])
        return cut(rows, ROOM // numbers) if numbers else [rows]

    def judge(self, outputs: Tensor, rows: Params) -> Any:
        """The values that scores need of a block's outputs: all of them, or a few numbers per item."""
        return outputs

    def judged(self, params: Params, rows: Params) -> Any:
        """The values that scores need on all rows; `score` and `row_values` take them instead of outputs."""
        return joined([self.judge(self.predict(params, block), block) for block in self.blocks(rows)])

    def scored(self, params: Params, rows: Params) -> Params:
        """The scores of a model on these rows, computed in blocks."""
        return self.score(self.judged(params, rows), rows)

    def work(self, x: Tensor) -> int:
        """Multiply-adds of a forward pass over these rows."""
        params = self.init(0)
        return multiply_adds(lambda: self.network(params, x))

    def output_gradient(self, outputs: Tensor, y: Tensor) -> Tensor:
        """d(example loss)/d(outputs) for linear networks."""
        raise NotImplementedError

    def loss(self, params: Params, batch: Params) -> Tensor:
        return self._penalized(self.mean_loss(self.predict(params, batch), batch), params)

    def mean_loss(self, outputs: Tensor, batch: Params) -> Tensor:
        """The mean over rows with mask 1."""
        return mean_over(self.example_losses(outputs, batch["y"]), batch["mask"])

    def loss_of_rows(self, params: Params, batch: Params) -> Tensor:
        """The loss with different parameters for every row: the first dimension of each leaf."""

        def alone(params: Params, row: Params) -> Tensor:
            return self.loss(params, {name: column[None] for name, column in row.items()})

        counted = {**batch, "mask": torch.ones_like(batch["mask"])}
        return mean_over(torch.func.vmap(alone)(params, counted), batch["mask"])

    @property
    def word_width(self) -> int:
        """Numbers per word of `words`; 0 if this task has no words."""
        inputs = getattr(self.network, "inputs", 0)
        return inputs and inputs + self.network.outputs  # type: ignore[attr-defined]

    def words(self, batch: Params) -> tuple[Tensor, Tensor]:
        """Rows as words, for a generator of embeddings: (rows, words, width), and the mask of words.

        A row of a table is one word: its inputs and its target.
        """
        said = torch.cat([self.network.prepare(batch["x"]).flatten(1), self.shown(batch["y"])], 1)
        return said[:, None], batch["mask"][:, None].to(said.dtype)

    def shown(self, y: Tensor) -> Tensor:
        """Targets as numbers, as a generator reads them beside the inputs: (rows, outputs)."""
        return y.float()[:, None]

    def _penalized(self, loss: Tensor, params: Params) -> Tensor:
        if not self.l2:
            return loss
        return loss + 0.5 * self.l2 * sum((p * p).sum() for name, p in params.items() if not is_buffer(name))

    def gradient(self, params: Params, batch: Params) -> Params:
        """The gradient of `loss`: closed form (linear networks), torch.func (under vmap) or plain autograd."""
        if self.how in ("closed-form", "fused") and self.has_closed_form:
            return self._closed_form(params, batch)
        return self._bounded(self.slopes(lambda p: (self.loss(p, batch),), params)[0])

    def stepped(self, params: Params, batch: Params, still: bool = False) -> tuple[Params, Params]:
        """The gradient, and the buffers that this forward pass changes: none here."""
        return self.gradient(params, batch), {}

    def _bounded(self, found: Params) -> Params:
        """The gradient, clipped if steps must be safe."""
        if not self.safe or self.has_closed_form:
            return found
        norm = sum((g * g).sum() for g in found.values()) ** 0.5
        return scale(found, (STEEPEST / norm.clamp(min=1e-12)).clamp(max=1.0))

    def safe_rate(self, params: Params, batches: Any, lr: float | Tensor, more: float | Tensor) -> float | Tensor:
        """The rate, or the largest at which this client's own rows cannot make a step overshoot, if that is lower.

        `more`: the curvature of pulls and decay. The bound exists for linear models only and stays on the client.
        """
        head = self.linear() if self.safe and self.has_closed_form else None
        if head is None:
            return lr
        curvature = head.problem(params, batches.rows()).smoothness(batches.size) + more + self.l2
        return (1 / curvature).clamp(max=lr).float()

    def slopes(self, losses: Callable[..., tuple[Tensor, ...]], *params: Params) -> tuple[Params, ...]:
        """The gradient of the i-th loss for the i-th parameters, the others held; `losses` takes all at once."""
        with self.lowered(params[0]):
            return self._slopes(losses, *params)

    def _slopes(self, losses: Callable[..., tuple[Tensor, ...]], *params: Params) -> tuple[Params, ...]:
        if self.how == "autograd":
            live = [{name: p.detach().requires_grad_() for name, p in part.items()} for part in params]
            found, grads = losses(*live), []
            for place, (loss, part) in enumerate(zip(found, live)):
                more = place + 1 < len(live)
                found_here = torch.autograd.grad(loss, list(part.values()), retain_graph=more, materialize_grads=True)
                grads.append(dict(zip(part, found_here)))
            return tuple(grads)
        if len(params) == 1:
            return (torch.func.grad(lambda p: losses(p)[0])(*params),)
        found, pull = torch.func.vjp(losses, *params)[:2]
        one, nil = torch.ones_like(found[0]), torch.zeros_like(found[0])
        rows = (tuple(one if i == j else nil for j in range(len(params))) for i in range(len(params)))
        return tuple(pull(row)[place] for place, row in enumerate(rows))

    def descend(
        self, params: Params, batches: Any, lr: Any, decay: Any, anchor: Params | None, pull: Any
    ) -> Params | None:
        """All of a client's steps at once in machine code, if the engine chose so; else None."""
        if self.how != "fused" or not self.has_closed_form or not hasattr(batches, "orders"):
            return None
        from bespoke.models.fast.kernels import descend_linear

        start = params if anchor is None else anchor
        weight, bias = descend_linear(
            self.kernel_of(), batches, params["weight"], params["bias"], start["weight"], start["bias"],
            lr, decay + self.l2, pull,
        )  # fmt: skip
        return {"weight": weight, "bias": bias}

    def kernel_of(self) -> Loss:
        """The name of the loss in models.kernels and models.linear_problem."""
        raise NotImplementedError

    def linear(self) -> LinearHead | None:
        """The last layer as a problem to solve; None if it is not one affine map under a known loss."""
        return None

    def _closed_form(self, params: Params, batch: Params) -> Params:
        x = self.network.prepare(batch["x"])
        mask = batch["mask"]
        slope = self.output_gradient(x @ params["weight"].mT + params["bias"], batch["y"])
        slope = slope * (mask / mask.sum().clamp(min=1.0))[:, None]
        grads = {"weight": slope.mT @ x, "bias": slope.sum(0)}
        if self.l2:
            grads = {name: g + self.l2 * params[name] for name, g in grads.items()}
        return grads

    def score(self, outputs: Tensor, batch: Params) -> Params:
        raise NotImplementedError

    def with_metrics(self, own: tuple[Metric, ...], centre: float = 0.0) -> Self:
        """The same task with further metrics; `centre` of the target, which was subtracted from it."""
        if not own:
            return self
        names = [metric.name for metric in own]
        for name in names:
            if name in ("rows", "outputs", "count") or name.endswith("_count"):
                raise UserError(f"a metric cannot be called {name!r}, a word that tables use; give it another: name=")
            if name in self.metrics or names.count(name) > 1:
                raise UserError(f"{name!r} is the name of two metrics of this experiment; give yours another: name=")
        lower = tuple(metric.name for metric in own if metric.better == "lower")
        metrics, lowered = (*self.metrics, *names), (*self.lower_is_better, *lower)
        return replace(self, own=own, centre=centre, metrics=metrics, lower_is_better=lowered)

    def own_sums(self, outputs: Any, rows: Params) -> Params:
        """One client's scores by user-defined metrics, and the count of each: none without rows."""
        there = rows["mask"] > 0
        count = there.any().double().cpu()
        said, y = (self.in_units(values).cpu() for values in self.for_own(outputs[there], rows["y"][there]))
        found = {m.name: torch.tensor(m(said, y) if count else 0.0, dtype=torch.float64) for m in self.own}
        return found | {f"{name}_count": count for name in found}

    def in_units(self, values: Tensor) -> Tensor:
        """Outputs or targets in the units of the data."""
        return values

    def row_metric(self, metric: str) -> str | None:
        """The metric of single rows whose mean is a client's value; the loss for metrics without values by row."""
        return None

    def row_values(self, outputs: Tensor, batch: Params, metric: str) -> Tensor:
        """The metric of each row."""
        raise NotImplementedError


@dataclass(frozen=True)
class Regression(BaseTask):
    """Half the squared error (or `factor` times it); reported in the target's own units through `unit`."""

    metrics: tuple[str, ...] = ("mse", "half_mse", "rmse", "mae", "loss")
    lower_is_better: tuple[str, ...] = ("mse", "half_mse", "rmse", "mae", "loss")
    unit: float = 1.0  # the target was divided by this before training
    factor: float = 0.5  # of the squared error in the loss: Motley has a half for School and one for ADNI

    def usual_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.factor * (outputs[..., 0] - y) ** 2

    def for_own(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return outputs[..., 0], y  # both of one shape: a difference would be a matrix otherwise

    def output_gradient(self, outputs: Tensor, y: Tensor) -> Tensor:
        return 2 * self.factor * (outputs - y[:, None])

    def descend(self, *arguments: Any) -> Params | None:
        return super().descend(*arguments) if self.factor == 0.5 else None  # the compiled loss is the half

    def linear(self) -> LinearHead | None:
        return None if self.own_loss else LinearHead.of(self, 2 * self.factor)

    def kernel_of(self) -> Loss:
        return "squares"

    def in_units(self, values: Tensor) -> Tensor:
        return values * self.unit + self.centre

    def row_metric(self, metric: str) -> str | None:
        return metric if metric in ("mse", "half_mse", "mae") else "loss"

    def row_values(self, outputs: Tensor, batch: Params, metric: str) -> Tensor:
        error = outputs[..., 0] - batch["y"]
        if metric == "mae":
            return error.abs() * self.unit
        if metric == "loss":
            return self.example_losses(outputs, batch["y"])
        factor = {"mse": self.unit**2, "half_mse": self.unit**2 / 2}[metric]
        return factor * error * error

    def score(self, outputs: Tensor, batch: Params) -> Params:
        mask = batch["mask"]
        error = (outputs[..., 0] - batch["y"]) * self.unit
        squared = (error * error * mask).sum()
        loss = self.factor * squared / self.unit**2
        if self.own_loss is not None:
            loss = (self.example_losses(outputs, batch["y"]) * mask).sum()
        absolute = (error.abs() * mask).sum()
        return {"mse": squared, "mae": absolute, "loss": loss, "count": mask.sum()}


@dataclass(frozen=True)
class Classification(BaseTask):
    """Cross-entropy over classes, or the hinge of a linear SVM (one output, classes 0 and 1)."""

    hinge: bool = False
    metrics: tuple[str, ...] = ("accuracy", "error", "loss", "balanced_accuracy", "f1", "auc")
    lower_is_better: tuple[str, ...] = ("error", "loss")

    @property
    def smooth(self) -> bool:
        return not self.hinge

    def _sign(self, y: Tensor) -> Tensor:
        return 2.0 * y - 1.0

    def chosen(self, outputs: Tensor) -> Tensor:
        return (outputs[..., 0] > 0).long() if self.hinge else outputs.argmax(-1)

    def vote(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        if self.hinge:  # 2 p - 1, on the scale of the margin
            return super().vote(outputs, self._sign(targets), weights)
        return shares(outputs, targets, weights)

    def mixed(self, outputs: Tensor, vote: Tensor, part: Tensor) -> Tensor:
        return super().mixed(outputs, vote, part) if self.hinge else log_mixture(outputs, vote, part)

    def shown(self, y: Tensor) -> Tensor:
        outputs = self.network.outputs  # type: ignore[attr-defined]
        return super().shown(y) if outputs == 1 else (y[:, None] == torch.arange(outputs)).float()

    def usual_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self.hinge:
            return (1 - self._sign(y) * outputs[..., 0]).clamp(min=0)
        # log-softmax and gather rather than cross_entropy: the same number, and it vectorizes over clients
        return -F.log_softmax(outputs, dim=-1).gather(-1, y.long()[..., None])[..., 0]

    def for_own(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return outputs, y.long()

    def output_gradient(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self.hinge:
            sign = self._sign(y)
            return (-sign * (sign * outputs[..., 0] < 1))[:, None]
        return F.softmax(outputs, dim=-1) - F.one_hot(y.long(), outputs.shape[-1])

    def linear(self) -> LinearHead | None:
        return None if self.own_loss else LinearHead.of(self)

    def kernel_of(self) -> Loss:
        return "hinge" if self.hinge else "softmax"

    def row_metric(self, metric: str) -> str | None:
        return metric if metric in ("accuracy", "error") else "loss"

    def row_values(self, outputs: Tensor, batch: Params, metric: str) -> Tensor:
        if metric == "loss":
            return self.example_losses(outputs, batch["y"])
        chosen = self.chosen(outputs)
        right = (chosen == batch["y"]).float()
        return right if metric == "accuracy" else 1 - right

    def score(self, outputs: Tensor, batch: Params) -> Params:
        y, mask = batch["y"], batch["mask"]
        chosen = self.chosen(outputs)
        correct = ((chosen == y).float() * mask).sum()
        loss = (self.example_losses(outputs, y) * mask).sum()
        sums = {"accuracy": correct, "error": mask.sum() - correct, "loss": loss}
        sums |= class_sums(outputs, chosen, y, mask, self.metrics)
        # argmax and sort treat NaN as the largest number, so a diverged model would have scores without this
        diverged = (outputs.isnan().any(-1) & (mask > 0)).any()
        return {name: torch.where(diverged, torch.nan, value) for name, value in sums.items()} | {"count": mask.sum()}
