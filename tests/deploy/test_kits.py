"""Kits that do not start: not hardened, moved, open to others on the machine, with certificates that do not fit."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bespoke.deploy.flare import authority as authority_module
from bespoke.deploy.flare.authority import Authority
from bespoke.deploy.flare.hardened import check_kit
from bespoke.deploy.flare.keys import pem, read_key
from bespoke.deploy.flare.kit import harden
from bespoke.deploy.flare.loopback import Loopback, make_loopback
from bespoke.deploy.flare.running import start
from bespoke.errors import UserError
from deploy.attackers import edit


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Loopback:
    """A project on disk; nothing of it runs."""
    return make_loopback(tmp_path_factory.mktemp("made"), ("north", "south"))


@pytest.fixture
def kit(made: Loopback, tmp_path: Path) -> Path:
    """A copy of a site's kit to spoil."""
    return Path(shutil.copytree(made.sites["north"], tmp_path / "kit"))


@pytest.fixture
def hub_kit(made: Loopback) -> Iterator[Path]:
    """The hub's kit to spoil: its paths are absolute, so it stays where it is and is put back."""
    kept = made.kit.with_name("kept")
    shutil.copytree(made.kit, kept)
    yield made.kit
    shutil.rmtree(made.kit)
    kept.rename(made.kit)


def said_of(path: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda kit: edit(kit / path, change)


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no rules": (lambda kit: (kit / "local/authorization.json").unlink(), "authorization.json is missing"),
    "code allowed": (
        said_of("local/authorization.json", lambda said: said["permissions"]["project_admin"].update(byoc="any")),
        "permissions.project_admin.byoc = 'any', and has to be 'none'",
    ),
    "a further role": (
        said_of("local/authorization.json", lambda said: said["permissions"].update(guest="any")),
        "permissions.guest = 'any' does not belong there",
    ),
    "every class": (said_of("local/resources.json", lambda said: said["class_allow_list"].append("*")), "allow_list"),
    "warnings only": (
        said_of("local/resources.json", lambda said: said.update(class_list_enforcement_mode="warn")),
        "class_list_enforcement_mode = 'warn', and has to be 'enforce'",
    ),
    "no list": (said_of("local/resources.json", lambda said: said.pop("class_allow_list")), "allow_list is missing"),
    "no guard": (said_of("local/resources.json", lambda said: said["components"].pop()), "components = "),
    "FLARE's defaults": (
        lambda kit: (kit / "local/resources.json").rename(kit / "local/resources.json.default"),
        "resources.json is missing",
    ),
    "further resources": (
        lambda kit: (kit / "local/more__resources.json").write_text("{}"), "more__resources.json does not belong",
    ),
    "in the other folder": (
        lambda kit: (kit / "startup/x__j_resources.json").write_text("{}"), "x__j_resources.json does not belong",
    ),
    "code of a site": (lambda kit: (kit / "local/custom").mkdir(), "custom does not belong"),
    "no TLS": (
        said_of("startup/fed_client.json", lambda said: said["client"].update(connection_security="clear")),
        "connection_security = 'clear'; it has to be 'mtls'",
    ),
    "unsigned jobs": (
        said_of("startup/fed_client.json", lambda said: said.update(require_signed_jobs=False)),
        "require_signed_jobs = False; it has to be true",
    ),
    "another name": (
        said_of("startup/fed_client.json", lambda said: said["client"].update(fqsn="south")),
        "says 'south', but the certificate is for 'north'",
    ),
    "an open key": (lambda kit: (kit / "startup/client.key").chmod(0o640), "can be read by other users"),
    "an open folder": (lambda kit: kit.chmod(0o755), "can be read by other users"),
    "not JSON": (lambda kit: (kit / "local/resources.json").write_text("{"), "is not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILED)
def test_a_kit_that_is_not_hardened_does_not_start(kit: Path, how: str) -> None:
    assert check_kit(kit) == "site"
    spoil, said = SPOILED[how]
    spoil(kit)
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        start(kit)
    assert not (kit / "process.json").exists()


def test_stores_of_the_hub_lie_in_its_kit(hub_kit: Path, tmp_path: Path) -> None:
    """FLARE's default for jobs and snapshots is a folder under /tmp that everybody on the machine can read."""
    said = json.loads((hub_kit / "local/resources.json").read_text())
    stores = [said["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"],
              next(part for part in said["components"] if part["id"] == "job_manager")["args"]["uri_root"]]  # fmt: skip
    assert all(Path(store).is_relative_to(hub_kit.resolve()) for store in stores)
    edit(hub_kit / "local/resources.json", lambda said: said["snapshot_persistor"]["args"]["storage"]["args"].update(
        root_dir="/tmp/nvflare/snapshot-storage"))  # fmt: skip
    with pytest.raises(UserError, match="root_dir = '/tmp/nvflare/snapshot-storage', and has to be"):
        start(hub_kit)
    assert harden(hub_kit) == "hub"
    shutil.copytree(hub_kit, tmp_path / "moved")
    with pytest.raises(UserError, match="moved the kit; write it again with: bespoke deploy harden"):
        start(tmp_path / "moved")
    assert harden(tmp_path / "moved") == "hub"


def test_certificates_that_do_not_fit_the_kit(made: Loopback, kit: Path, tmp_path: Path) -> None:
    authority = Authority.load(made.kit.parent / "authority")
    certificate = kit / "startup/client.crt"
    public = read_key(kit / "startup/client.key").public_key()
    with mock.patch.object(authority_module, "datetime") as clock:
        clock.now.return_value = datetime.now(UTC) - timedelta(days=3)
        certificate.write_bytes(pem(authority.sign("north", "org-north", "client", public, 1)))
    with pytest.raises(UserError, match="ask the hub to approve the request again"):
        start(kit)
    other = Authority.create(tmp_path / "other", "demo", 30)
    certificate.write_bytes(pem(other.sign("north", "org-north", "client", public, 1)))
    with pytest.raises(UserError, match=r"is not signed by .*rootCA\.pem"):
        start(kit)
    shutil.copy(made.sites["south"] / "startup/client.crt", certificate)
    with pytest.raises(UserError, match=r"client\.key is not the key of .*client\.crt"):
        start(kit)


def test_the_page_names_every_attempt() -> None:
    """The table of docs/security.md and the tests of tests/deploy/test_kit_security.py are the same list."""
    root = Path(__file__).parents[2]
    tests = re.findall(r"^def (test_\w+)", (root / "tests/deploy/test_kit_security.py").read_text(), re.MULTILINE)
    table = (root / "docs/security.md").read_text().split("# A federation")[1]
    assert sorted(re.findall(r"`(test_\w+)`", table)) == sorted(tests)
    ways = {2: "two", 16: "sixteen", 17: "seventeen", 18: "eighteen"}[len(SPOILED)]
    assert f"{ways} ways to weaken a kit" in table
