"""A site behind a wire that keeps its own rules, and a log of everything it sends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bespoke.deploy.federated.place import SiteHost
from bespoke.deploy.federated.rules import OPERATIONS_OF_SITES
from bespoke.federation.calls import Call
from bespoke.federation.partial import Partial
from bespoke.federation.roster import Roster
from bespoke.federation.site import Site
from bespoke.federation.wire import LIMIT
from bespoke.tensors import flatten


class GuardedSite(Site):
    """Answers a hub's messages. Each answer is in the log before it is handed to the transport."""

    host: SiteHost

    def __init__(
        self, host: SiteHost, log: Path, limit: int = LIMIT, failed: Callable[[BaseException], None] = lambda _: None
    ) -> None:
        super().__init__(host, host.work_of, limit, OPERATIONS_OF_SITES, failed)
        self.log = log
        self.said: dict[str, Any] = {}  # of the answer that is being made, for the log
        self.said_last: dict[str, Any] = {}

    def answer(self, message: bytes) -> bytes:
        self.said = {"operation": "?", "refused": True}
        before = self.last
        reply = super().answer(message)
        if self.last is before and before is not None and reply is before[1]:
            self.said = {**self.said_last, "again": True}  # an answer that was lost on its way: the same bytes
        self.said_last = self.said
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), **self.said, "heard": len(message), "sent": len(reply)}
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return reply

    def carry_out(self, call: Call) -> Any:
        self.said = {"operation": call.operation, "refused": True}
        found = super().carry_out(call)
        self.said = {"operation": call.operation, **_asked(call), **_said(found)}
        return found


def _asked(call: Call) -> dict[str, Any]:
    request: Any = call.values.get("request")
    if call.operation in ("statistics", "keep"):
        return {"what": request.get("what", ""), "of": request.get("of", "")}
    return {name: call.values[name] for name in ("number", "step", "name") if name in call.values}


def _said(found: Any) -> dict[str, Any]:
    """What an answer holds, in words: names, shapes and numbers of clients, never values."""
    if isinstance(found, Partial):
        clients = len(found.clients)
        return {"clients": clients, "sums": _shapes(found.sums or {}), "each": _shapes(found.each)}
    if isinstance(found, Roster):
        return {"clients": len(found), "holds": ["ids", "sizes", "groups"]}
    if isinstance(found, tuple):  # of secure sums
        return {
            "clients": len(found[0]),
            "masked": sum(len(each) for each in found[0].values() if isinstance(each, bytes)),
        }
    if isinstance(found, dict):
        leaves = list(flatten(found).values()) if _tensors(found) else []
        return {"sums": _shapes(found)} if leaves else {"holds": sorted(map(str, found))}
    return {}


def _tensors(tree: Any) -> bool:
    return bool(tree) and all(
        _tensors(v) if isinstance(v, dict) else isinstance(v, torch.Tensor) for v in tree.values()
    )


def _shapes(tree: dict[str, Any]) -> dict[str, list[int]]:
    return {name: list(np.shape(leaf)) for name, leaf in flatten(tree).items()} if tree else {}


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a site's log; one that was cut off by a kill is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
