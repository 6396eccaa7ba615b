"""The hub's authority, and how a site gets its certificate: the site's private key never leaves the site.

A site makes a key and a request, a zip file with what it is called and its public key, signed with the private one. The
hub's authority signs a certificate for it. What goes back to the site is signed by the authority as well, and the site
knows the authority by a fingerprint that people compare by another way than the network.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from nvflare.lighter.utils import Identity, generate_cert, x509_name

from bespoke.deploy.federated.identities import key_fingerprint
from bespoke.deploy.flare.keys import (
    common_name,
    fingerprint_of,
    new_key,
    pem,
    read_key,
    write_key,
    write_private,
)
from bespoke.deploy.flare.project import Hub, SiteSettings, is_name
from bespoke.errors import UserError

BITS = 3072  # of the authority's key, which lasts for years
LARGEST = 2**20  # bytes of a file in a request or an approval
REQUEST = ("request.json", "request.csr")
APPROVAL = ("approval.json", "approval.sig", "site.crt", "root.pem", "schema.json")
CLOCKS = timedelta(minutes=5)  # by which the clocks of two machines may differ


@dataclass(frozen=True)
class Authority:
    """Signs certificates. Its private key is the project's most valuable secret: keep the folder off the network."""

    folder: Path
    certificate: x509.Certificate
    key: rsa.RSAPrivateKey

    @classmethod
    def create(cls, folder: Path, name: str, days: int) -> Authority:
        key = new_key(BITS)
        now = datetime.now(UTC)
        certificate = generate_cert(
            Identity(name), Identity(name), key, key.public_key(), ca=True,
            not_valid_before=now - CLOCKS, not_valid_after=now + timedelta(days=days),
        )  # fmt: skip
        folder.mkdir(mode=0o700, parents=True)
        write_key(folder / "root.key", key)
        (folder / "root.pem").write_bytes(pem(certificate))
        return cls(folder, certificate, key)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        try:
            certificate = x509.load_pem_x509_certificate((folder / "root.pem").read_bytes())
            key = serialization.load_pem_private_key((folder / "root.key").read_bytes(), None)
        except FileNotFoundError as error:
            raise UserError(
                f"there is no authority in {folder} ({error.filename} is missing); make one with: bespoke deploy init"
            ) from None
        except ValueError as error:
            raise UserError(f"the authority in {folder} cannot be read: {error}") from None
        assert isinstance(key, rsa.RSAPrivateKey)
        return cls(folder, certificate, key)

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.certificate)

    def sign(
        self, name: str, org: str, role: str, public: rsa.RSAPublicKey, days: int, host: str | None = None
    ) -> x509.Certificate:
        """A certificate. `role` is `server`, `client`, or what an administrator may do, as local/authorization.json
        says; it comes from the hub and never from a request."""
        now = datetime.now(UTC)
        admin = role not in ("server", "client")
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([] if admin else [ExtendedKeyUsageOID.SERVER_AUTH])]
        certificate: x509.Certificate = generate_cert(
            Identity(name, org, role), Identity(common_name(self.certificate.subject)), self.key, public,
            server_default_host=host, not_valid_before=now - CLOCKS,
            not_valid_after=min(now + timedelta(days=days), self.certificate.not_valid_after_utc),
            extra_extensions=[
                (x509.BasicConstraints(ca=False, path_length=None), True),
                (_key_usage(signs=admin), True),
                (x509.ExtendedKeyUsage(uses), False),
            ],
        )  # fmt: skip
        return certificate


