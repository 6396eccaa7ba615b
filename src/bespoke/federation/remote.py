"""Remotes: the places where clients live, as an engine sees them. They differ in transport alone."""

from __future__ import annotations

from typing import Any, Protocol

from bespoke.errors import RemoteLost
from bespoke.federation.calls import Call, serve
from bespoke.federation.host import Host


class Late(RemoteLost):
    """A place that is there has not answered in time. Its answer is still to come: `finish` waits for it again."""


class Remote(Protocol):
    """A place with a host. It has one call at a time: `start` sends it, `finish` waits for its answer.

    `finish` raises UserError (the host refused), WorkerFailed (the host failed), RemoteLost (the host is gone, with the
    state of its clients) or Late. `start` may raise RemoteLost too.
    """

    @property
    def name(self) -> str: ...  # for messages to the user: "worker 1 of 4"
    def start(self, call: Call) -> None: ...
    def finish(self) -> Any: ...
    def alive(self) -> bool: ...
    def close(self) -> None: ...


class Here:
    """Clients that live in this process. `finish` executes the call."""

    name = "this process"

    def __init__(self, host: Host) -> None:
        self.host = host
        self.call: Call | None = None

    def start(self, call: Call) -> None:
        self.call = call

    def finish(self) -> Any:
        call, self.call = self.call, None
        assert call is not None, "nothing was asked"
        return serve(self.host, call)

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        pass
