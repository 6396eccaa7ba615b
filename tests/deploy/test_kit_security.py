"""Who gets into a federation and what they can do there: the rows of the table in docs/security.md, one test each.

Every test goes past bespoke's own check of a kit, as an attacker would: what refuses is the hub, or the site.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from nvflare.fuel.flare_api.api_spec import AuthorizationError

from bespoke.deploy.flare import authority as authority_module
from bespoke.deploy.flare.authority import Authority
from bespoke.deploy.flare.keys import pem, read_key
from bespoke.deploy.flare.kit import write_admin
from bespoke.deploy.flare.loopback import Loopback, make_loopback
from bespoke.deploy.flare.roster import STRANGER, TWICE, notices
from bespoke.deploy.flare.running import Running, session, sites_of
from deploy.attackers import FLARES, IDLE, LONG, edit, job, knock, loosen, opens, start_unchecked, wait_until


def output(project: Loopback, name: str = "hub") -> str:
    """What a process has printed: gRPC and FLARE say some things there alone."""
    kit = project.kit if name == "hub" else project.sites[name]
    return (kit / "output.txt").read_text(errors="replace")


def copy_of(project: Loopback, name: str, folder: Path) -> Path:
    """A copy of a site's kit, as it was when it was made."""
    return Path(shutil.copytree(project.sites[name], folder / "copy" / name))


def refused(running: Running, project: Loopback, said: str, name: str) -> None:
    """Waits until the hub's log says why, and checks that the site did not get in."""
    try:
        wait_until(lambda: said in project.running["hub"].log() + output(project), said)
        assert not running.ready()
        with session(project.kit) as admin:
            assert name not in sites_of(admin)
    finally:
        running.kill()


# -- certificates ------------------------------------------------------------------------------------------------------
def test_a_good_certificate_gets_in(project: Loopback) -> None:
    """The other side of the next tests: what they try works with a good certificate."""
    root = project.sites["south"] / "startup/rootCA.pem"
    assert knock(project.hub.port, project.sites["south"], root) == "in"


def test_no_certificate(project: Loopback) -> None:
    root = project.sites["south"] / "startup/rootCA.pem"
    assert knock(project.hub.port, None, root) != "in"
    wait_until(lambda: "PEER_DID_NOT_RETURN_A_CERTIFICATE" in output(project))


def test_no_encryption(project: Loopback) -> None:
    with socket.create_connection(("localhost", project.hub.port), timeout=10) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert plain.recv(9) == b""
    wait_until(lambda: "WRONG_VERSION_NUMBER" in output(project))


def test_an_expired_certificate(project: Loopback, tmp_path: Path) -> None:
    kit = copy_of(project, "south", tmp_path)
    authority = Authority.load(project.kit.parent / "authority")
    past = datetime.now(UTC) - timedelta(days=3)
    with mock.patch.object(authority_module, "datetime") as clock:
        clock.now.return_value = past
        public = read_key(kit / "startup/client.key").public_key()
        (kit / "startup/client.crt").write_bytes(pem(authority.sign("south", "org-south", "client", public, 1)))
    assert knock(project.hub.port, kit, kit / "startup/rootCA.pem") != "in"
    wait_until(lambda: "CERTIFICATE_VERIFY_FAILED" in output(project))


def test_another_authority_of_the_same_name(project: Loopback, tmp_path: Path) -> None:
    """A certificate for a site of the project, signed by somebody who calls himself the project."""
    kit = copy_of(project, "south", tmp_path)
    key = read_key(kit / "startup/client.key")
    other = Authority.create(tmp_path / "other", project.hub.name, 30)
    (kit / "startup/client.crt").write_bytes(pem(other.sign("south", "org-south", "client", key.public_key(), 1)))
    before = output(project).count("CERTIFICATE_VERIFY_FAILED")
    assert knock(project.hub.port, kit, kit / "startup/rootCA.pem") != "in"
    wait_until(lambda: output(project).count("CERTIFICATE_VERIFY_FAILED") > before)


def test_a_site_does_not_talk_to_a_hub_of_another_authority(project: Loopback, tmp_path: Path) -> None:
    """Trust goes both ways: a site of another project of the same name does not take this hub for its own."""
    kit = copy_of(project, "south", tmp_path)
    other = Authority.create(tmp_path / "other", project.hub.name, 30)
    public = read_key(kit / "startup/client.key").public_key()
    (kit / "startup/client.crt").write_bytes(pem(other.sign("south", "org-south", "client", public, 1)))
    (kit / "startup/rootCA.pem").write_bytes(pem(other.certificate))
    running = start_unchecked(kit)
    try:
        wait_until(lambda: "CERTIFICATE_VERIFY_FAILED" in (kit / "output.txt").read_text())
        assert not running.ready()
    finally:
        running.kill()


