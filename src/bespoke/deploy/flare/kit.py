"""Writes kits: the folders from which FLARE's processes of the hub, a site or an administrator start.

HUB/authority   signs certificates (authority.py); may lie on another machine
HUB/kit         startup (certificate, key, addresses), local (hardened.py, bespoke.json), transfer
HUB/admin       the same for the administrator, who submits jobs
HUB/site.toml   what a site's file starts with
SITE/site.key   the site's private key; SITE/kit as above
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import tomli_w

from bespoke.deploy.flare.authority import Approval, Authority, accept
from bespoke.deploy.flare.hardened import ADMIN, BY_BESPOKE, STARTUP, Role, check_kit, expected, role_of
from bespoke.deploy.flare.keys import new_key, pem, write_key, write_private
from bespoke.deploy.flare.project import Hub, SiteSettings
from bespoke.errors import UserError

SCHEME = "grpc"


def admin_name(hub: Hub) -> str:
    """The administrator's name in certificates: FLARE wants an address of e-mail."""
    return f"admin@{hub.org}.{hub.name}".lower()


def write_hub(hub: Hub, folder: Path, schema: bytes = b"") -> Path:
    """Makes a hub's authority, kit, administrator and invitation; returns the kit."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; a hub's authority is made once. Choose another folder with --out")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = Authority.create(folder / "authority", hub.name, max(hub.days * 2, 730))
    kit = folder / "kit"
    _write_startup(
        kit, "hub", authority, hub.server, hub.org, "server", hub.days, host=hub.server,
        said={"format_version": 2, "require_signed_jobs": True, "servers": [{
            "name": hub.name, "service": {"target": f"{hub.server}:{hub.port}", "scheme": SCHEME},
            "admin_server": hub.server, "admin_port": hub.port, "ssl_private_key": "server.key",
            "ssl_cert": "server.crt", "ssl_root_cert": "rootCA.pem", "connection_security": "mtls"}]},
    )  # fmt: skip
    (kit / "local").mkdir(mode=0o700)
    if schema:
        (folder / "schema.json").write_bytes(schema)
    _write_json(
        kit / "local" / BY_BESPOKE,
        {"project": hub.name, "schema": str((folder / "schema.json").resolve()) if schema else None,
         "columns": _columns(hub), "sites": hub.sites, "min_sites": hub.min_sites, "least": hub.least,
         "state": str((folder / "state").resolve())},
    )  # fmt: skip
    harden(kit)
    write_admin(hub, authority, folder / "admin")
    invitation = {"name": "", "org": "", "project": hub.name, "server": hub.server, "port": hub.port,
                  "fingerprint": authority.fingerprint, "least": hub.least}  # fmt: skip
    write_private(folder / "site.toml", tomli_w.dumps(invitation))
    return kit


def write_admin(hub: Hub, authority: Authority, folder: Path, name: str = "", role: str = ADMIN) -> Path:
    """An administrator's kit. `role` is what local/authorization.json of hub and sites goes by."""
    name = name or admin_name(hub)
    said = {"format_version": 1, "admin": {
        "project_name": hub.name, "username": name, "server_identity": hub.server, "scheme": SCHEME,
        "host": hub.server, "port": hub.port, "connection_security": "mtls", "uid_source": "user_input",
        "with_file_transfer": True, "upload_dir": "transfer", "download_dir": "transfer", "client_key": "client.key",
        "client_cert": "client.crt", "ca_cert": "rootCA.pem"}}  # fmt: skip
    _write_startup(folder, "admin", authority, name, hub.org, role, hub.days, said=said)
    (folder / "local").mkdir(mode=0o700, exist_ok=True)
    limits = {"idle_timeout": 86400.0, "login_timeout": 10.0, "with_debug": False, "authenticate_msg_timeout": 2.0}
    _write_json(folder / "local" / "resources.json", {"format_version": 1, "admin": limits})
    return folder


