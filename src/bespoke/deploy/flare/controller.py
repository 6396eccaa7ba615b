"""The hub's part of a FLARE job: the training loop runs here, and its remotes are tasks addressed to named sites.

A job is a stretch of a run. It ends when the run is done or refused, or when too few sites are left; what became of it
stands in the run's folder (outcome.json), for whoever has submitted it.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from bespoke.deploy.federated.hub import Hub
from bespoke.deploy.federated.rules import plain_config
from bespoke.deploy.flare.check_period import set_check_period
from bespoke.deploy.flare.executor import MESSAGE, TASK, kit_of
from bespoke.deploy.flare.hardened import BY_BESPOKE
from bespoke.deploy.flare.job import AGAIN, EXPERIMENT, NOTES, OUTCOME, RUN
from bespoke.deploy.flare.project import is_name
from bespoke.errors import RemoteLost, UserError, WorkerFailed
from bespoke.federation.remote import Late
from bespoke.imported import trust_named
from bespoke.runs.events import Interrupted
from bespoke.storage import write_text

FETCHED = 30.0  # seconds within which a site that is there asks for its work
QUIET = 45.0  # seconds without a sign of life after which a site that works is gone
LATE = 3600.0  # seconds a site may work on one message, where nobody says otherwise
TICK = 0.02


class Again(Exception):
    """A site has come back: the next job takes it in."""


class SiteLine:
    """A transport to one site: each message is a task for this site alone."""

    def __init__(self, hub: HubController, name: str) -> None:
        self.hub, self.name = hub, name
        self.task: Task | None = None
        self.done = threading.Event()
        self.fetched = self.sent = 0.0
        self.late = False  # whether it was said that the answer is late
        self.reply: bytes | None = None

    def send(self, message: bytes) -> None:
        data = Shareable()
        data[MESSAGE] = message
        self.done, self.reply, self.fetched, self.late = threading.Event(), None, 0.0, False
        self.sent = time.monotonic()
        self.task = Task(TASK, data, timeout=0, after_task_sent_cb=self._fetched, result_received_cb=self._received)
        self.hub.send(self.task, self.hub.context, targets=[self.name])

    def _fetched(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        self.fetched = self.fetched or time.monotonic()

    def _received(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        found = client_task.result.get(MESSAGE) if client_task.result is not None else None
        if client_task.task is self.task:  # else an answer that came too late
            self.reply = found if isinstance(found, bytes) else None
            self.done.set()

    def receive(self) -> bytes:
        """The answer. A site that is late may be waited for once more, as long again."""
        begun = time.monotonic()
        while not self.done.wait(TICK):
            self.hub.check_abort()
            if gone := self._gone():
                raise self._lost(gone)
            if time.monotonic() - max(self.fetched or self.sent, begun) > self.hub.late:
                late = f"it is late: no answer within {self.hub.late:g} seconds"
                if self.late:
                    raise self._lost(f"{late}, twice")
                self.late = True
                raise Late(f"site {self.name}: {late}")
        if self.reply is None:
            raise self._lost("its answer holds no message")
        return self.reply

    def ready(self) -> bool:
        return self.done.is_set() or bool(self._gone())

    def _gone(self) -> str:
        """Why no answer will come, or nothing."""
        now = time.monotonic()
        if self.hub.dead(self.name):
            return "its job process has ended"
        if not self.fetched and now - self.sent > FETCHED:
            return f"it has not asked for work for {FETCHED:g} seconds"
        if self.fetched and now - max(self.hub.seen.get(self.name, 0.0), self.fetched) > QUIET:
            return f"it gave no sign of life for {QUIET:g} seconds"
        return ""

    def _lost(self, why: str) -> RemoteLost:
        assert self.task is not None
        self.hub.cancel_task(self.task)
        self.hub.away[self.name] = time.monotonic()
        return RemoteLost(f"site {self.name} is lost: {why}")

    def alive(self) -> bool:
        return self.name not in self.hub.away

    def close(self) -> None:
        pass


class HubController(Controller):  # type: ignore[misc]
    """Runs the experiment that lies in the hub's state under the name `run`, with the sites of this job."""

    def __init__(self, run: str, sites: list[str], late: float = LATE) -> None:
        super().__init__()
        self.run_name, self.sites, self.late = run, sites, late
        self.away: dict[str, float] = {}  # sites that were lost in this job, and when
        self.seen: dict[str, float] = {}  # when a site gave its last sign of life
        self.context: FLContext
        self.signal: Signal

    def start_controller(self, fl_ctx: FLContext) -> None:
        set_check_period(self)
        communicator, seen = self.communicator, self.seen
        heard = communicator.client_is_active

        def active(client_name: str, reason: str, context: FLContext) -> Any:
            seen[client_name] = time.monotonic()
            return heard(client_name, reason, context)

        communicator.client_is_active = active

    def stop_controller(self, fl_ctx: FLContext) -> None:
        pass

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.log_info(fl_ctx, f"an answer of site {client.name} came too late and is not used")

    def dead(self, name: str) -> bool:
        """Whether FLARE has reported that the site's job process has ended."""
        return name in getattr(self.communicator, "_dead_clients", {})

    def check_abort(self) -> None:
        if self.signal.triggered:
            raise Interrupted("the job was ended")

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        torch.set_num_threads(1)
        self.context, self.signal = fl_ctx, abort_signal
        kit = kit_of(fl_ctx)
        said = json.loads((kit / "local" / BY_BESPOKE).read_text(encoding="utf-8"))
        if not is_name(self.run_name):
            raise ValueError(f"{self.run_name!r} is no name of a run")
        folder = Path(said["state"]) / "runs" / self.run_name
        job = str(fl_ctx.get_job_id())
        found: dict[str, Any] = {}
        try:
            raw = json.loads((folder / EXPERIMENT).read_text(encoding="utf-8"))
            trust_named(raw["experiment"].get("model"))  # it was given to `deploy run`, on this machine
            hub = Hub(
                plain_config(raw["experiment"], raw["where"]), folder / RUN, tuple(said["sites"]), said["min_sites"],
                progress=Notes(folder / NOTES), stop=lambda: bool(abort_signal.triggered),
                after_round=lambda stage, number: self._again(folder),
            )  # fmt: skip
            hub.run(self._lines)
            found = {"done": True}
        except UserError as error:
            found = {"refused": str(error)}
        except Again:
            found = {"again": True}
        except (RemoteLost, Interrupted) as error:
            found = {"lost": str(error)}
        except WorkerFailed as error:
            found = {"failed": str(error)}
        except Exception as error:
            self.log_exception(fl_ctx, traceback.format_exc())
            found = {"failed": f"{type(error).__name__}: {error}"}
        write_text(folder / OUTCOME, json.dumps({"job": job, "away": sorted(self.away), **found}))

    def _lines(self) -> dict[str, SiteLine]:
        """Lines to the sites of this job that are not lost; raises if they have become too few for it."""
        self.check_abort()
        return {name: SiteLine(self, name) for name in self.sites if name not in self.away}

    def _again(self, folder: Path) -> None:
        if (folder / AGAIN).exists():
            (folder / AGAIN).unlink(missing_ok=True)
            raise Again


class Notes:
    """Progress of a run, as lines of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self._write({"begin": what, "total": total, "done": done})

    def advance(self, steps: int = 1, note: str = "") -> None:
        self._write({"advance": steps, "note": note})

    def note(self, text: str) -> None:
        self._write({"said": text})

    def _write(self, line: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