def request(settings: SiteSettings, folder: Path) -> Path:
    """Makes a site's key (once) and its request; returns the request's file, which goes to the hub."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key_file = folder / "site.key"
    key = read_key(key_file) if key_file.exists() else new_key()
    if not key_file.exists():
        write_key(key_file, key)
    asked = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509_name(settings.name, settings.org))
        .sign(key, hashes.SHA256())
    )
    said = {"format": 1, "project": settings.project, "name": settings.name, "org": settings.org}
    path = folder / f"{settings.name}.request.zip"
    _write_zip(
        path, {"request.json": json.dumps(said).encode(), "request.csr": asked.public_bytes(serialization.Encoding.PEM)}
    )
    return path


def approve(
    authority: Authority, hub: Hub, path: Path, schema: bytes = b"", out: Path | None = None, again: bool = False
) -> Path:
    """Signs the certificate that a request asks for; returns the file that goes back to the site."""
    name, org, public = _asked(path, hub)
    issued_file = authority.folder / "issued.json"
    issued = json.loads(issued_file.read_text()) if issued_file.exists() else {}
    print_of_key = key_fingerprint(public)
    if name in issued and issued[name]["key"] != print_of_key and not again:
        raise UserError(
            f"{path}: the site {name!r} has a certificate for another key. Ask the site whether it lost its key; "
            "if so, give --again. The old certificate stays valid until the hub's list says otherwise"
        )
    certificate = authority.sign(name, org, "client", public, hub.days)
    said = {
        "format": 1, "project": hub.name, "name": name, "org": org, "server": hub.server, "port": hub.port,
        "columns": hub.columns.model_dump(exclude_none=True) if hub.columns else None, "least": hub.least,
        "schema": bool(schema),
    }  # fmt: skip
    words = json.dumps(said, sort_keys=True).encode()
    crt = pem(certificate)
    signature = authority.key.sign(_signed(words, crt, schema), _PADDING, hashes.SHA256())
    target = out or path.with_name(f"{name}.approved.zip")
    _write_zip(
        target,
        {"approval.json": words, "approval.sig": signature, "site.crt": crt, "root.pem": pem(authority.certificate),
         "schema.json": schema},
    )  # fmt: skip
    issued[name] = {"key": print_of_key, "serial": str(certificate.serial_number), "org": org}
    write_private(issued_file, json.dumps(issued, indent=1))
    return target


@dataclass(frozen=True)
class Approval:
    """What a site got back from the hub, after all checks."""

    said: dict[str, Any]
    certificate: bytes
    root: bytes
    schema: bytes


def accept(settings: SiteSettings, folder: Path, path: Path) -> Approval:
    """Reads what came back from the hub; refuses what is not of the authority with the agreed fingerprint."""
    found = _read_zip(path, APPROVAL)
    try:
        root = x509.load_pem_x509_certificate(found["root.pem"])
        certificate = x509.load_pem_x509_certificate(found["site.crt"])
    except ValueError as error:
        raise UserError(f"{path} holds no certificates: {error}") from None
    if fingerprint_of(root) != settings.fingerprint:
        raise UserError(
            f"{path} is of an authority with the fingerprint {fingerprint_of(root)}, but site.toml says "
            f"{settings.fingerprint}: ask the hub by telephone which is right"
        )
    public: Any = root.public_key()
    try:
        certificate.verify_directly_issued_by(root)
        signed = _signed(found["approval.json"], found["site.crt"], found["schema.json"])
        public.verify(found["approval.sig"], signed, _PADDING, hashes.SHA256())
    except (InvalidSignature, ValueError, TypeError):
        raise UserError(f"{path} is damaged or was changed: it is not signed by the project's authority") from None
    if key_fingerprint(certificate.public_key()) != key_fingerprint(read_key(folder / "site.key").public_key()):
        raise UserError(f"{path} is for another key than {folder / 'site.key'}; send the request in {folder} again")
    said = json.loads(found["approval.json"])
    for name, expected in (("project", settings.project), ("name", settings.name), ("org", settings.org)):
        if said.get(name) != expected:
            raise UserError(f"{path}: {name} = {said.get(name)!r}, but site.toml says {expected!r}")
    return Approval(said, found["site.crt"], found["root.pem"], found["schema.json"])


# -- signatures --------------------------------------------------------------------------------------------------------
def request_fingerprint(path: Path) -> str:
    """The fingerprint of the key in a request."""
    return key_fingerprint(x509.load_pem_x509_csr(_read_zip(path, REQUEST)["request.csr"]).public_key())


_PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.MAX_LENGTH)


def _signed(said: bytes, certificate: bytes, schema: bytes) -> bytes:
    """What the authority's signature is over; lengths keep the parts apart."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in (b"bespoke approval 1", said, certificate, schema))


def _key_usage(signs: bool) -> x509.KeyUsage:
    """`signs`: content, as administrators sign their jobs."""
    return x509.KeyUsage(
        digital_signature=True, content_commitment=signs, key_encipherment=not signs, data_encipherment=False,
        key_agreement=False, key_cert_sign=False, crl_sign=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _asked(path: Path, hub: Hub) -> tuple[str, str, rsa.RSAPublicKey]:
    """Name, organization and public key of a request, after all checks."""
    found = _read_zip(path, REQUEST)
    try:
        asked = x509.load_pem_x509_csr(found["request.csr"])
        said = json.loads(found["request.json"])
        name, org, project = str(said["name"]), str(said["org"]), str(said["project"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no request of bespoke: {error}") from None
    public = asked.public_key()
    if not asked.is_signature_valid or not isinstance(public, rsa.RSAPublicKey) or public.key_size < 2048:
        raise UserError(f"{path}: the request is not signed by an RSA key of 2048 bits or more")
    if asked.subject != x509_name(name, org) or not is_name(name) or not is_name(org):
        raise UserError(f"{path}: the names in the request do not agree with each other, or cannot be names")
    if project != hub.name:
        raise UserError(f"{path}: the request is for the project {project!r}; this hub's is {hub.name!r}")
    if name not in hub.sites:
        listed = ", ".join(hub.sites)
        raise UserError(f"{path}: the site {name!r} is not in the hub's list ({listed}); add it to sites in hub.toml")
    return name, org, public


# -- zip files ---------------------------------------------------------------------------------------------------------
def _write_zip(path: Path, files: dict[str, bytes]) -> None:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    path.write_bytes(held.getvalue())


def _read_zip(path: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """The named files of an archive and no others; nothing is unpacked to disk."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sorted(archive.namelist()) != sorted(names):
                raise UserError(f"{path} holds {archive.namelist()}; expected {list(names)}")
            if any(archive.getinfo(name).file_size > LARGEST for name in names):
                raise UserError(f"{path}: a file in it is larger than {LARGEST:,} bytes")
            return {name: archive.read(name) for name in names}
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (OSError, zipfile.BadZipFile, ValueError, RuntimeError) as error:
        raise UserError(f"{path} is no zip file that can be read ({error})") from None
