"""A frozen language model with low-rank adapters; only the adapters are learned (Hu et al., LoRA, ICLR 2022).

The package peft inserts them: a layer's weight W becomes W + alpha / rank B A. All clients share the process's copy of
the frozen weights; adapters are parameters, so every client may have its own. B starts as zeros, so the model starts
as the pretrained one.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke import pretrained
from bespoke.errors import UserError
from bespoke.models.fast.token_loss import head_judged, head_loss
from bespoke.models.frozen import NOTHING, FrozenLM, buckets
from bespoke.models.language import ITEMS
from bespoke.models.prefix import PrefixLM
from bespoke.models.scores import cut, joined
from bespoke.tensors import Params

ENDING = ".default.weight"  # of a parameter that peft calls its adapter's


@dataclass(frozen=True)
class LoraLM(FrozenLM):
    """A pretrained model by name; its parameters are adapters of the layers that peft adapts in such a model."""

    rank: int = 8
    alpha: float = 16.0

    vectorizes = False

    def init(self, seed: int) -> Params:
        """A as a linear layer begins, B zeros: as peft has it."""
        generator, found = torch.Generator().manual_seed(seed), {}
        for name, leaf in self._adapted().named_parameters():
            if name.endswith(f"lora_A{ENDING}"):
                drawn = torch.rand(leaf.shape, generator=generator)
                found[name.removesuffix(ENDING)] = (2 * drawn - 1) / leaf.shape[1] ** 0.5
            elif name.endswith(f"lora_B{ENDING}"):
                found[name.removesuffix(ENDING)] = torch.zeros(leaf.shape)
        return found

    def fresh(self, seed: int) -> Params:
        return self.init(seed)

    def _adapted(self) -> Any:
        return _adapted(self.pretrained, self.rank, self.alpha, pretrained.working_device())

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return self.logits(self.features(params, x))

    def features(self, params: Params, x: Tensor) -> Tensor:
        """The representation before the last layer at each token; without adapters, that of the frozen model."""
        body = self._adapted()
        given = {f"{name}{ENDING}": leaf for name, leaf in params.items() if "lora_" in name}
        words = F.embedding(x.long(), pretrained.language_model(self.pretrained).get_input_embeddings().weight)
        seen = torch.func.functional_call(body, given, kwargs={"inputs_embeds": words, "use_cache": False})
        states: Tensor = seen.last_hidden_state
        return states


@dataclass(frozen=True)
class AdapterLM(PrefixLM):
    """The next token of texts by a model with adapters; contexts are not distinguished."""

    network: LoraLM

    batches_clients = False

    def loss(self, params: Params, batch: Params) -> Tensor:
        targets, (head, bias), total = self._targets(batch), self.network.layer(), torch.zeros(())
        for rows, long in buckets(targets):
            here = targets[rows, :long]
            counted = here != NOTHING
            seen, words = self.network.features(params, batch["x"][rows, :long])[counted], here[counted]
            total = total + head_loss(seen, head, bias, words, torch.ones(len(words)))
        return self._penalized(total / self._tokens(batch).sum().clamp(min=1.0), params)

    def features(self, params: Params, batch: Params) -> Tensor:
        return self.network.features(params, batch["x"])

    @torch.no_grad()
    def seen(self, params: Params, batch: Params, targets: Tensor) -> Tensor:
        found = torch.zeros(*targets.shape, self.network.width)
        for rows, long in buckets(targets):
            found[rows, :long] = self.network.features(params, batch["x"][rows, :long])
        return found

    def judged(self, params: Params, rows: Params) -> Params:
        pieces = []
        for block in cut(rows, ITEMS // rows["x"].shape[-1]):
            targets = self._targets(self.scored_rows(block))
            scores, counted = torch.zeros(*targets.shape, 2), targets != NOTHING
            seen = self.seen(params, block, targets)[counted]
            scores[counted] = head_judged(seen, *self.network.layer(), targets[counted]).mT
            pieces.append({"losses": scores[..., 0], "right": scores[..., 1]})
        return joined(pieces)


@cache
def _adapted(name: str, rank: int, alpha: float, device: str) -> Any:
    """The model below its last layer with adapters put in, beside the plain one; both have the same frozen tensors."""
    try:
        import peft
    except ImportError:
        raise UserError("adapt = 'lora' needs the package peft: pip install 'bespoke-fl[lora]'") from None
    plain = pretrained.language_model(name)
    model = copy.deepcopy(plain, {id(leaf): leaf for leaf in (*plain.parameters(), *plain.buffers())})
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers that store their weight turned, which peft handles
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise UserError(f"peft knows no layers of {name!r} to adapt ({str(error).splitlines()[0]})") from None
    return model.eval().requires_grad_(False).base_model
