"""A stage in plain values, for a host on another machine: it makes the same work of rows of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bespoke.tensors import Tree


@dataclass(frozen=True)
class Opening:
    """What a host needs to know of a stage; the parameters it starts from travel beside it."""

    config: dict[str, Any]  # of the experiment, as JSON has it: typed and checked again where it arrives
    stage: int
    noise: dict[str, Any] | None = None  # of [privacy], as the account has settled it: the values of its transform
    sample: Tree = field(default_factory=dict)  # what a client is sent in a first round, all zeros
    learned: dict[str, Any] | None = None  # means and deviations of all places' rows, by column
