"""Masks, modulo 2^64, that a client adds to its numbers: each number is unreadable, and the sum is unchanged.

For every pair of clients u < v there is a stream of numbers that both can compute. u adds it and v subtracts it, so it
cancels in their sum. Each client also adds its own stream, the self mask. Without the self mask, a client's numbers
would be readable if they arrived after the client was declared lost and its pairwise streams were revealed.
"""

from __future__ import annotations

from bespoke.messages.secure.fixed_point import Words
from bespoke.messages.secure.keys import AgreementKey, derived, stream


def pair_key(own: AgreementKey, me: int, other: bytes, them: int, terms: bytes) -> bytes:
    """The stream key of two clients; both compute the same key."""
    low, high = sorted((me, them))
    return derived(own.agree(other), terms, b"pairwise mask %d %d" % (low, high))


def self_key(seed: bytes, me: int, terms: bytes) -> bytes:
    return derived(seed, terms, b"self mask %d" % me)


def sign(me: int, them: int) -> int:
    """Whether a client adds or subtracts the stream that it shares with another client."""
    return 1 if me < them else -1


def add_mask(numbers: Words, key: bytes, sign: int = 1) -> None:
    """Adds a stream to the numbers in place, or subtracts it."""
    for part, words in stream(key, len(numbers)):
        if sign > 0:
            numbers[part] += words
        else:
            numbers[part] -= words
