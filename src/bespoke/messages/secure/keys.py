"""Keys: identities (Ed25519), key agreement (X25519), and derived keys (HKDF, ChaCha20).

An identity is permanent. A pair of agreement keys serves one attempt at one round and is then discarded. Every derived
key depends on the terms of the attempt and on its `purpose`, so none is ever used twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from bespoke.messages.secure.fixed_point import Words
from bespoke.messages.secure.refused import Refused

KEY_BYTES = 32
SIGNATURE_BYTES = 64
BLOCK = 2**16  # bytes of a keystream at a time: they stay in the processor's cache
_ZEROS = bytes(BLOCK)
_NONCE = bytes(12)  # every key encrypts a single message or makes a single stream, so the nonce may be fixed


class Identity:
    """A client's signing key. Between machines it is that of the site's certificate."""

    def __init__(self, private: bytes | None = None) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private) if private else Ed25519PrivateKey.generate()

    @property
    def public(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


def verify(public: bytes, signature: bytes, message: bytes, what: str) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise Refused(f"{what} is not signed by the key that the directory has for this client") from None


class AgreementKey:
    """A private key of X25519, for one attempt at one round."""

    def __init__(self, private: bytes | None = None) -> None:
        self._key = X25519PrivateKey.from_private_bytes(private) if private else X25519PrivateKey.generate()

    @property
    def public(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    @property
    def private(self) -> bytes:
        return self._key.private_bytes_raw()

    def agree(self, public: bytes) -> bytes:
        """The shared secret, which the owner of the other key computes too."""
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:  # a point of small order, whose result is public
            raise Refused("a public key of another client is no key that can be agreed with") from None


def fresh_seed() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def derived(secret: bytes, terms: bytes, purpose: bytes) -> bytes:
    """HKDF with SHA-256; `terms`: the digest of the attempt's terms."""
    return HKDF(SHA256(), KEY_BYTES, salt=terms, info=purpose).derive(secret)


def seal(key: bytes, message: bytes, associated: bytes) -> bytes:
    """Encrypts for the owner of the key; `associated` is authenticated too, but not sent."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, message, associated)


def unseal(key: bytes, sealed: bytes, associated: bytes, what: str) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, associated)
    except InvalidTag:
        raise Refused(f"{what} was changed on its way, or is not meant for this client and round") from None


def stream(key: bytes, numbers: int) -> Iterator[tuple[slice, Words]]:
    """Words of a ChaCha20 keystream (RFC 8439, counter from 0), a block at a time; the block's memory is reused."""
    encryptor = Cipher(ChaCha20(key, bytes(4) + _NONCE), mode=None).encryptor()
    space = bytearray(BLOCK)
    words = np.frombuffer(space, dtype="<u8")
    for begin in range(0, numbers, BLOCK // 8):
        many = min(numbers - begin, BLOCK // 8)
        encryptor.update_into(_ZEROS[: 8 * many], space)
        yield slice(begin, begin + many), words[:many]