def test_a_site_cannot_take_the_place_of_the_hub(project: Loopback) -> None:
    """By its own certificate, which is of the same authority and may take connections (from its own jobs)."""
    assert opens(project.kit / "startup/server.crt", project.sites["north"])
    assert not opens(project.sites["south"] / "startup/client.crt", project.sites["north"])


def test_another_user_of_a_sites_machine(project: Loopback) -> None:
    """The port on loopback between a site and its jobs: FLARE's default lets in whoever reaches it."""
    root = project.sites["south"] / "startup/rootCA.pem"
    found = re.search(r"created backbone internal listener for stcp://localhost:(\d+)", project.running["north"].log())
    port = int(found[1])
    assert knock(port, project.sites["north"], root, name=None, patience=1.0) == "in"
    assert knock(port, None, root, name=None) != "in"


# -- names -------------------------------------------------------------------------------------------------------------
def test_another_sites_name(project: Loopback, tmp_path: Path) -> None:
    """`south` with its own good certificate says that it is `west`."""
    kit = copy_of(project, "south", tmp_path)
    edit(kit / "startup/fed_client.json", lambda said: said["client"].update(fqsn="west"))
    said = "authenticated as 'south' but claimed endpoint 'west' requires identity 'west'"
    refused(start_unchecked(kit), project, said, "west")


def test_a_site_that_is_not_in_the_project(project: Loopback, tmp_path: Path) -> None:
    """The authority has signed for `east`, and the hub's list does not name it (any more)."""
    kit = copy_of(project, "south", tmp_path)
    authority = Authority.load(project.kit.parent / "authority")
    public = read_key(kit / "startup/client.key").public_key()
    (kit / "startup/client.crt").write_bytes(pem(authority.sign("east", "org-east", "client", public, 1)))
    edit(kit / "startup/fed_client.json", lambda said: said["client"].update(fqsn="east"))
    refused(start_unchecked(kit), project, f"the site 'east' {STRANGER}", "east")
    assert [line["site"] for line in notices(project.kit) if line["what"] == STRANGER] == ["east"]


# -- what an administrator can do --------------------------------------------------------------------------------------
@pytest.mark.parametrize("role", ["member", "lead", "org_admin", "client"])
def test_others_than_the_projects_administrator_submit_no_jobs(project: Loopback, tmp_path: Path, role: str) -> None:
    """`client` is the role in the certificate of a site."""
    authority = Authority.load(project.kit.parent / "authority")
    kit = write_admin(project.hub, authority, tmp_path / role, f"{role}@hub.org", role)
    with session(project.kit, admin=kit) as somebody, pytest.raises(AuthorizationError):
        somebody.submit_job(str(job(tmp_path / "job", "north")))


def test_the_administrator_has_no_shell(project: Loopback) -> None:
    with session(project.kit) as admin, pytest.raises(AuthorizationError):
        admin.ls_target("server")


def finished(admin: Any, job_id: str, *also: str) -> dict[str, Any]:
    """A job's meta when it has ended; `also`: keys that FLARE may add a moment after the status."""
    found: dict[str, Any] = {}

    def ended() -> bool:
        found.update(admin.get_job_meta(job_id))
        return str(found["status"]).startswith("FINISHED") and set(also) <= set(found)

    wait_until(ended)
    return found


def test_custom_code_in_a_job(project: Loopback, tmp_path: Path) -> None:
    with session(project.kit) as admin:
        meta = finished(
            admin, admin.submit_job(str(job(tmp_path / "job", "north", code="raise SystemExit"))), "job_deploy_detail"
        )
    assert meta["status"] == "FINISHED:FAILED_TO_RUN"
    assert meta["job_deploy_detail"] == ["server: BYOC not permitted"]
    assert (project.kit / "jobs" / str(meta["job_id"])).is_dir()  # and not in FLARE's folder under /tmp


def test_a_class_that_the_hub_does_not_list(project: Loopback, tmp_path: Path) -> None:
    with session(project.kit) as admin:
        meta = finished(admin, admin.submit_job(str(job(tmp_path / "job", "north", controller=IDLE))))
    assert meta["status"] != "FINISHED:COMPLETED"
    assert f"Component '{IDLE}' at config path 'workflows.#1' is not in allow_list" in output(project)


def taken_back(project: Loopback) -> int:
    """How often the hub has taken `north` back."""
    return project.running["hub"].log().count("Re-activate the client: north")


