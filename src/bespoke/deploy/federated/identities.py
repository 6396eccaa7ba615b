"""Who the clients of other sites are: each site vouches for the identities of its clients with its certificate's key.

An identity signs the keys of every round (messages/secure). It reaches other sites through the hub, which could put its
own in the place of it. Therefore it comes with the certificate of its site and a signature by that certificate's key.
The authority that signs certificates is the hub's, so a certificate alone proves little: what counts is the site's key.
Its fingerprint is agreed on over another channel ([peers] of site.toml), or it is the first that was heard of the site,
and no other is taken later on. A site's key outlives its certificates: a renewed one has the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID

from bespoke.messages.secure.keys import KEY_BYTES
from bespoke.messages.secure.refused import Refused

ROLE = "client"  # what the authority calls a site in its certificate; the hub and administrators are something else
_PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.MAX_LENGTH)


def key_fingerprint(public: Any) -> str:
    """Of a public key: what people compare, when the hub approves a request and among sites."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(public.public_bytes(serialization.Encoding.DER, form)).hexdigest()


@dataclass(frozen=True)
class Vouched:
    """A client's identity, and the site that vouches for it."""

    public: bytes
    site: str
    fingerprint: str  # of the site's key


@dataclass(frozen=True)
class Papers:
    """What a site shows and goes by: its key and certificate, the authority's certificate, and whom it has agreed on.

    `peers`: fingerprints of the keys of all other sites whose clients it adds up with, by name; None: no site is
    agreed on, and the first key that is heard of a site counts.
    """

    key: rsa.RSAPrivateKey
    certificate: x509.Certificate
    root: x509.Certificate
    peers: Mapping[str, str] | None = None

    @property
    def site(self) -> str:
        return _name(self.certificate, NameOID.COMMON_NAME)

    @property
    def fingerprint(self) -> str:
        return key_fingerprint(self.certificate.public_key())

    def vouch(self, client: str, public: bytes) -> bytes:
        """An identity as other sites get it: the public key, the certificate, and the signature over both names."""
        shown = self.certificate.public_bytes(serialization.Encoding.DER)
        signature = self.key.sign(self._statement(self.site, client, public), _PADDING, hashes.SHA256())
        return public + len(shown).to_bytes(4, "big") + shown + signature

    def check(self, client: str, said: bytes) -> Vouched:
        """Reads another site's word for a client; refuses what no site of this project's authority has signed."""
        public, length = said[:KEY_BYTES], int.from_bytes(said[KEY_BYTES : KEY_BYTES + 4], "big")
        shown, signature = said[KEY_BYTES + 4 :][:length], said[KEY_BYTES + 4 + length :]
        what = f"the identity of client {client!r}"
        try:
            certificate = x509.load_der_x509_certificate(shown)
            certificate.verify_directly_issued_by(self.root)
        except (ValueError, TypeError, InvalidSignature):
            raise Refused(f"{what} comes without a certificate of this project's authority") from None
        site, role = _name(certificate, NameOID.COMMON_NAME), _name(certificate, NameOID.UNSTRUCTURED_NAME)
        if role != ROLE:
            raise Refused(
                f"{what} comes with the certificate of {site!r}, which is no site's but a {role or 'nobody'}'s"
            )
        if not certificate.not_valid_before_utc <= datetime.now(UTC) <= certificate.not_valid_after_utc:
            raise Refused(f"{what} comes with a certificate of site {site!r} that is not valid now")
        key: Any = certificate.public_key()
        try:
            key.verify(signature, self._statement(site, client, public), _PADDING, hashes.SHA256())
        except (InvalidSignature, ValueError, TypeError, AttributeError):
            raise Refused(f"{what} is not signed by the key of site {site!r}: it was changed on its way") from None
        return Vouched(public, site, key_fingerprint(key))

    def known(self, found: Vouched, heard: Mapping[str, str]) -> None:
        """Refuses a site that was not agreed on, or that has another key than before; `heard`: by site, the first."""
        agreed = self.peers
        if found.site == self.site:
            expected, by = self.fingerprint, "this is the name of this site, which"
        elif agreed is not None:
            if found.site not in agreed:
                raise Refused(
                    f"clients of site {found.site!r} are to be added up, and it is not among the peers of site.toml "
                    f"({', '.join(sorted(agreed)) or 'none'}); its key has the fingerprint {found.fingerprint}: ask "
                    "the site whether it is right, and add it"
                )
            expected, by = agreed[found.site], "[peers] of site.toml"
        else:
            expected, by = heard.get(found.site, found.fingerprint), "this site before, which"
        if found.fingerprint != expected:
            raise Refused(
                f"site {found.site!r} shows a key with the fingerprint {found.fingerprint}, and {by} has {expected}: "
                "somebody may have put a key of his own in between; ask the site by telephone which is right"
            )

    def _statement(self, site: str, client: str, public: bytes) -> bytes:
        """What is signed; lengths keep the parts apart."""
        root = self.root.fingerprint(hashes.SHA256())
        parts = (b"bespoke identity 1", root, site.encode(), client.encode(), public)
        return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _name(certificate: x509.Certificate, what: x509.ObjectIdentifier) -> str:
    found = certificate.subject.get_attributes_for_oid(what)
    return str(found[0].value) if found else ""
