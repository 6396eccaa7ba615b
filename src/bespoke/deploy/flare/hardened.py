"""What a kit has to hold so that nobody can run code of their own on a machine through it, and the check of it.

FLARE reads two files of a kit's folder `local`. authorization.json says who may do what; without the file everybody may
do everything. resources.json lists the classes that a job may name, and the folders where jobs and snapshots lie; by
default these are folders under /tmp that every user of the machine can read.
"""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from bespoke.deploy.federated.identities import key_fingerprint
from bespoke.deploy.flare.keys import common_name, read_key
from bespoke.errors import UserError

Role = Literal["hub", "site"]
ROLES: tuple[Role, ...] = get_args(Role)

EXECUTOR = "bespoke.deploy.flare.executor.SiteExecutor"  # the only class that a job may name at a site
CONTROLLER = "bespoke.deploy.flare.controller.HubController"  # and at the hub
ADMIN = "project_admin"  # who submits jobs; the other roles look
LOOKERS = ("org_admin", "lead", "member")
HEARTBEAT = 10.0  # seconds between signs of life of a site (FLARE's own default)
ANSWER = 10.0  # seconds that a sign of life may be under way before it is sent again (FLARE: 30)
GONE = 45.0  # seconds without one after which a site is no longer counted

# Rights that nobody has: code of one's own in a job, a shell, restarts and settings from afar.
NOBODY = ("byoc", "server-predeployed-flwr", "shell_commands", "operate", "clone_job")
STARTUP = {
    "hub": ("fed_server.json", "server.crt", "server.key", "rootCA.pem"),
    "site": ("fed_client.json", "client.crt", "client.key", "rootCA.pem"),
    "admin": ("fed_admin.json", "client.crt", "client.key", "rootCA.pem"),
}
BY_BESPOKE = "bespoke.json"  # what bespoke itself reads from a kit's folder `local`


def authorization() -> dict[str, Any]:
    """local/authorization.json."""
    none = dict.fromkeys(NOBODY, "none")
    allowed = dict.fromkeys(("submit_job", "manage_job", "download_job", "view"), "any")
    looks = {"submit_job": "none", "manage_job": "none", "download_job": "none", "view": "any"}
    return {
        "format_version": "1.0",
        "permissions": {ADMIN: {**allowed, **none}, **{role: {**looks, **none} for role in LOOKERS}},
    }


def resources(role: Role, kit: Path) -> dict[str, Any]:
    """local/resources.json. Paths are absolute: FLARE's processes do not agree on where relative ones begin."""
    common = {"format_version": 2, "class_list_enforcement_mode": "enforce"}
    launcher = "nvflare.app_common.job_launcher"
    if role == "site":
        gpu = {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0, "expiration_period": 300}
        return {
            **common,
            "class_allow_list": [EXECUTOR],
            "allow_log_streaming": False,  # a site's log does not travel
            "client": {"retry_timeout": 30, "compression": "Gzip", "maint_msg_timeout": ANSWER},
            "components": [
                _component("resource_manager", "app_common.resource_managers.gpu_resource_manager.GPUResourceManager",
                           gpu),
                _component("resource_consumer",
                           "app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer"),
                {"id": "process_launcher", "path": f"{launcher}.client_process_launcher.ClientProcessJobLauncher",
                 "args": {}},
                {"id": "guard", "path": "bespoke.deploy.flare.guard.Guard", "args": {}},
            ],
        }  # fmt: skip
    stored = "app_common.storages.filesystem_storage.FilesystemStorage"
    return {
        **common,
        "class_allow_list": [CONTROLLER],
        "servers": [
            {"admin_storage": "transfer", "max_num_clients": 1000, "heart_beat_timeout": GONE, "admin_timeout": 10.0}
        ],
        "snapshot_persistor": {
            "path": "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {"uri_root": "/", "storage": {
                "path": f"nvflare.{stored}", "args": {"root_dir": str(kit / "snapshots"), "uri_root": "/"}}},
        },
        "components": [
            _component("job_scheduler", "app_common.job_schedulers.job_scheduler.DefaultJobScheduler", {"max_jobs": 1}),
            _component("job_manager", "apis.impl.job_def_manager.SimpleJobDefManager",
                       {"uri_root": str(kit / "jobs"), "job_store_id": "job_store"}),
            _component("job_store", stored),
            {"id": "process_launcher", "path": f"{launcher}.server_process_launcher.ServerProcessJobLauncher",
             "args": {}},
            {"id": "roster", "path": "bespoke.deploy.flare.roster.Roster", "args": {}},
        ],
    }  # fmt: skip


def logging() -> dict[str, Any]:
    """local/log_config.json: everything into log.txt of the kit, errors into error_log.txt as well."""

    def file(name: str, level: str) -> dict[str, Any]:
        return {"class": "logging.handlers.RotatingFileHandler", "level": level, "formatter": "plain",
                "filename": name, "mode": "a", "maxBytes": 20_000_000, "backupCount": 10}  # fmt: skip

    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "plain": {
                "()": "nvflare.fuel.utils.log_utils.BaseFormatter",
                "fmt": "%(asctime)s - %(name)s - %(levelname)s - %(fl_ctx)s - %(message)s",
            }
        },
        "handlers": {"all": file("log.txt", "INFO"), "errors": file("error_log.txt", "ERROR")},
        "loggers": {"root": {"level": "INFO", "handlers": ["all", "errors"]}},
    }


