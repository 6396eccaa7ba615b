"""The operations that an engine may call at a place where clients live. See docs/protocol.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

# By operation: its values, and the kind of each (see wire.py; "?": or None). A server of calls executes these and
# nothing else.
OPERATIONS: dict[str, dict[str, str]] = {
    "hello": {},
    "moments": {"train": "rows", "centres": "tree"},
    "open": {"work": "opening", "params": "tree"},
    "move": {"train": "rows"},
    "template": {},
    "train": {
        "shared": "tree", "own": "tree?", "clients": "clients", "key": "number", "next_clients": "clients?",
        "rows": "clients?", "number": "number", "transform_state": "tree",
    },
    "settle": {},
    "answer": {"question": "text", "inputs": "tree"},
    "secure": {"step": "text", "messages": "by client"},
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
    "statistics": {"request": "plain"},
    "keep": {"request": "plain"},
}  # fmt: skip
OF_SITES = frozenset({"describe", "score", "statistics", "keep"})  # carried out where scores stay (deploy/federated)


@dataclass(frozen=True)
class Settle:
    """Keeps the private state of a round, of all its clients or of those in `used`; discards the rest.

    An empty `used` discards the whole round. A repeated settle changes nothing.
    """

    key: int  # the round's
    used: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Call:
    """An operation with its values; `settle` is executed before it."""

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
    """Executes a call on a host, whose methods have the names of the operations."""
    if call.settle is not None:
        host.settle(call.settle.key, call.settle.used)
    if call.operation == "settle":
        return None
    return getattr(host, call.operation)(**call.values)
