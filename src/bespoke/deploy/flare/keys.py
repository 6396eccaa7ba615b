"""Private keys and certificates as files, and the fingerprints by which people compare them."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from bespoke.errors import UserError

BITS = 2048  # of RSA, which is what FLARE signs with


def new_key(bits: int = BITS) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


def write_key(path: Path, key: rsa.RSAPrivateKey) -> None:
    """Writes a private key that only this user of the machine can read."""
    made = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(made)


def write_private(path: Path, text: str) -> None:
    """Writes a file whole or not at all, for this user of the machine alone. `bespoke.storage` would load PyTorch."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_key(path: Path) -> rsa.RSAPrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        raise UserError(f"there is no key {path}; make one with: bespoke deploy join site.toml") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is no private key: {error}") from None
    if not isinstance(key, rsa.RSAPrivateKey):
        raise UserError(f"{path} is no RSA key")
    return key


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def fingerprint_of(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def common_name(name: x509.Name) -> str:
    return str(name.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
