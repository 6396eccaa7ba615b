"""Starts and ends the processes of hubs and sites, and talks to a hub as its administrator."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from cryptography import x509
from cryptography.x509.oid import NameOID

from bespoke.deploy.flare.hardened import HEARTBEAT, Role, check_kit
from bespoke.errors import UserError

PROGRAMS = {"hub": "server.server_train", "site": "client.client_train"}
READY = {"hub": "Server started", "site": "Successfully registered client"}
NEWS = {
    "hub": {
        r"root - INFO - Server started": "The hub listens.",
        r"Client: New client (\S+)@": "The site {} is here.",
        r"Remove the dead Client\. Name: (\S+)\. ": "The site {} is gone.",
        r"Re-activate the client: (\S+) at ": "The site {} is here again.",
        r"Job: (\S+) started to run": "Job {} runs.",
    },
    "site": {
        r"Successfully registered client:": "Registered with the hub.",
        r"Launched job (\S+) ": "Job {} runs.",
        r"run \((\S+)\): child worker process finished": "Job {} has ended.",
    },
}
PROCESS = "process.json"  # in the kit: which process runs it


class NotReady(RuntimeError):
    """A hub or a site that has not started in time; its last lines of log stand in the message."""


@dataclass
class Running:
    """A started hub or site."""

    kit: Path
    role: Role
    name: str
    process: subprocess.Popen[bytes]
    log_from: int = 0  # bytes of log.txt that are of former starts
    _told: int = -1  # bytes of log.txt that `news` has read
    _family: dict[int, psutil.Process] = field(default_factory=dict)

    def alive(self) -> bool:
        self._children()
        return self.process.poll() is None

    def log(self) -> str:
        """What was logged since the start."""
        path = self.kit / "log.txt"
        if not path.exists():
            return ""
        with open(path, "rb") as file:
            file.seek(self.log_from if path.stat().st_size >= self.log_from else 0)
            return file.read().decode(errors="replace")

    def news(self) -> Iterator[str]:
        """What has happened since the last call, in sentences."""
        path = self.kit / "log.txt"
        size = path.stat().st_size if path.exists() else 0
        start = self._told if 0 <= self._told <= size else self.log_from if self._told < 0 else 0  # else a new file
        if size == 0 or start == size:
            return
        with open(path, "rb") as file:
            file.seek(start)
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]  # the last one may be half written
        self._told = start + sum(map(len, whole))
        for line in whole:
            for pattern, sentence in NEWS[self.role].items():
                if found := re.search(pattern, line.decode(errors="replace")):
                    yield sentence.format(*found.groups())

    def ready(self) -> bool:
        """Whether the hub listens, or the site is registered."""
        return READY[self.role] in self.log()

    def wait(self, seconds: float = 60.0) -> Running:
        """Waits until ready; raises NotReady with the reason."""
        end = time.monotonic() + seconds
        while not self.ready():
            if not self.alive():
                raise NotReady(f"{self.name} has ended with code {self.process.returncode}:\n{self.last_lines()}")
            if time.monotonic() > end:
                raise NotReady(f"{self.name} is not ready after {seconds:g} seconds:\n{self.last_lines()}")
            time.sleep(0.1)
        return self

    def stop(self, grace: float = 5.0) -> None:
        """Ends the process and those it has started (jobs), and waits for them."""
        self._end(grace)

    def kill(self) -> None:
        """Ends them at once, as a power cut would."""
        self._end(0.0)

    def _end(self, grace: float) -> None:
        family = self._children()
        for process in [*family, self.process] if grace else []:
            try:
                process.terminate()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        end = time.monotonic() + grace
        while time.monotonic() < end and (self.process.poll() is None or any(_runs(child) for child in family)):
            time.sleep(0.05)
        for process in [*family, self.process]:
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self.process.wait()
        psutil.wait_procs(family, timeout=10)
        (self.kit / PROCESS).unlink(missing_ok=True)

    def _children(self) -> list[psutil.Process]:
        """Every process that was seen below this one and still runs, also after its parent has ended."""
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._family[child.pid] = child
        except psutil.NoSuchProcess:
            pass
        return [child for child in self._family.values() if _runs(child)]

    def last_lines(self, lines: int = 12) -> str:
        """The end of the log and of what else the process has said."""
        said = self.log() + (self.kit / "output.txt").read_text(errors="replace")
        return "\n".join(said.splitlines()[-lines:])


def start(kit: Path, wait: float | None = 60.0) -> Running:
    """Starts the hub or site of a kit. Refuses a kit that is not hardened, or that runs on this machine already.

    `wait`: seconds within which the hub has to listen, the site to be registered; None: returns at once.
    """
    kit = kit.resolve()
    role = check_kit(kit)
    _refuse_second(kit)
    said = json.loads((kit / "startup" / f"fed_{'server' if role == 'hub' else 'client'}.json").read_text())
    name = said["servers"][0]["name"] if role == "hub" else said["client"]["fqsn"]
    own = Path(kit / "tmp")  # where FLARE unpacks jobs; not for other users
    own.mkdir(mode=0o700, exist_ok=True)
    settings = ["secure_train=true", f"org={_org(kit, role)}", "config_folder=config"]
    settings += [f"uid={name}", f"heart_beat_interval={HEARTBEAT}"] if role == "site" else []
    command = [
        sys.executable, "-u", "-m", f"nvflare.private.fed.app.{PROGRAMS[role]}", "-m", str(kit),
        "-s", f"fed_{'server' if role == 'hub' else 'client'}.json",
        "--set", *settings,
    ]  # fmt: skip
    log = kit / "log.txt"
    held = log.stat().st_size if log.exists() else 0
    mask = os.umask(0o077)
    try:
        with open(kit / "output.txt", "wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "TMPDIR": str(own), "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "4")},
            )  # fmt: skip
    finally:
        os.umask(mask)
    running = Running(kit, role, f"the {role} {name}", process, held)
    _remember(kit, process.pid)
    if wait is not None:
        try:
            running.wait(wait)
        except BaseException:
            running.kill()
            raise
    return running


@contextmanager
def session(kit: Path, timeout: float = 60.0, admin: Path | None = None) -> Iterator[Any]:
    """A session of the administrator with a running hub: FLARE's `Session`, which submits jobs and follows them.

    `kit` is the hub's; the administrator's kit lies beside it unless `admin` says otherwise.
    """
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    folder = (admin or kit.resolve().parent / "admin").resolve()
    try:
        said = json.loads((folder / "startup/fed_admin.json").read_text())["admin"]
    except FileNotFoundError:
        raise UserError(f"{folder} is no administrator's kit: startup/fed_admin.json is missing") from None
    with redirect_stdout(io.StringIO()):  # FLARE prints that it connects
        opened = new_secure_session(said["username"], str(folder), timeout=timeout)
    try:
        yield opened
    finally:
        opened.close()


def sites_of(opened: Any) -> list[str]:
    """The sites that are registered with the hub now, by the names of their certificates."""
    return sorted(client.name for client in opened.get_system_info().client_info)


def _org(kit: Path, role: Role) -> str:
    """The organization in the kit's certificate."""
    own = x509.load_pem_x509_certificate(
        (kit / "startup" / ("server.crt" if role == "hub" else "client.crt")).read_bytes()
    )
    return str(own.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value)


def _remember(kit: Path, pid: int) -> None:
    made = {"pid": pid, "since": psutil.Process(pid).create_time()}
    (kit / PROCESS).write_text(json.dumps(made))


def _refuse_second(kit: Path) -> None:
    """Refuses to start a kit twice on one machine: the hub would take turns between the two."""
    try:
        made = json.loads((kit / PROCESS).read_text())
        process = psutil.Process(made["pid"])
        if abs(process.create_time() - made["since"]) < 1 and _runs(process):
            raise UserError(f"{kit} runs already (process {made['pid']}); end it first")
    except (FileNotFoundError, ValueError, KeyError, psutil.NoSuchProcess):
        return


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
