"""The site's part of a FLARE job: bytes come as a task, are answered with bytes, and nothing else happens.

It is the only class that a site's allow-list names. What it carries out is decided by the site's own rules.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from cryptography import x509
from filelock import FileLock
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace

from bespoke.deploy.federated.guarded import GuardedSite
from bespoke.deploy.federated.identities import Papers
from bespoke.deploy.federated.place import SiteHost
from bespoke.deploy.federated.rules import Rules
from bespoke.deploy.flare.hardened import BY_BESPOKE
from bespoke.deploy.flare.keys import read_key
from bespoke.deploy.flare.rows import load_rows
from bespoke.errors import RemoteLost
from bespoke.federation.wire import encode_answer

TASK = "bespoke"  # the only task there is
MESSAGE = "message"  # the key of the bytes, in both directions
SENT = "sent.jsonl"  # in the site's state: a line for everything that it sent
WAIT = 20.0  # seconds for the process of an earlier job to end, which holds the same files


class SiteExecutor(Executor):  # type: ignore[misc]
    """Holds the site and hands it messages."""

    def __init__(self) -> None:
        super().__init__()
        self.site: GuardedSite | None = None
        self.lock: FileLock | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        message = shareable.get(MESSAGE)
        if task_name != TASK or not isinstance(message, bytes):
            return make_reply(ReturnCode.BAD_TASK_DATA)
        reply = make_reply(ReturnCode.OK)
        try:
            if self.site is None:
                self.site = self._opened(fl_ctx)
            reply[MESSAGE] = self.site.answer(message)
        except Exception as error:  # a code of FLARE's would end the job for all sites
            self._failed(error, fl_ctx)
            reply[MESSAGE] = encode_answer(
                "", RemoteLost(f"the site cannot answer ({type(error).__name__}); see its log")
            )
        return reply

    def _opened(self, fl_ctx: FLContext) -> GuardedSite:
        torch.set_num_threads(1)
        kit = kit_of(fl_ctx)
        said = json.loads((kit / "local" / BY_BESPOKE).read_text(encoding="utf-8"))
        state = Path(said["state"])
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.lock = FileLock(state / ".lock", timeout=WAIT)
        self.lock.acquire()
        host = SiteHost(load_rows(said), state, rules_of(said), papers=papers_of(kit, said))
        return GuardedSite(host, state / SENT, failed=lambda error: self._failed(error, fl_ctx))

    def _failed(self, error: BaseException, fl_ctx: FLContext) -> None:
        self.log_exception(fl_ctx, f"{type(error).__name__}: {error}")


def papers_of(kit: Path, said: dict[str, Any]) -> Papers:
    """The site's key and certificate, the authority's, and the sites that were agreed on."""
    startup = kit / "startup"
    own, root = (x509.load_pem_x509_certificate((startup / name).read_bytes()) for name in ("client.crt", "rootCA.pem"))
    return Papers(read_key(startup / "client.key"), own, root, said.get("peers"))


def rules_of(said: dict[str, Any]) -> Rules:
    """A site's rules, as its local/bespoke.json has them."""
    methods = said.get("methods")
    return Rules(
        least=said["least"], epsilon=said.get("epsilon"), delta=said.get("delta"),
        methods=None if methods is None else tuple(methods), share_clients=bool(said.get("share_clients", False)),
        evaluate=bool(said.get("evaluate", True)), models=tuple(said.get("models") or ()),
    )  # fmt: skip


def kit_of(fl_ctx: FLContext) -> Path:
    """The folder from which this process was started."""
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    assert isinstance(workspace, Workspace)
    return Path(workspace.get_root_dir())
