"""Compression of messages: largest entries only, eight bits, or both; the error is added to the next message.

Top-k (Aji and Heafield 2017; error feedback: Stich et al. 2018, Karimireddy et al. 2019) sends the k largest entries of
each leaf with their places. The rest stays on the client and is added to its next message. This memory is as private as
the method's own state. Eight bits: entries become integers from -127 to 127 in units of the leaf's largest over 127,
rounded to the nearest or, without bias, up or down at random (Alistarh et al. 2017, QSGD).

Messages are really encoded and decoded, and the counted bytes are those of the encoded form. Small fields (a weight, a
count) and buffers are not compressed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.messages.transform import Outgoing, Transform
from bespoke.randomness import Word, mix, uniform
from bespoke.tensors import Params, Tree, flatten, is_buffer, named_map, nbytes, unflatten


@dataclass(frozen=True)
class Compress(Transform):
    """Send the largest `keep` (a fraction) of each leaf's entries, in eight bits if `rounding` says how to round."""

    keep: float | None = None
    rounding: Literal["stochastic", "nearest"] | None = None
    least: int = 16  # leaves with fewer entries are not compressed

    needs = ("delta",)

    @property
    def title(self) -> str:  # type: ignore[override]
        return "transform.quantize" if self.keep is None else "transform.top_k"

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.keep is not None

    def memory(self, up: Tree) -> Tree:
        if not self.remembers:
            return {}
        acted = {name: leaf for name, leaf in flatten(up).items() if self._acts_on(leaf) and not is_buffer(name)}
        wide = {name: torch.zeros_like(leaf) for name, leaf in acted.items()}
        return {"error": unflatten(wide)}

    def _acts_on(self, leaf: Tensor) -> bool:
        return leaf.is_floating_point() and leaf.dim() > 0 and leaf.numel() >= self.least

    def client(self, sent: Outgoing) -> Outgoing:
        errors, unsent = flatten(sent.memory.get("error", {})), Params()
        total = sent.nbytes

        def received(name: str, leaf: Tensor) -> Tensor:
            nonlocal total
            if is_buffer(name) or not self._acts_on(leaf[0]):
                return leaf
            wanted = leaf + errors[name] if name in errors else leaf
            wire = self.encode(wanted.flatten(1), (sent.key, name), sent.clients)
            whole = self.decode(wire, leaf[0].numel()).reshape(leaf.shape).to(leaf.dtype)
            unsent[name] = wanted - whole
            total += nbytes(wire) - nbytes(leaf)
            return whole

        up = named_map(received, sent.up)
        kept = {"error": unflatten(unsent)} if self.remembers else sent.memory
        return replace(sent, up=up, nbytes=total, memory=kept)

    # -- the encoded form: rows are clients --------------------------------------------------------------------------
    def encode(self, rows: Tensor, words: tuple[Word, ...], clients: NDArray[np.uint64]) -> Params:
        """The encoded rows: values, their places if some are left out, and their unit if they are integers."""
        wire: Params = {"values": rows}
        if self.keep is not None:
            kept = max(1, math.ceil(self.keep * rows.shape[1]))
            places = rows.abs().topk(kept, dim=1).indices.sort(dim=1).values
            # a place in a leaf of up to 65,536 entries fits in two bytes
            wire = {"values": rows.gather(1, places), "places": places.to(_index_type(rows.shape[1]))}
        if self.rounding is not None:
            unit = wire["values"].abs().amax(1) / 127
            whole = wire["values"] / torch.where(unit > 0, unit, torch.ones_like(unit))[:, None]
            if self.rounding == "stochastic":
                entries = mix(clients[:, None], np.arange(whole.shape[1], dtype=np.uint64)[None, :])
                drawn = torch.from_numpy(uniform("rounding", *words, entries))
                whole = (whole + drawn.to(whole.device)).floor()
            wire |= {"values": whole.round().clamp(-127, 127).to(torch.int8), "unit": unit}
        return wire

    def decode(self, wire: Params, width: int) -> Tensor:
        values = wire["values"]
        if "unit" in wire:
            values = values.to(wire["unit"].dtype) * wire["unit"][:, None]
        if "places" not in wire:
            return values
        return torch.zeros(len(values), width, dtype=values.dtype).scatter(1, _places_of(wire["places"]), values)


def _index_type(width: int) -> torch.dtype:
    return torch.int16 if width <= 2**16 else torch.int32


def _places_of(places: Tensor) -> Tensor:
    """Places as indices: sixteen bits hold them without a sign."""
    return places.long() & 0xFFFF if places.dtype == torch.int16 else places.long()
