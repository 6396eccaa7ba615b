"""The contract of a task: everything that a method or an engine may ask of it.

A task joins a network with a loss and a score, and knows nothing of federation. `bespoke.models.task.BaseTask` has all
of it; derive a task of your own from there. Parameters are dicts of tensors. A batch is a dict of tensors, too: `x`,
`y` and `mask` (1 for a row, 0 for padding), and what else the data know of a row, such as its `kind` or `context`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from torch import Tensor

from bespoke.tensors import Params

DRAW = "draw"  # key of a batch's random number, from (seed, stage, round, client, step), for tasks with dropout
Gradient = Literal["fused", "closed-form", "func", "autograd"]
Precision = Literal["float32", "bf16"]


class Task(Protocol):
    # -- the model -----------------------------------------------------------------------------------------------------
    def init(self, seed: int) -> Params: ...  # initial parameters
    def fresh(self, seed: int) -> Params: ...  # random parameters, even if `init` does not depend on the seed
    def predict(self, params: Params, batch: Params) -> Tensor: ...
    def features(self, params: Params, batch: Params) -> Tensor: ...  # the input of the last layer
    @property
    def network(self) -> Any: ...  # see bespoke.models.networks
    @property
    def last_layer(self) -> tuple[str, ...]: ...  # prefixes of the names of its parameters
    def linear(self) -> Any: ...  # the last layer as a problem to solve (models.linear_problem), or None
    def above_features(self) -> Task: ...  # the task of the last layer alone, whose rows are features
    def with_head(
        self,
    ) -> Task: ...  # of a frozen language model: a task that trains its last layer; else the same task
    def conditioned(self, size: int) -> Task: ...  # a task whose network has an embedding of this size

    # -- its loss ------------------------------------------------------------------------------------------------------
    @property
    def own_loss(self) -> Any: ...  # one of the user's own (bespoke.models.own_loss), or None
    def loss(self, params: Params, batch: Params) -> Tensor: ...  # the mean over rows with mask 1
    def mean_loss(self, outputs: Tensor, batch: Params) -> Tensor: ...  # the same, from outputs
    def loss_of_rows(self, params: Params, batch: Params) -> Tensor: ...  # the first dimension of leaves is the row
    def gradient(self, params: Params, batch: Params) -> Params: ...
    def stepped(self, params: Params, batch: Params, still: bool = False) -> tuple[Params, Params]: ...
    # ^ the gradient, and buffers (tensors.BUFFERS) after this forward pass; `still`: buffers do not change
    @property
    def smooth(self) -> bool: ...  # whether the loss has a second derivative
    def slopes(self, losses: Callable[..., tuple[Tensor, ...]], *params: Params) -> tuple[Params, ...]: ...  # of each
    def descend(
        self, params: Params, batches: Any, lr: Any, decay: Any, anchor: Params | None, pull: Any
    ) -> Params | None: ...  # all steps of SGD at once, if a fast kernel exists; else None
    def safe_rate(self, params: Params, batches: Any, lr: float | Tensor, more: float | Tensor) -> float | Tensor: ...

    # -- scores, and the memory of kNN-Per -----------------------------------------------------------------------------
    @property
    def metrics(self) -> tuple[str, ...]: ...
    @property
    def lower_is_better(self) -> tuple[str, ...]: ...  # of these metrics
    def scored(self, params: Params, rows: Params) -> Params: ...  # sums of scores, and their count
    def judged(self, params: Params, rows: Params) -> Any: ...  # the values that scores need, on all rows
    def blocks(self, rows: Params) -> list[Params]: ...  # rows in blocks, so that memory holds the outputs of one block
    def judge(self, outputs: Tensor, rows: Params) -> Any: ...  # the values that scores need, from a block's outputs
    def score(self, outputs: Any, batch: Params) -> Params: ...
    def row_values(self, outputs: Any, batch: Params, metric: str) -> Tensor: ...  # the metric of each row
    def row_metric(self, metric: str) -> str | None: ...
    @property
    def own(self) -> Any: ...  # user-defined metrics: bespoke.models.own_metric
    def items(self, params: Params, batch: Params) -> tuple[Tensor, Tensor, Tensor]: ...  # features, targets, mask
    def asked(self, params: Params, batch: Params) -> tuple[Any, Tensor]: ...  # outputs, and the items' features
    def chosen(self, outputs: Tensor) -> Tensor: ...  # the targets that these outputs predict
    def vote(self, outputs: Any, targets: Tensor, weights: Tensor) -> Any: ...  # the vote of weighted neighbours
    def mixed(self, outputs: Any, vote: Any, part: Tensor) -> Any: ...  # part * vote + (1 - part) * outputs

    # -- what rows hold ------------------------------------------------------------------------------------------------
    @property
    def kinds(self) -> int: ...  # number of kinds of rows, if the data distinguish kinds
    def known_kinds(self, who: str) -> int: ...  # the same; an error if the data do not
    @property
    def contexts(self) -> int: ...  # number of contexts; 1 if the data distinguish none
    @property
    def word_width(self) -> int: ...  # numbers per word of `words`; 0 without words
    def words(self, batch: Params) -> tuple[Tensor, Tensor]: ...  # (rows, words, width), and the mask of words

    # -- how it is executed --------------------------------------------------------------------------------------------
    @property
    def how(self) -> Gradient: ...  # how gradients are computed; "autograd": one client at a time
    def differentiated(
        self, how: Gradient, precision: Precision = "float32"
    ) -> Task: ...  # the same task, computed in this way
    @property
    def has_closed_form(self) -> bool: ...  # one affine layer, whose gradient needs no autograd
    @property
    def own_head(self) -> bool: ...  # its parameters are the last layer of a frozen language model
    @property
    def draws(self) -> bool: ...  # training draws random numbers, so batches have a `draw`
    @property
    def layers(self) -> Params: ...  # initial layers that stay on each client
    def settled(
        self, layers: Params, params: Params, batches: Any
    ) -> Params: ...  # the same for a client that never trained
    @property
    def safe(self) -> bool: ...  # step sizes are bounded by each client's own rows
    @property
    def vectorizes(self) -> bool: ...  # whether torch.func.vmap can run it
    @property
    def looped(self) -> str: ...  # the reason if vmap cannot run it
    @property
    def portable(self) -> bool: ...  # whether other processes can make it
    @property
    def batches_clients(self) -> bool: ...  # one batch may hold the rows of many clients
    def work(self, x: Tensor) -> int: ...  # multiply-adds of a forward pass
    def row_numbers(self, x: Tensor) -> int: ...  # output numbers of a row that may be freed after its block
