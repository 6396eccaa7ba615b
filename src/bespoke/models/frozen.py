"""A frozen causal language model. Only embeddings before the text, the prefix, are learned.

A row is fed as prefix, begin token, text. The prefix has one or more embeddings and may differ for every row. Rows of
many clients are computed together, in buckets of similar length: under vmap, the operations below get the rows of all
clients as one batch, without padding rows. The frozen weights have no gradients.

In bfloat16, gradients are computed with a copy of the model in bfloat16, which halves memory reads. Scores and cached
representations are float32.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bespoke import pretrained
from bespoke.devices import working_on
from bespoke.errors import UserError
from bespoke.models.fast.token_loss import head_judged, head_slopes, low_products, own_precision
from bespoke.models.networks import Network
from bespoke.tensors import Params

BUCKET = 32  # rows of similar length that are computed together
NOTHING = -1  # a target that does not count
MEMORY = 2**28  # bytes of cached representations without a prefix, per process; 0: none, texts are read in batches


@dataclass(frozen=True)
class FrozenLM(Network):
    """A pretrained model by name. Its parameters are the prefix alone, a row for each context or one for all."""

    pretrained: str

    @property
    def vocabulary(self) -> int:
        return pretrained.facts(self.pretrained).vocabulary

    @property
    def width(self) -> int:
        return pretrained.facts(self.pretrained).width

    def init(self, seed: int) -> Params:
        """The mean of all words' embeddings, as a neutral token."""
        return {"prefix": _words(self.pretrained).mean(0).reshape(1, 1, -1).clone()}

    def fresh(self, seed: int) -> Params:
        """A random embedding with the distribution of those of words."""
        words, generator = _words(self.pretrained), torch.Generator().manual_seed(seed)
        drawn = torch.randn(1, 1, words.shape[1], generator=generator)
        return {"prefix": words.mean(0) + words.std(0) * drawn}

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return self.logits(self.hidden(params["prefix"][0].expand(len(x), -1, -1), x))

    # -- of rows with a prefix each, of one client or, under vmap, of all together -------------------------------------
    def row_losses(self, prefix: Tensor, x: Tensor, targets: Tensor) -> Tensor:
        """Each row's loss, summed over its targets; differentiable for the prefix (rows, tokens, width)."""
        return _row_losses(self, prefix, x, targets)[0]

    def token_scores(self, prefix: Tensor, x: Tensor, targets: Tensor) -> Tensor:
        """Each token's loss, and 1 if the likeliest word is the target: (rows, length, 2)."""
        return _computed(self._judged, prefix, x, targets)

    def hidden(self, prefix: Tensor, x: Tensor) -> Tensor:
        """The representation before the last layer at each token of x: (rows, length, width)."""
        return _computed(self._hidden, prefix, x, torch.zeros_like(x))

    def seen(self, x: Tensor, targets: Tensor, prefix: Tensor | None = None) -> Tensor:
        """The representation before the last layer at each target: (rows, length, width).

        Without a prefix it depends on the texts alone, so it is cached for texts that return.
        """
        prefix = torch.zeros(len(x), 0, self.width) if prefix is None else prefix
        return _computed(self._seen, prefix, x, targets)

    def layer(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the last layer."""
        return _layer(self.pretrained)

    def words(self, x: Tensor) -> Tensor:
        """The embeddings of these words."""
        return F.embedding(x, _words(self.pretrained))

    def logits(self, hidden: Tensor) -> Tensor:
        head, bias = _layer(self.pretrained)
        return hidden @ head.mT if bias is None else hidden @ head.mT + bias

    def _slopes(self, prefix: Tensor, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses, slopes = torch.zeros(len(x)), torch.zeros_like(prefix)
        low = low_products(prefix)
        head, bias = _low_layer(self.pretrained) if low else _layer(self.pretrained)
        for rows, long in buckets(targets):
            own, here = prefix[rows].detach().requires_grad_(), targets[rows, :long]
            counted = here != NOTHING
            with torch.enable_grad():
                seen = _body(self.pretrained, own, x[rows, :long], low)[counted]
            found, slope = head_slopes(seen.detach(), head, bias, here[counted])
            slopes[rows] = torch.autograd.grad(seen, own, slope.to(seen.dtype))[0]
            losses[rows] = torch.zeros(counted.shape).masked_scatter_(counted, found).sum(1)
        return losses, slopes

    @torch.no_grad()
    def _judged(self, prefix: Tensor, x: Tensor, targets: Tensor) -> Tensor:
        scores = torch.zeros(*targets.shape, 2)
        for rows, long in buckets(targets):
            here = targets[rows, :long]
            counted = here != NOTHING
            seen = _body(self.pretrained, prefix[rows], x[rows, :long])[counted]
            some = torch.zeros(*here.shape, 2)
            some[counted] = head_judged(seen, *_layer(self.pretrained), here[counted]).mT
            scores[rows, :long] = some
        return scores

    @torch.no_grad()
    def _hidden(self, prefix: Tensor, x: Tensor, targets: Tensor) -> Tensor:
        whole = range(0, len(x), BUCKET)
        return torch.cat([_body(self.pretrained, prefix[i : i + BUCKET], x[i : i + BUCKET]) for i in whole])

    @torch.no_grad()
    def _seen(self, prefix: Tensor, x: Tensor, targets: Tensor) -> Tensor:
        seen = torch.zeros(*targets.shape, self.width)
        if prefix.shape[1] or not MEMORY:
            for rows, long in buckets(targets):
                seen[rows, :long] = _body(self.pretrained, prefix[rows], x[rows, :long])
            return seen
        for row, long in enumerate(lengths(targets).tolist()):
            if long:
                seen[row, :long] = _MEMORY.computed(self.pretrained, x[row, :long])
        return seen


class _Memory:
    """A cache of representations of texts without a prefix; the least recently used are dropped.

    A text is computed by itself: the other rows of a batch would change its rounding, and a cached value must not
    depend on what was computed before. It takes half as long again as in a batch, once.
    """

    def __init__(self) -> None:
        self.held: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()
        self.bytes = 0

    def computed(self, name: str, x: Tensor) -> Tensor:
        """The representation of one text: (length, width)."""
        key = name, x.device, x.dtype, torch.get_num_threads(), x.cpu().numpy().tobytes()
        if key in self.held:
            self.held.move_to_end(key)
            return self.held[key]
        found = self.held[key] = _body(name, torch.zeros(1, 0, _words(name).shape[1]), x[None])[0]
        self.bytes += found.nbytes
        while self.bytes > MEMORY:
            self.bytes -= self.held.popitem(last=False)[1].nbytes
        return found


_MEMORY = _Memory()


def lengths(targets: Tensor) -> Tensor:
    """How far each row has something to predict."""
    return ((targets != NOTHING) * torch.arange(1, targets.shape[1] + 1)).amax(1)


def buckets(targets: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Buckets of rows of similar length with targets, and the length of the longest row of each."""
    long = lengths(targets)
    order = long.argsort(stable=True)[(long == 0).sum() :]
    for begin in range(0, len(order), BUCKET):
        rows = order[begin : begin + BUCKET]
        yield rows, int(long[rows[-1]])


def _words(name: str) -> Tensor:
    weight: Tensor = pretrained.language_model(name).get_input_embeddings().weight
    return weight


def _layer(name: str) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the last layer, which must be one affine map."""
    return _layer_on(name, pretrained.working_device())


def _low_layer(name: str) -> tuple[Tensor, Tensor | None]:
    """The same with the weight in bfloat16."""
    layer = pretrained.language_model(name, low=True).get_output_embeddings()
    return layer.weight, _layer(name)[1]


@cache
def _layer_on(name: str, device: str) -> tuple[Tensor, Tensor | None]:
    model = pretrained.language_model(name)
    layer, words = model.get_output_embeddings(), _words(name)[None, :2]
    with torch.no_grad():
        whole, parts = model(inputs_embeds=words).logits, layer(model.base_model(inputs_embeds=words)[0])
    if not torch.allclose(whole, parts, rtol=1e-3, atol=1e-3):
        raise UserError(f"pretrained = {name!r}: its outputs are not an affine map of its features; use another model")
    return layer.weight, getattr(layer, "bias", None)


def _body(name: str, prefix: Tensor, x: Tensor, low: bool = False) -> Tensor:
    """The representation at each token of x. Rows are padded at the end, which a causal model does not read."""
    model = pretrained.language_model(name, low)
    inputs = torch.cat([prefix, F.embedding(x.long(), _words(name))], 1)
    # of short texts the gradient of torch's fused attention takes three times as long in bfloat16 as that of its parts
    with own_precision(prefix), sdpa_kernel(SDPBackend.MATH) if low else nullcontext():
        found = model.base_model(inputs_embeds=inputs.bfloat16() if low else inputs, use_cache=False)
    states: Tensor = found.last_hidden_state[:, prefix.shape[1] :]
    return states


class _RowLosses(torch.autograd.Function):
    """Rows' losses and their gradients in the prefixes, computed together because both are always used."""

    @staticmethod
    def forward(network: FrozenLM, prefix: Tensor, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with working_on(prefix.device):  # vmap calls this outside of the context
            return network._slopes(prefix, x, targets.long())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        return None, grads[0][..., None, None] * ctx.saved_tensors[0], None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], network: FrozenLM, *rows: Tensor) -> tuple[Any, Any]:
        losses, slopes = _row_losses(network, *_together(info, in_dims[1:], rows))
        shape = info.batch_size, -1
        return (losses.unflatten(0, shape), slopes.unflatten(0, shape)), (0, 0)


class _Computed(torch.autograd.Function):
    """A network's values for rows, computed for all clients together under vmap. Not differentiable."""

    @staticmethod
    def forward(compute: Callable[..., Tensor], prefix: Tensor, x: Tensor, targets: Tensor) -> Tensor:
        with working_on(prefix.device):
            return compute(prefix, x, targets.long())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], compute: Any, *rows: Tensor) -> tuple[Any, Any]:
        return _computed(compute, *_together(info, in_dims[1:], rows)).unflatten(0, (info.batch_size, -1)), 0


# torch does not annotate `apply`
_row_losses: Callable[..., tuple[Tensor, Tensor]] = _RowLosses.apply
_computed: Callable[..., Tensor] = _Computed.apply


def _together(info: Any, dims: tuple[int | None, ...], rows: tuple[Tensor, ...]) -> list[Tensor]:
    """The concatenation of all clients' rows; shared values are repeated."""
    many = info.batch_size
    stacked = [r.expand(many, *r.shape) if dim is None else r.movedim(dim, 0) for dim, r in zip(dims, rows)]
    return [r.flatten(0, 1) for r in stacked]