def write_site(settings: SiteSettings, folder: Path, approved: Path) -> Path:
    """Makes a site's kit of its own key and of what came back from the hub; returns the kit."""
    approval = accept(settings, folder, approved)
    kit = folder / "kit"
    if kit.exists() and not (kit / "startup").is_dir():
        raise UserError(f"{kit} is in the way: the site's kit is made there")
    startup = kit / "startup"
    startup.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chmod(kit, 0o700)
    (kit / "transfer").mkdir(mode=0o700, exist_ok=True)
    (startup / "client.crt").write_bytes(approval.certificate)
    (startup / "rootCA.pem").write_bytes(approval.root)
    (startup / "client.key").unlink(missing_ok=True)
    shutil.copyfile(folder / "site.key", startup / "client.key")
    os.chmod(startup / "client.key", 0o600)
    said = approval.said
    _write_json(startup / "fed_client.json", {
        "format_version": 2, "require_signed_jobs": True,
        "servers": [{"name": said["project"], "service": {"target": f"{settings.server}:{settings.port}",
                     "scheme": SCHEME}, "identity": settings.server}],
        "client": {"ssl_private_key": "client.key", "ssl_cert": "client.crt", "ssl_root_cert": "rootCA.pem",
                   "fqsn": settings.name, "is_leaf": True, "connection_security": "mtls"}})  # fmt: skip
    (kit / "local").mkdir(mode=0o700, exist_ok=True)
    settle_site(kit, settings, approval)
    harden(kit)
    return kit


def settle_site(kit: Path, settings: SiteSettings, approval: Approval | None = None, data: Path | None = None) -> None:
    """Writes local/bespoke.json of a site: where its rows are, and what it lets happen with them."""
    path = kit / "local" / BY_BESPOKE
    said: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"data": None}
    if approval is not None:
        schema = kit.parent / "schema.json"
        if approval.schema:
            schema.write_bytes(approval.schema)
        said |= {"schema": str(schema.resolve()) if approval.schema else None, "columns": approval.said["columns"]}
    if data is not None:
        said["data"] = str(data.resolve())
    named = ("least", "epsilon", "delta", "methods", "share_clients", "peers", "models")
    own = {name: getattr(settings, name) for name in named}
    state = str((kit.parent / "state").resolve())
    _write_json(path, {**said, "site": settings.name, "project": settings.project, "state": state, **own})


def follow_list(kit: Path, hub: Hub) -> None:
    """Takes over what may change in hub.toml after `init`: who belongs to the project, and how many are needed."""
    server = json.loads((kit / "startup/fed_server.json").read_text(encoding="utf-8"))["servers"][0]
    made = (server["name"], server["service"]["target"])
    if made != (hub.name, f"{hub.server}:{hub.port}"):
        raise UserError(
            f"hub.toml says {hub.name!r} on {hub.server}:{hub.port}; the kit was made for {made[0]!r} on {made[1]}. "
            "Name, server and port stand in the certificates and kits of all sites and cannot change after init"
        )
    path = kit / "local" / BY_BESPOKE
    said = json.loads(path.read_text(encoding="utf-8"))
    _write_json(path, {**said, "sites": hub.sites, "min_sites": hub.min_sites, "least": hub.least})


def harden(kit: Path) -> Role:
    """Writes the files of a kit that say what may happen on this machine, and checks the whole kit."""
    role = role_of(kit)
    for name, content in expected(role, kit.resolve()).items():
        _write_json(kit / "local" / name, content)
    return check_kit(kit)


def _write_startup(
    kit: Path, of: str, authority: Authority, name: str, org: str, role: str, days: int, said: dict[str, Any],
    host: str | None = None,
) -> None:  # fmt: skip
    """The folder `startup` with a new key, and the folder `transfer`."""
    startup = kit / "startup"
    startup.mkdir(mode=0o700, parents=True)
    os.chmod(kit, 0o700)
    (kit / "transfer").mkdir(mode=0o700)
    config, certificate, key_file, root = STARTUP[of]
    key = new_key()
    write_key(startup / key_file, key)
    signed = authority.sign(name, org, role, key.public_key(), days, host)
    (startup / certificate).write_bytes(pem(signed))
    (startup / root).write_bytes(pem(authority.certificate))
    _write_json(startup / config, said)


def _columns(hub: Hub) -> dict[str, Any] | None:
    return hub.columns.model_dump(exclude_none=True) if hub.columns else None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_private(path, json.dumps(content, indent=2))
