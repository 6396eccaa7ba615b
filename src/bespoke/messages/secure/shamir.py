"""Shamir's secret sharing (How to Share a Secret, CACM 1979), over the field of PRIME elements.

A secret s is the value at 0 of a random polynomial f of degree t - 1: f(x) = s + a_1 x + ... + a_{t-1} x^{t-1}. Holder
x has f(x). Any t holders know f, by Lagrange's interpolation; t - 1 holders know nothing, for every secret fits them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

from bespoke.messages.secure.refused import Refused, TooFew

PRIME = 2**256 + 297  # the smallest prime above all secrets, which have 32 bytes
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(
    secret: bytes, holders: Sequence[int], threshold: int, below: Callable[[int], int] = secrets.randbelow
) -> dict[int, bytes]:
    """A share for each holder, a number from 1; `below` draws a number below its argument."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    if not 1 <= threshold <= len(holders) or len(set(holders)) != len(holders) or min(holders) < 1:
        raise ValueError(f"{threshold} of the holders {holders}: different numbers from 1, as many as the threshold")
    coefficients = [int.from_bytes(secret, "big"), *(below(PRIME) for _ in range(threshold - 1))]
    return {holder: _value(coefficients, holder).to_bytes(SHARE_BYTES, "big") for holder in holders}


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret from at least `threshold` shares, given by their holders' numbers."""
    if len(shares) < threshold:
        raise TooFew(f"{len(shares)} shares of a secret, of which {threshold} are needed")
    points = [(holder, int.from_bytes(share, "big")) for holder, share in sorted(shares.items())[:threshold]]
    secret = 0
    for x, y in points:
        above = below = 1
        for other, _ in points:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        secret = (secret + y * above * pow(below, -1, PRIME)) % PRIME
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise Refused("the shares of a secret do not belong together: one of them was changed")
    return secret.to_bytes(SECRET_BYTES, "big")


def _value(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value
