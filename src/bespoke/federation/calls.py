"""What an engine may ask of a place where clients live: named operations with plain values. See docs/protocol.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

# An operation and the values that it takes, by name. Whoever serves calls executes these and nothing else.
OPERATIONS: dict[str, frozenset[str]] = {
    "hello": frozenset(),
    "open": frozenset({"work", "params"}),
    "move": frozenset({"train"}),
    "template": frozenset(),
    "train": frozenset({"shared", "own", "clients", "key", "coming", "rows", "number", "told"}),
    "settle": frozenset(),
    "answer": frozenset({"what", "told"}),
    "secure": frozenset({"step", "told"}),
    "examine": frozenset({"shared", "own", "clients", "support", "parts", "key", "rows", "by_row"}),
    "personal": frozenset({"shared", "own", "client", "support", "candidate", "key", "rows"}),
    "save_private": frozenset({"folder", "name", "only_dirty", "run"}),
    "load_private": frozenset({"folder", "names", "share", "point"}),
    "kept_layers": frozenset({"point"}),
}


@dataclass(frozen=True)
class Settle:
    """What became of a round: the private state that it made is kept, of all its clients or of those in `used`.

    An empty `used` says that the round did not happen. Said again, it changes nothing.
    """

    key: int  # the round's
    used: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Call:
    """An operation with its values; `settle` is carried out before it."""

    operation: str
    values: dict[str, Any] = field(default_factory=dict)
    settle: Settle | None = None

    def __post_init__(self) -> None:
        known = OPERATIONS.get(self.operation)
        if known is None:
            raise ValueError(f"no operation is called {self.operation!r}; known: {', '.join(OPERATIONS)}")
        if known != self.values.keys():
            raise ValueError(f"{self.operation} takes {sorted(known)}, and was given {sorted(self.values)}")


def serve(host: Any, call: Call) -> Any:
    """Carry out a call on a host: its methods are called as the operations are."""
    if call.settle is not None:
        host.settle(call.settle.key, call.settle.used)
    if call.operation == "settle":
        return None
    return getattr(host, call.operation)(**call.values)
