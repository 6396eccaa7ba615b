"""Who belongs to the project: a part of the hub that refuses other sites, and notices two copies of a site's kit.

FLARE lets every site in whose certificate the project's authority has signed. The hub's list says who is still in the
project, and is read anew at every registration and sign of life: removing a site from local/bespoke.json shuts it out
without a restart.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import NotAuthenticated
from nvflare.apis.workspace import Workspace
from nvflare.private.defs import ClientType
from nvflare.widgets.widget import Widget

from bespoke.deploy.flare.hardened import BY_BESPOKE, HEARTBEAT

NOTICES = "notices.jsonl"  # in the kit: what people have to know, a line each
TWICE = "runs twice"
STRANGER = "is not in the project"


class Roster(Widget):  # type: ignore[misc]
    """Listens to registrations and signs of life at the hub."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, float] = {}  # when a notice was last written

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.CLIENT_REGISTER_RECEIVED:
            name, kind = _peer(fl_ctx), fl_ctx.get_prop(FLContextKey.CLIENT_TYPE)
            if kind == ClientType.ADMIN:  # may log in; FLARE goes by the role in the certificate
                return
            if kind != ClientType.REGULAR or name not in self._sites(fl_ctx):
                self._tell(fl_ctx, name, STRANGER, "its certificate is of the project's authority, but the hub's list "
                           "does not name it: refused")  # fmt: skip
                raise NotAuthenticated(f"the site {name!r} {STRANGER}")
        elif event_type in (EventType.CLIENT_REGISTER_PROCESSED, EventType.CLIENT_HEARTBEAT_PROCESSED):
            self._shut_out(fl_ctx)
        if event_type == EventType.CLIENT_HEARTBEAT_PROCESSED:
            refused = fl_ctx.get_prop(FLContextKey.COMMUNICATION_ERROR) or ""
            if "already registered" in refused:
                self._tell(fl_ctx, _peer(fl_ctx), TWICE, "a second process with its certificate has taken its place; "
                           "stop one of them. The first is taken back when the second has ended")  # fmt: skip

    def _shut_out(self, fl_ctx: FLContext) -> None:
        """Removes every site that is registered under a name that the list does not hold, whatever it called itself in
        the request: the name here is the certificate's."""
        clients = fl_ctx.get_engine().server.client_manager
        listed = self._sites(fl_ctx)
        for client in list(clients.get_clients().values()):
            if client.name not in listed:
                clients.disable_client(client.name)
                self._tell(fl_ctx, client.name, STRANGER, "shut out")
                fl_ctx.set_prop(FLContextKey.UNAUTHENTICATED, f"{client.name!r} {STRANGER}", sticky=False)
        for name in listed:  # taken into the list again
            if clients.is_client_disabled(name):
                clients.enable_client(name)

    def _sites(self, fl_ctx: FLContext) -> list[str]:
        sites: list[str] = json.loads((_kit(fl_ctx) / "local" / BY_BESPOKE).read_text(encoding="utf-8"))["sites"]
        return sites

    def _tell(self, fl_ctx: FLContext, name: str, what: str, more: str) -> None:
        """Writes a line into the log and into the notices, at most one a heartbeat."""
        now = time.time()
        if now - self.told.get(f"{name} {what}", 0) < HEARTBEAT / 2:
            return
        self.told[f"{name} {what}"] = now
        self.log_error(fl_ctx, f"the site {name!r} {what}: {more}", fire_event=False)
        line = {"time": round(now, 3), "site": name, "what": what, "more": more}
        with open(_kit(fl_ctx) / NOTICES, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


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


def _kit(fl_ctx: FLContext) -> Path:
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    assert isinstance(workspace, Workspace)
    return Path(workspace.get_root_dir())
