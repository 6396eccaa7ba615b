"""A stage in plain values, for a host on another machine, which makes the same work from its own rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from bespoke.plain import JsonObject, Named, TomlTable
from bespoke.tensors import Tree


@dataclass(frozen=True)
class Opening:
    """Everything that a host needs to know of a stage, except its initial parameters, which travel beside it."""

    config: TomlTable  # of the experiment, as JSON; the receiver checks it again
    stage: int
    noise: Named | None = None  # values of the privacy transform, as the account chose them
    sample: Tree = field(default_factory=dict)  # what a client receives in a first round, all zeros
    learned: JsonObject | None = None  # means and deviations of all places' rows, by column