def expected(role: Role, kit: Path) -> dict[str, dict[str, Any]]:
    """The files of a kit's folder `local` that are the same in every kit."""
    return {
        "authorization.json": authorization(),
        "resources.json": resources(role, kit),
        "log_config.json": logging(),
        "comm_config.json": {
            "allow_adhoc_conns": False,
            "backbone_conn_gen": 2,
            # Between a process and its jobs on the same machine, where FLARE's default lets every local user in.
            "internal": {"scheme": "tcp", "resources": {"host": "localhost", "connection_security": "mtls"}},
        },
    }


def role_of(kit: Path) -> Role:
    """Whether a kit is a hub's or a site's."""
    for role in ROLES:
        if (kit / "startup" / STARTUP[role][0]).is_file():
            return role
    raise UserError(f"{kit} is no kit: it has no startup/fed_server.json and no startup/fed_client.json")


def check_kit(kit: Path) -> Role:
    """Refuses a kit that is not hardened, and says in which respect; returns whose kit it is."""
    kit = kit.resolve()
    role = role_of(kit)
    _check_files(kit / "startup", set(STARTUP[role]))
    local = expected(role, kit)
    _check_files(kit / "local", {*local, BY_BESPOKE})
    for name, content in local.items():
        found = _json(kit / "local" / name)
        if difference := _difference(found, content):
            raise UserError(
                f"{kit / 'local' / name} is not as bespoke has written it: {difference}. The kit does not start. "
                "Somebody has changed it, or moved the kit; write it again with: bespoke deploy harden"
            )
    _check_startup(kit / "startup" / STARTUP[role][0])
    for path in (kit, kit / "startup", kit / "local", *(kit / "startup").glob("*.key")):
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise UserError(
                f"{path} can be read by other users of this machine; make it private with: chmod go= {path}"
            )
    named = _check_certificate(kit / "startup", STARTUP[role][1], STARTUP[role][2])
    said = _json(kit / "startup" / STARTUP[role][0])
    name = said["client"]["fqsn"] if role == "site" else said["servers"][0]["admin_server"]
    if name != named:
        raise UserError(f"{kit / 'startup' / STARTUP[role][0]} says {name!r}, but the certificate is for {named!r}")
    return role


def _check_certificate(startup: Path, certificate: str, key: str) -> str:
    """Refuses a certificate that is not of the kit's authority, not valid today or not of the kit's key; returns whom
    it names."""
    root = x509.load_pem_x509_certificate((startup / "rootCA.pem").read_bytes())
    own = x509.load_pem_x509_certificate((startup / certificate).read_bytes())
    now = datetime.now(UTC)
    for name, found in ((certificate, own), ("rootCA.pem", root)):
        if not found.not_valid_before_utc <= now <= found.not_valid_after_utc:
            raise UserError(
                f"{startup / name} is valid from {found.not_valid_before_utc:%Y-%m-%d %H:%M} to "
                f"{found.not_valid_after_utc:%Y-%m-%d %H:%M} (UTC), and now is {now:%Y-%m-%d %H:%M}: "
                "ask the hub to approve the request again"
            )
    try:
        own.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        raise UserError(f"{startup / certificate} is not signed by {startup / 'rootCA.pem'}") from None
    if key_fingerprint(read_key(startup / key).public_key()) != key_fingerprint(own.public_key()):
        raise UserError(f"{startup / key} is not the key of {startup / certificate}")
    return common_name(own.subject)


def _component(name: str, path: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"id": name, "path": f"nvflare.{path}", "args": args or {}}


def _check_files(folder: Path, known: set[str]) -> None:
    """Refuses missing files, and further ones: FLARE reads some by pattern, and imports from `custom`."""
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if missing := sorted(known - found):
        raise UserError(f"{folder / missing[0]} is missing: the kit does not start without it")
    if strange := sorted(found - known):
        raise UserError(f"{folder / strange[0]} does not belong into a kit; remove it")


def _check_startup(path: Path) -> None:
    """Refuses a kit that talks without certificates, or takes jobs without a signature."""
    said = _json(path)
    holder = said.get("client") or said.get("servers", [{}])[0]
    if holder.get("connection_security") != "mtls":
        raise UserError(f"{path}: connection_security = {holder.get('connection_security')!r}; it has to be 'mtls'")
    if said.get("require_signed_jobs") is not True:
        raise UserError(f"{path}: require_signed_jobs = {said.get('require_signed_jobs')!r}; it has to be true")


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} has to be a table, not {found!r:.60}")
    return found


def _difference(found: Any, content: Any, key: str = "") -> str:
    """The first difference between two JSON values, in words; empty if there is none."""
    if isinstance(found, dict) and isinstance(content, dict):
        for name in {**content, **found}:
            place = f"{key}.{name}" if key else name
            if name not in found:
                return f"{place} is missing"
            if name not in content:
                return f"{place} = {found[name]!r:.80} does not belong there"
            if said := _difference(found[name], content[name], place):
                return said
        return ""
    return "" if found == content else f"{key} = {found!r:.120}, and has to be {content!r:.120}"
