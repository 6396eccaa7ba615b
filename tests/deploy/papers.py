"""Certificates of sites for tests, made by cryptography alone, as an authority makes them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from bespoke.deploy.federated.identities import Papers

DAY = timedelta(days=1)


@cache
def key(of: str) -> rsa.RSAPrivateKey:
    """The same key for the same name."""
    return rsa.generate_private_key(65537, 2048)


def certificate(
    name: str, public: rsa.RSAPublicKey, by: str = "authority", role: str = "client", days: int = 1
) -> x509.Certificate:
    """For `days` from now; ended so many days ago, if negative."""
    now = datetime.now(UTC)
    subject = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    subject += [x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role)] if role else []
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name(subject))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 9 * DAY)
        .not_valid_after(now + days * DAY)
        .sign(key(by), hashes.SHA256())
    )


@cache
def root() -> x509.Certificate:
    return certificate("authority", key("authority").public_key(), role="")


@cache
def papers(site: str) -> Papers:
    """A site's papers; all sites have the same authority."""
    return Papers(key(site), certificate(site, key(site).public_key()), root())


def agreed(site: str, **peers: str) -> Papers:
    """The papers of a site that has agreed on its peers' fingerprints."""
    return replace(papers(site), peers=peers)
