"""Randomness keyed by its purpose: (seed, round, client, purpose). The order of calls does not matter.

Every draw is a pure function of its key words, so a result does not depend on interruptions, engine, chunk size or
number of workers. The finalizer of SplitMix64 (Steele, Lea and Flood 2014) mixes the words, vectorized over clients
and rows. For other distributions, the mixed key seeds numpy's counter-based Philox.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Word = int | str | NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@lru_cache(maxsize=4096)
def text_key(text: str) -> int:
    """A stable 64-bit key of a text: the same on every machine and in every run."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def client_keys(ids: list[str]) -> NDArray[np.uint64]:
    """One key per client id."""
    digest = hashlib.blake2b
    joined = b"".join(digest(i.encode(), digest_size=8).digest() for i in ids)
    return np.frombuffer(joined, dtype="<u8").astype(np.uint64)


def _word(word: Word) -> NDArray[np.uint64] | np.uint64:
    if isinstance(word, str):
        return np.uint64(text_key(word))
    if isinstance(word, np.ndarray):
        return word.astype(np.uint64, copy=False)
    return np.uint64(int(word) & 0xFFFFFFFFFFFFFFFF)


def mix(*words: Word) -> NDArray[np.uint64]:
    """Hashes key words, broadcast against each other, into 64-bit integers."""
    with np.errstate(over="ignore"):
        state = np.asarray(_GOLDEN)
        for word in words:
            state = (state ^ _word(word)) + _GOLDEN
            state = (state ^ (state >> np.uint64(30))) * _M1
            state = (state ^ (state >> np.uint64(27))) * _M2
            state = state ^ (state >> np.uint64(31))
    return state


def uniform(*words: Word) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), one for each combination of key words."""
    return (mix(*words) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def generator(*words: Word) -> np.random.Generator:
    """A numpy generator (Philox, counter-based) for this key."""
    return np.random.Generator(np.random.Philox(key=int(mix(*words))))


def torch_seed(*words: Word) -> int:
    """A seed for a torch.Generator (which takes signed 64-bit integers)."""
    return int(mix(*words)) & 0x7FFFFFFFFFFFFFFF


def shuffles(key: Word, clients: NDArray[np.uint64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """One random order of range(size) per client, concatenated.

    Sorting random keys within segments is a shuffle; packing (segment, random bits, row) in one integer lets a single
    SIMD sort of the keys do it for all clients at once, several times faster than an argsort or a loop.
    """
    total = int(sizes.sum())
    if total == 0:
        return np.zeros(0, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    row = np.arange(total, dtype=np.int64) - np.repeat(starts, sizes)
    random = mix(np.repeat(mix(key, clients), sizes), row.astype(np.uint64))
    row_bits = max(int(sizes.max()) - 1, 1).bit_length()
    segment_bits = max(len(sizes) - 1, 1).bit_length()
    random_bits = 64 - row_bits - segment_bits
    segment = np.repeat(np.arange(len(sizes), dtype=np.uint64), sizes)
    if random_bits < 24:  # too few bits for fair ties: sort by all 64 bits instead
        return row[np.lexsort((random, segment))]
    packed = segment << np.uint64(64 - segment_bits)
    packed |= (random >> np.uint64(64 - random_bits)) << np.uint64(row_bits)
    packed |= row.astype(np.uint64)
    packed.sort()
    return (packed & np.uint64((1 << row_bits) - 1)).astype(np.int64)


def permuted(position: NDArray[np.int64], size: int, *words: Word) -> NDArray[np.int64]:
    """The image of `position` under a keyed permutation of range(size), in O(1) memory: a cycle-walked Feistel network.

    Round-robin sampling needs the k-th client of a random order without storing the order.
    """
    half = max((max(size - 1, 1).bit_length() + 1) // 2, 1)
    mask = np.uint64((1 << half) - 1)

    def encrypt(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = value >> np.uint64(half), value & mask
        for layer in range(6):
            left, right = right, left ^ (mix(*words, layer, right) & mask)
        return (left << np.uint64(half)) | right

    out = encrypt(position.astype(np.uint64))
    while (outside := out >= np.uint64(size)).any():
        out[outside] = encrypt(out[outside])
    return out.astype(np.int64)
