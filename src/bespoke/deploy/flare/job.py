"""Makes the job of a run, submits it as the administrator, watches it, and submits it again until the run is done.

A job of FLARE ends with its processes, whatever ended them: a power cut, a kill, a lost network. The run does not: the
next job goes on from the hub's last checkpoint, with the sites that are registered then.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bespoke.deploy.federated.agreement import Agreement, hub_config
from bespoke.deploy.federated.hub import LEGS
from bespoke.deploy.federated.repeated import newest_checkpoint, unfinished
from bespoke.deploy.flare.check_period import TASK_REQUEST_INTERVAL
from bespoke.deploy.flare.hardened import BY_BESPOKE, CONTROLLER, EXECUTOR
from bespoke.deploy.flare.project import is_name
from bespoke.deploy.flare.running import session, sites_of
from bespoke.errors import RemoteLost, UserError
from bespoke.experiment.build import resolved
from bespoke.experiment.config import ExperimentConfig
from bespoke.records import RunRecord
from bespoke.runs.events import Interrupted, Progress, Silent
from bespoke.runs.folder import RunFolder
from bespoke.storage import write_text

EXPERIMENT, OUTCOME, AGAIN, RUN, NOTES = "experiment.json", "outcome.json", "again", "run", "notes.jsonl"
TASK = "bespoke"
ENDED = ("FINISHED", "ABORTED", "FAILED")  # how FLARE calls the state of a job that runs no more
BACK = 15.0  # seconds after a loss before the job is ended to take a site in again
POLL = 0.5
MOST_JOBS = 5  # without a new checkpoint in between


def write_job(folder: Path, name: str, sites: list[str], late: float) -> Path:
    """A job as a folder: settings alone, no code, addressed to named sites."""
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    meta = {
        "name": f"bespoke-{name}", "resource_spec": {}, "min_clients": 1, "deploy_map": {"app": ["server", *sites]},
    }  # fmt: skip
    hub = {
        "format_version": 2, "server": {"task_request_interval": TASK_REQUEST_INTERVAL},
        "workflows": [{"id": "hub", "path": CONTROLLER, "args": {"run": name, "sites": sites, "late": late}}],
        "components": [], "task_data_filters": [], "task_result_filters": [],
    }  # fmt: skip
    site = {
        "format_version": 2, "executors": [{"tasks": [TASK], "executor": {"path": EXECUTOR, "args": {}}}],
        "components": [], "task_data_filters": [], "task_result_filters": [],
    }  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta))
    (config / "config_fed_server.json").write_text(json.dumps(hub))
    (config / "config_fed_client.json").write_text(json.dumps(site))
    return folder


@dataclass
class Federation:
    """A run on a hub whose process and sites are started by others."""

    kit: Path  # of the hub
    config: ExperimentConfig
    name: str  # of the run, in the hub's state
    progress: Progress = field(default_factory=Silent)
    stop: Callable[[], bool] = lambda: False
    late: float = 3600.0  # seconds a site may work on one message
    patience: float = 600.0  # seconds to wait for enough sites, or for the hub
    after_submit: Callable[[str], None] = lambda job: None

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise UserError(f"{self.name!r} cannot be the name of a run: letters, digits, - and _")
        said = json.loads((self.kit / "local" / BY_BESPOKE).read_text(encoding="utf-8"))
        self.expected: list[str] = said["sites"]
        self.min_sites: int = said["min_sites"]
        self.folder = Path(said["state"]) / "runs" / self.name
        self.heard = 0  # lines of the notes

    @property
    def run_folder(self) -> Path:
        return self.folder / RUN

    def run(self) -> RunRecord:
        """Submit jobs until the run is done; Interrupted if `stop` says so, UserError if hub or sites refuse it."""
        self._begin()
        fruitless, point = 0, self._point()
        while True:
            done = self._result()
            if done is not None:
                return done
            outcome = self._job()
            self._say()
            if "refused" in outcome:
                raise UserError(outcome["refused"])
            if "failed" in outcome:
                raise RemoteLost(f"the hub's job failed: {outcome['failed']}; the hub's log says more")
            fruitless, point = (0, self._point()) if self._point() != point else (fruitless + 1, point)
            if fruitless >= MOST_JOBS:
                raise RemoteLost(
                    f"{fruitless} jobs in a row have made no progress; last: {outcome.get('lost', outcome)}"
                )

    def _begin(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / EXPERIMENT
        asked = json.dumps({"experiment": resolved(hub_config(self.config)), "where": "the experiment"})
        if path.exists() and path.read_text(encoding="utf-8") != asked:
            raise UserError(f"{self.folder} holds another experiment of this name; choose another with --name")
        write_text(path, asked)
        notes = self.folder / NOTES
        self.heard = len(notes.read_text(encoding="utf-8").splitlines()) if notes.exists() else 0

    def _result(self) -> RunRecord | None:
        return RunFolder(self.run_folder).result() if (self.run_folder / "result.json").exists() else None

    def _point(self) -> str:
        return newest_checkpoint(self.run_folder)

    # -- one job -----------------------------------------------------------------------------------------------------
    def _job(self) -> dict[str, Any]:
        """Submit a job with the sites that are there, and wait until it ends; returns its outcome."""
        for left in (OUTCOME, AGAIN):
            (self.folder / left).unlink(missing_ok=True)
        since, waiting = time.monotonic(), ""
        while True:
            try:
                with session(self.kit) as admin:
                    sites = self._gathered(admin)
                    job = self._submitted(admin, sites)
                    self.after_submit(job)
                    return self._watched(admin, job, sites)
            except (UserError, Interrupted):
                raise
            except Exception as error:  # of many kinds: the hub is away, or goes away meanwhile
                found = self._outcome()
                if found:
                    return found
                if self.stop():
                    raise Interrupted("stopped; the same command goes on") from None
                if time.monotonic() - since > self.patience:
                    raise UserError(f"the hub cannot be reached ({error}); start it with: bespoke deploy hub") from None
                if not waiting:
                    waiting = f"the hub cannot be reached ({type(error).__name__}); trying again"
                    self.progress.note(waiting)
                time.sleep(1.0)

    def _gathered(self, admin: Any) -> list[str]:
        """The sites that are registered, once they are enough."""
        since, told = time.monotonic(), False
        agreed = Agreement.read(self.run_folder)
        wanted = list(agreed.names) if agreed else self.expected
        least = len(wanted) if agreed and unfinished(self.run_folder) else self.min_sites
        while True:
            there = [name for name in sites_of(admin) if name in self.expected]
            mine = [name for name in there if name in wanted]
            waited = time.monotonic() - since
            if len(mine) == len(wanted) or (len(mine) >= least and waited > (BACK if agreed is None else 2.0)):
                return mine
            if self.stop():
                raise Interrupted("stopped; the same command goes on")
            if waited > self.patience:
                raise UserError(
                    f"{len(mine)} of {len(wanted)} sites are there ({', '.join(mine) or 'none'}), and {least} are "
                    f"needed; start the others with: bespoke deploy site"
                )
            if not told and waited > 3:
                told = True
                self.progress.note(f"waiting for sites: {', '.join(mine) or 'none'} of {', '.join(wanted)} are there")
            time.sleep(POLL)

    def _submitted(self, admin: Any, sites: list[str]) -> str:
        folder = Path(tempfile.mkdtemp(prefix=".job-", dir=self.folder))
        try:
            return str(admin.submit_job(str(write_job(folder / "job", self.name, sites, self.late))))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _watched(self, admin: Any, job: str, sites: list[str]) -> dict[str, Any]:
        """Wait for the job's end; ask for the next one when a site has come back."""
        looked = time.monotonic()
        while True:
            self._say()
            found = self._outcome(job)
            if found and self._ended(admin, job):
                return found
            if self.stop():
                admin.abort_job(job)
                raise Interrupted("stopped; the same command goes on")
            now = time.monotonic()
            if now - looked > 2.0:
                looked = now
                if not found and self._ended(admin, job):
                    time.sleep(POLL)
                    return self._outcome(job) or {"lost": "the job has ended by itself"}
                self._take_in(admin, sites)
            time.sleep(POLL / 5)

    def _ended(self, admin: Any, job: str) -> bool:
        status = str(admin.get_job_meta(job).get("status", ""))
        return status.startswith(ENDED)

    def _take_in(self, admin: Any, sites: list[str]) -> None:
        """Ask the job to end if a site of the run is there that takes no part in it."""
        legs = self.run_folder / LEGS
        if not legs.exists():
            return
        lines = [json.loads(line) for line in legs.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        last = next((line for line in reversed(lines) if "leg" in line), None)
        if last is None or not last["away"] or time.time() - legs.stat().st_mtime < BACK:
            return
        back = set(last["away"]) & set(sites_of(admin))
        if back:
            self.progress.note(f"{', '.join(sorted(back))} is there again, and is taken in")
            (self.folder / AGAIN).touch()

    def _outcome(self, job: str = "") -> dict[str, Any]:
        path = self.folder / OUTCOME
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found if not job or found.get("job") == job else {}

    def _say(self) -> None:
        """Pass on what the hub's job has noted since."""
        path = self.folder / NOTES
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        for line in lines[self.heard :]:
            said = json.loads(line)
            if "begin" in said:
                self.progress.begin(said["begin"], said["total"], said["done"])
            elif "advance" in said:
                self.progress.advance(said["advance"], said["note"])
            else:
                self.progress.note(said["said"])
        self.heard = len(lines)
