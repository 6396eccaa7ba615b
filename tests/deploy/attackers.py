"""What somebody can try who does not go through bespoke: other kits, other certificates, jobs of their own making."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import grpc

from bespoke.deploy.flare import running
from bespoke.deploy.flare.hardened import CONTROLLER, EXECUTOR, STARTUP, role_of
from bespoke.deploy.flare.running import Running

FLARES = "nvflare.app_common.np.np_trainer.NPTrainer"  # a class of FLARE's own; its kits allow it, bespoke's do not
LONG = 600.0  # seconds; a very busy machine may need them for what takes a few
IDLE = "nvflare.app_common.workflows.cyclic_ctl.CyclicController"


def start_unchecked(kit: Path) -> Running:
    """Starts a kit without bespoke's check, as FLARE's own script would."""
    with mock.patch.object(running, "check_kit", role_of):
        return running.start(kit, wait=None)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a JSON file in place."""
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def loosen(kit: Path) -> None:
    """A hub that allows everything: what its owner can do, and what sites have to be safe from."""
    local = kit / "local"
    edit(local / "authorization.json", lambda said: said["permissions"].update(project_admin="any", member="any"))
    edit(local / "resources.json", lambda said: said.update(class_allow_list=["*"]))
    edit(kit / "startup/fed_server.json", lambda said: said.update(require_signed_jobs=False))


def job(folder: Path, site: str, executor: str = EXECUTOR, controller: str = CONTROLLER, code: str = "") -> Path:
    """A job's folder for the hub and one site; `code` is a module of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    for app, name, said in (
        ("hub", "server", {"workflows": [{"id": "flow", "path": controller, "args": {}}], "components": []}),
        ("site", "client", {"executors": [{"tasks": ["*"], "executor": {"path": executor, "args": {}}}]}),
    ):
        config = folder / app / "config"
        config.mkdir(parents=True)
        (config / f"config_fed_{name}.json").write_text(json.dumps({"format_version": 2, **said}))
        if code:
            (folder / app / "custom").mkdir()
            (folder / app / "custom/evil.py").write_text(code)
    meta = {"name": folder.name, "resource_spec": {}, "min_clients": 1, "mandatory_clients": [site],
            "deploy_map": {"hub": ["server"], "site": [site]}}  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def wait_until(found: Callable[[], Any], what: str = "", seconds: float = LONG) -> Any:
    """What `found` returns as soon as it is true."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, f"{what or found} did not happen within {seconds:g} seconds"
        time.sleep(0.1)
    return value


def knock(port: int, kit: Path | None, root: Path, name: str | None = "localhost", patience: float = 30.0) -> str:
    """Opens a TLS connection with the certificate of a kit, or none; returns `in`, or why it was closed.

    `name`: whom the other side has to be; None: anybody of the authority. A connection is open if it is not closed
    within `patience` seconds.
    """
    context = ssl.create_default_context(cafile=root)
    context.check_hostname = name is not None
    context.set_alpn_protocols(["h2"])
    if kit is not None:
        _, certificate, key, _ = STARTUP["site"]
        context.load_cert_chain(kit / "startup" / certificate, kit / "startup" / key)
    try:
        with (
            socket.create_connection(("localhost", port), timeout=patience) as plain,
            context.wrap_socket(plain, server_hostname=name) as connection,
        ):
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            return "in" if connection.recv(9) else "closed"
    except TimeoutError:  # no answer, and still open
        return "in"
    except (ssl.SSLError, ConnectionError) as error:
        return str(error)


def opens(certificate: Path, site: Path) -> bool:
    """Whether a site opens gRPC's connection to a server on loopback that has this certificate and its key."""
    root, pair = (site / "startup/rootCA.pem").read_bytes(), (site / "startup/client.key", site / "startup/client.crt")
    held = (certificate.with_suffix(".key").read_bytes(), certificate.read_bytes())
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([held], root, True))
    server.start()
    own = grpc.ssl_channel_credentials(root, *(path.read_bytes() for path in pair))
    try:
        with grpc.secure_channel(f"localhost:{port}", own) as channel:
            grpc.channel_ready_future(channel).result(timeout=3)
        return True
    except grpc.FutureTimeoutError:
        return False
    finally:
        server.stop(None).wait()
