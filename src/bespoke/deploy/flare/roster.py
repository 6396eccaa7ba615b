"""Who belongs to the project: a part of the hub that refuses other sites, and notices two copies of a site's kit.

FLARE lets every site in whose certificate the project's authority has signed. The hub's list says who is still in the
project, and is read anew at every registration and sign of life: removing a site from local/bespoke.json shuts it out
without a restart.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import NotAuthenticated
from nvflare.private.defs import ClientType
from nvflare.widgets.widget import Widget

from bespoke.deploy.flare.hardened import BY_BESPOKE, HEARTBEAT

NOTICES = "notices.jsonl"  # in the kit: what people have to know, a line each
STRANGER = "is not in the project"
TWICE = "runs twice"
COPIES = (
    "two processes have its certificate and close each other's connection. If the site has made no copy of its kit, "
    "somebody has its key: take the site off the list. When one of them ends, the other is taken back by itself"
)


class Roster(Widget):  # type: ignore[misc]
    """Listens to registrations, signs of life and connections at the hub. FLARE starts it in the folder of the kit."""

    def __init__(self) -> None:
        super().__init__()
        self.kit = Path.cwd()
        self.told: dict[tuple[str, str], float] = {}  # when a notice was last written
        self.replaced: dict[str, float] = {}  # when a site's open connection was last closed for a new one
        logging.getLogger("nvflare.fuel.f3.sfm.sfm_endpoint").addHandler(_Replacements(self.on_replaced))

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type in (EventType.CLIENT_REGISTER_RECEIVED, EventType.CLIENT_HEARTBEAT_RECEIVED):
            self._let_in_again(fl_ctx)
        if event_type == EventType.CLIENT_REGISTER_RECEIVED:
            self._refuse_stranger(fl_ctx)
        elif event_type in (EventType.CLIENT_REGISTER_PROCESSED, EventType.CLIENT_HEARTBEAT_PROCESSED):
            self._shut_out(fl_ctx)
            if "already registered" in (fl_ctx.get_prop(FLContextKey.COMMUNICATION_ERROR) or ""):
                self._tell(_peer(fl_ctx), TWICE, COPIES)

    def on_replaced(self, name: str) -> None:
        """FLARE keeps one connection for each name, so two copies of a kit close each other's again and again.

        A site that is started again closes none, and one whose network fails closes one in a while.
        """
        now = time.monotonic()
        if now - self.replaced.get(name, -HEARTBEAT * 4) < HEARTBEAT * 3:
            self._tell(name, TWICE, COPIES)
        self.replaced[name] = now

    def _refuse_stranger(self, fl_ctx: FLContext) -> None:
        """Refuses by the name in the request, so that FLARE's log has a clear line; `_shut_out` is what protects."""
        name, kind = _peer(fl_ctx), fl_ctx.get_prop(FLContextKey.CLIENT_TYPE)
        if kind == ClientType.ADMIN:  # may log in; FLARE goes by the role in the certificate
            return
        if kind != ClientType.REGULAR or name not in self._sites():
            self._tell(name, STRANGER, "the authority has signed its certificate, but the hub's list does not name it")
            raise NotAuthenticated(f"the site {name!r} {STRANGER}")

    def _shut_out(self, fl_ctx: FLContext) -> None:
        """Removes every site that is registered under a name that the list does not hold, whatever it called itself in
        the request: the name here is the certificate's."""
        clients = fl_ctx.get_engine().server.client_manager
        listed = self._sites()
        for client in list(clients.get_clients().values()):
            if client.name not in listed:
                clients.disable_client(client.name)
                self._tell(client.name, STRANGER, "the hub's list does not name it any more: shut out")
                fl_ctx.set_prop(FLContextKey.UNAUTHENTICATED, f"{client.name!r} {STRANGER}", sticky=False)

    def _let_in_again(self, fl_ctx: FLContext) -> None:
        """Takes back the sites that were shut out and stand on the list again, before FLARE looks at who it is."""
        clients = fl_ctx.get_engine().server.client_manager
        for name in self._sites():
            if clients.is_client_disabled(name):
                clients.enable_client(name)

    def _sites(self) -> list[str]:
        sites: list[str] = json.loads((self.kit / "local" / BY_BESPOKE).read_text(encoding="utf-8"))["sites"]
        return sites

    def _tell(self, name: str, what: str, more: str) -> None:
        """Writes a line into the log and into the notices, at most one a heartbeat."""
        now = time.time()
        if now - self.told.get((name, what), 0) < HEARTBEAT:
            return
        self.told[name, what] = now
        self.logger.error(f"the site {name!r} {what}: {more}")
        line = {"time": round(now, 3), "site": name, "what": what, "more": more}
        with open(self.kit / NOTICES, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class _Replacements(logging.Handler):
    """Hears when FLARE closes an open connection because a new one has come under the same name."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r" is evicted for \S+ from endpoint ([\w-]+)", record.getMessage()):
            self.tell(found[1])


def notices(kit: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """What the hub has noticed since a time: sites that run twice, sites that are not in the project."""
    path = kit / NOTICES
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return [line for line in lines if line["time"] >= since]


def _peer(fl_ctx: FLContext) -> str:
    """What the other side calls itself; FLARE compares it with the certificate later."""
    peer = fl_ctx.get_peer_context()
    return str(peer.get_identity_name() or "") if peer else ""
