"""What an engine may ask of a place where clients live: named operations with plain values. See docs/protocol.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

# An operation, the values that it takes, and what each of them is (see wire.py; "?": or nothing). Whoever serves calls
# carries out these and nothing else.
OPERATIONS: dict[str, dict[str, str]] = {
    "hello": {},
    "moments": {"train": "rows", "centres": "tree"},
    "open": {"work": "opening", "params": "tree"},
    "move": {"train": "rows"},
    "template": {},
    "train": {
        "shared": "tree", "own": "tree?", "clients": "clients", "key": "number", "coming": "clients?",
        "rows": "clients?", "number": "number", "told": "tree",
    },
    "settle": {},
    "answer": {"what": "text", "told": "tree"},
    "secure": {"step": "text", "told": "by client"},
    "examine": {
        "shared": "tree", "own": "tree?", "clients": "clients", "support": "rows", "parts": "parts", "key": "number",
        "rows": "clients?", "by_row": "text",
    },
    "personal": {
        "shared": "tree", "own": "tree?", "client": "number", "support": "rows", "candidate": "number", "key": "number",
        "rows": "clients?",
    },
    "save_private": {"folder": "text", "name": "text", "only_dirty": "flag", "run": "text"},
    "load_private": {"folder": "text", "names": "texts", "share": "pair?", "point": "text"},
    "kept_layers": {"point": "text"},
    "describe": {"config": "plain", "learned": "plain?"},
    "score": {
        "shared": "tree", "own": "tree?", "clients": "clients", "name": "text", "key": "number", "rows": "clients?",
    },
    "statistics": {"told": "plain"},
    "keep": {"told": "plain"},
}  # fmt: skip
OF_SITES = frozenset({"describe", "score", "statistics", "keep"})  # carried out where scores stay (deploy/federated)


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
        if known.keys() != self.values.keys():
            raise ValueError(f"{self.operation} takes {sorted(known)}, and was given {sorted(self.values)}")


def serve(host: Any, call: Call) -> Any:
    """Carry out a call on a host: its methods are called as the operations are."""
    if call.settle is not None:
        host.settle(call.settle.key, call.settle.used)
    if call.operation == "settle":
        return None
    return getattr(host, call.operation)(**call.values)
