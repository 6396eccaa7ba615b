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

DRAW = "draw"  # in a batch: a random number of its own, from (seed, stage, round, client, step), where a task draws
Gradient = Literal["fused", "closed-form", "func", "autograd"]
Precision = Literal["float32", "bf16"]


class Task(Protocol):
    # -- the model -----------------------------------------------------------------------------------------------------
    def init(self, seed: int) -> Params: ...  # where training begins
    def fresh(self, seed: int) -> Params: ...  # a random start, also where `init` is the same for all seeds
    def predict(self, params: Params, batch: Params) -> Tensor: ...
    def features(self, params: Params, batch: Params) -> Tensor: ...  # what the last layer sees
    @property
    def network(self) -> Any: ...  # the function inside: see bespoke.models.networks
    @property
    def last_layer(self) -> tuple[str, ...]: ...  # prefixes of the names of its parameters
    def linear(self) -> Any: ...  # the last layer as a problem to be solved, or None: bespoke.models.linear_problem
    def above_features(self) -> Task: ...  # the task of the last layer alone: the rows of its batches are features
    def with_head(self) -> Task: ...  # of a frozen language model: its last layer is learned; of others: the same task
    def conditioned(self, size: int) -> Task: ...  # the same with room for an embedding of this size in the network

    # -- its loss ------------------------------------------------------------------------------------------------------
    def loss(self, params: Params, batch: Params) -> Tensor: ...  # the mean over rows that count
    def mean_loss(self, outputs: Tensor, batch: Params) -> Tensor: ...  # the same, of outputs
    def loss_of_rows(self, params: Params, batch: Params) -> Tensor: ...  # leaves have a first dimension: a row each
    def gradient(self, params: Params, batch: Params) -> Params: ...
    def stepped(self, params: Params, batch: Params, still: bool = False) -> tuple[Params, Params]: ...
    # ^ the gradient, and buffers (tensors.BUFFERS) as this forward pass leaves them; `still`: they are not to change
    @property
    def smooth(self) -> bool: ...  # the loss has a second derivative; a hinge has none
    def slopes(self, losses: Callable[..., tuple[Tensor, ...]], *params: Params) -> tuple[Params, ...]: ...  # of each
    def descend(
        self, params: Params, batches: Any, lr: Any, decay: Any, anchor: Params | None, pull: Any
    ) -> Params | None: ...  # all steps of SGD at once, where there is a fast way; else None
    def safe_rate(self, params: Params, batches: Any, lr: float | Tensor, more: float | Tensor) -> float | Tensor: ...

    # -- scores, and the memory of kNN-Per -----------------------------------------------------------------------------
    def scored(self, params: Params, rows: Params) -> Params: ...  # sums of scores, and their count
    def judged(self, params: Params, rows: Params) -> Any: ...  # what scores need of the outputs on all rows
    def blocks(self, rows: Params) -> list[Params]: ...  # rows whose outputs are held one block after the other
    def judge(self, outputs: Tensor, rows: Params) -> Any: ...  # what scores need of the outputs of a block
    def score(self, outputs: Any, batch: Params) -> Params: ...
    def row_values(self, outputs: Any, batch: Params, metric: str) -> Tensor: ...  # each row's part of a metric
    def row_metric(self, metric: str) -> str | None: ...
    @property
    def own(self) -> Any: ...  # metrics that are not part of bespoke: bespoke.models.own_metric
    def items(self, params: Params, batch: Params) -> tuple[Tensor, Tensor, Tensor]: ...  # features, targets, mask
    def asked(self, params: Params, batch: Params) -> tuple[Any, Tensor]: ...  # outputs, and the items' features
    def chosen(self, outputs: Tensor) -> Tensor: ...  # the targets that these outputs foretell
    def vote(self, outputs: Any, targets: Tensor, weights: Tensor) -> Any: ...  # what weighted neighbours say
    def mixed(self, outputs: Any, vote: Any, part: Tensor) -> Any: ...  # part * vote + (1 - part) * outputs

    # -- what rows hold ------------------------------------------------------------------------------------------------
    @property
    def kinds(self) -> int: ...  # how many kinds of rows there are, where the data tell them apart
    def known_kinds(self, who: str) -> int: ...  # the same; an error where the data do not
    @property
    def contexts(self) -> int: ...  # how many contexts rows are told apart by; 1 where they are not
    @property
    def word_width(self) -> int: ...  # numbers of a word of `words`; 0: there are none
    def words(self, batch: Params) -> tuple[Tensor, Tensor]: ...  # (rows, words, width), and which of them count

    # -- how it is executed --------------------------------------------------------------------------------------------
    @property
    def how(self) -> Gradient: ...  # the way to its gradient; "autograd": one client at a time
    def differentiated(self, how: Gradient, precision: Precision = "float32") -> Task: ...  # the same, computed so
    @property
    def has_closed_form(self) -> bool: ...  # it is one affine layer, whose gradient needs no autograd
    @property
    def own_head(self) -> bool: ...  # its parameters are the last layer of a frozen language model
    @property
    def draws(self) -> bool: ...  # training draws random numbers: batches have a `draw`
    @property
    def layers(self) -> Params: ...  # parameters and buffers that stay on each client, as it begins with them
    def settled(self, layers: Params, params: Params, batches: Any) -> Params: ...  # the same for one never trained
    @property
    def safe(self) -> bool: ...  # steps are bounded, each client's by its own rows
    @property
    def vectorizes(self) -> bool: ...  # torch.func.vmap can run it
    @property
    def looped(self) -> str: ...  # what is known of why it does not
    @property
    def portable(self) -> bool: ...  # other processes can make it
    @property
    def batches_clients(self) -> bool: ...  # it takes the rows of many clients in one batch by itself
    def work(self, x: Tensor) -> int: ...  # multiply-adds of a forward pass
    def row_numbers(self, x: Tensor) -> int: ...  # numbers of output of a row that need not be held for all rows