# -- two copies --------------------------------------------------------------------------------------------------------
def test_a_second_copy_of_a_kit(project: Loopback, tmp_path: Path) -> None:
    """FLARE lets the second take the first one's place. That is noticed, said, and ends when the second ends."""
    kit = copy_of(project, "north", tmp_path)
    (kit / "process.json").unlink()  # on another machine there is no such process
    first = project.running["north"]
    second = start_unchecked(kit).wait(LONG)
    try:
        said = wait_until(lambda: [line for line in notices(project.kit) if line["what"] == TWICE])
        assert said[0]["site"] == "north"
        assert f"the site 'north' {TWICE}" in project.running["hub"].log()
        assert first.alive()
        before = taken_back(project)
    finally:
        second.kill()
    wait_until(lambda: taken_back(project) > before)
    with session(project.kit) as admin:
        wait_until(lambda: sites_of(admin) == ["north"])


def test_a_site_that_is_taken_off_the_list_while_it_runs(project: Loopback) -> None:
    """The last test of this project: `north` is shut out at its next sign of life, and let in again."""
    local = project.kit / "local/bespoke.json"
    listed = json.loads(local.read_text())["sites"]
    edit(local, lambda said: said.update(sites=["south", "west"]))
    wait_until(lambda: f"the site 'north' {STRANGER}: the hub's list" in project.running["hub"].log())
    with session(project.kit) as admin:
        assert sites_of(admin) == []
    before = taken_back(project)
    edit(local, lambda said: said.update(sites=listed))
    wait_until(lambda: taken_back(project) > before)


# -- sites against their own hub ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def loose(tmp_path_factory: pytest.TempPathFactory, quick: None) -> Iterator[Loopback]:
    """A project whose hub has taken its own protection away, and does not ask sites to check users' rights. The site's
    kit is as bespoke writes it."""
    made = make_loopback(tmp_path_factory.mktemp("loose"), ("north",), min_sites=1)
    loosen(made.kit)
    lying = os.pathsep.join([str(Path(__file__).parent / "lying_hub"), os.environ.get("PYTHONPATH", "")])
    with made:
        with mock.patch.dict(os.environ, PYTHONPATH=lying):
            made.running["hub"] = start_unchecked(made.kit).wait(LONG)
        yield made.start("north", wait=LONG)


def test_a_site_takes_no_code_from_its_hub(loose: Loopback, tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'was here')!r}, 'w')"
    asked = job(tmp_path / "job", "north", executor="evil.Evil", controller=IDLE, code=code)
    with session(loose.kit) as admin:
        meta = finished(admin, admin.submit_job(str(asked)), "job_deploy_detail")
    assert "north: NVFLARE_ERROR: BYOC not permitted" in meta["job_deploy_detail"]
    assert not (tmp_path / "was here").exists()


def test_a_site_does_nothing_else_for_its_hub(loose: Loopback) -> None:
    """FLARE checks a site's authorization.json only if the hub asks it to. `guard.py` does not go by what it asks."""
    asked: dict[str, Callable[[Any], object]] = {
        "sys.shell": lambda admin: admin.cat_target("north", file="startup/fed_client.json"),
        "train.restart": lambda admin: admin.restart("client", ["north"], wait=False),
        "sys.configure_site_log": lambda admin: admin.configure_site_log("DEBUG", "client"),
    }
    with session(loose.kit) as admin:
        for command, ask in asked.items():
            try:
                said = str(ask(admin))
            except Exception as error:  # of whatever kind FLARE takes a refusal for
                said = str(error)
            assert "ssl_cert" not in said
            line = f"the hub asked for {command!r}, which this site does for nobody: refused"
            wait_until(lambda line=line: line in loose.running["north"].log(), line)
    assert loose.running["north"].alive()


def test_a_site_runs_no_class_that_it_does_not_list(loose: Loopback, tmp_path: Path) -> None:
    with session(loose.kit) as admin:
        asked = job(tmp_path / "job", "north", executor=FLARES, controller=IDLE)
        meta = finished(admin, admin.submit_job(str(asked)))
    assert meta["status"] != "FINISHED:COMPLETED"
    assert f"Component '{FLARES}' at config path 'executors.#1.executor' is not in allow_list" in output(loose, "north")


def test_a_site_takes_no_job_that_no_administrator_has_signed(loose: Loopback, tmp_path: Path) -> None:
    """The hub changes a job after it was signed: its process has the files, but not the administrator's key."""
    with session(loose.kit) as admin, mock.patch("nvflare.fuel.hci.client.file_transfer.sign_folders"):
        meta = finished(
            admin, admin.submit_job(str(job(tmp_path / "job", "north", controller=IDLE))), "job_deploy_detail"
        )
    assert "north: unsigned job rejected - signed deploy is required" in meta["job_deploy_detail"]
