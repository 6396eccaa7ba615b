"""Secure sums: the messages. Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving ML, CCS 2017, Fig. 4,
in the variant against an active server.

| step | a client is sent | and answers |
|---|---|---|
| keys | the terms: round, members, threshold, size | two fresh public keys |
| shares | everybody's keys (the roster) | shares of its mask key and of its self mask's seed, sealed for each member |
| masked | the sealed shares meant for it (the inbox) | its numbers under all masks |
| consent | the survivors: whose numbers arrived | its signature to exactly these survivors |
| reveal | the survivors' consents | of each survivor the share of the seed, of each other member that of the mask key |

The server adds the survivors' numbers, and removes their self masks and their pairwise masks with lost members. A
client answers each step once. It sends its numbers for a round once, in whichever attempt (`Client.spent`). It never
sends both shares of one member, because the survivors are agreed on once.

Messages are bytes: a head of fixed form, a signature, a body. A client signs its messages with its identity over the
kind, the sender, the digest of the terms, and the body. So a message of another round, attempt, sender or kind does not
verify. Members are numbered from 0 in the order of the terms.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np

from bespoke.messages.secure.fixed_point import FixedPoint, Words
from bespoke.messages.secure.keys import SIGNATURE_BYTES, Identity, verify
from bespoke.messages.secure.refused import Refused, TooFew

MAGIC = b"bsec\x01"  # with the version of the form
HEAD = struct.Struct("<5sBI")  # magic, kind, sender
SERVER = 2**32 - 1  # as a sender
MOST_MEMBERS = 2**16
MOST_NUMBERS = 2**32
VERSION = "bespoke secure sums, 1"


class Kind(IntEnum):
    TERMS = 0
    KEYS = 1
    ROSTER = 2
    SHARES = 3
    INBOX = 4
    MASKED = 5
    SURVIVORS = 6
    CONSENT = 7
    CONSENTS = 8
    REVEALED = 9


def needed(threshold: float, members: int) -> int:
    """The number of members that have to stay to the end; always more than half.

    With half or fewer, a server could obtain consents to two disjoint sets of survivors.
    """
    return max(math.ceil(threshold * members - 1e-9), members // 2 + 1)


@dataclass(frozen=True)
class Terms:
    """The terms of one attempt at a sum, on which all parties must agree."""

    round: int
    session: str  # drawn by the server, so that two attempts differ
    members: tuple[str, ...]
    threshold: int  # members that have to stay to the end, and shares that make a secret
    least: int  # the least number of clients in a sum
    bits: int
    numbers: int

    def __post_init__(self) -> None:
        fits = (
            len(set(self.members)) == len(self.members) <= MOST_MEMBERS
            and 2 * self.threshold > len(self.members) >= self.threshold >= 1
            and self.least >= 2
            and 0 <= self.bits <= 52
            and 0 <= self.numbers < MOST_NUMBERS
            and self.round >= 0
        )
        if not fits:
            raise Refused(f"terms of secure sums that nobody may agree to: {str(self)[:500]}")

    @property
    def fixed_point(self) -> FixedPoint:
        return FixedPoint(self.bits, len(self.members))

    def enough(self, many: int, what: str) -> None:
        """Refuses fewer clients than the threshold or the least number."""
        if many < max(self.threshold, self.least):
            raise TooFew(
                f"round {self.round}: {many} of {len(self.members)} clients {what}, and secure sums need "
                f"{max(self.threshold, self.least)} (threshold {self.threshold}, least {self.least})"
            )

    def to_bytes(self) -> bytes:
        text = json.dumps({"protocol": VERSION, **asdict(self)}, sort_keys=True, separators=(",", ":"))
        return pack(Kind.TERMS, SERVER, text.encode())

    @classmethod
    def from_bytes(cls, message: bytes) -> Terms:
        try:
            table = json.loads(opened(message, Kind.TERMS).body)
            if table.pop("protocol") != VERSION:
                raise Refused(f"terms of another protocol than {VERSION!r}")
            types = {"round": int, "session": str, "threshold": int, "least": int, "bits": int, "numbers": int}
            members = table.pop("members")
            if set(table) != set(types) or not all(type(table[name]) is kind for name, kind in types.items()):
                raise ValueError
            if type(members) is not list or not all(type(member) is str for member in members):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Refused("terms of secure sums that are not of the agreed form") from None
        return cls(members=tuple(members), **table)

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.to_bytes()).digest()


# -- the form of messages ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Message:
    """The parts of a message; the server's messages have an empty signature."""

    kind: Kind
    sender: int
    signature: bytes
    body: bytes


def pack(kind: Kind, sender: int, body: bytes, signature: bytes = b"") -> bytes:
    return b"".join((HEAD.pack(MAGIC, kind, sender), signature, body))


def opened(message: bytes, kind: Kind) -> Message:
    """Parses a message of this kind and refuses anything else. It does not verify the signature."""
    try:
        magic, found, sender = HEAD.unpack_from(message)
    except struct.error:
        raise Refused("a message that is too short") from None
    if magic != MAGIC or found != kind:
        raise Refused(f"a message that is no {kind.name} of this version of the protocol")
    signed = SIGNATURE_BYTES if sender != SERVER else 0
    if len(message) < HEAD.size + signed:
        raise Refused("a message that is too short")
    rest = memoryview(message)[HEAD.size :]
    return Message(kind, sender, bytes(rest[:signed]), bytes(rest[signed:]))


def signed(kind: Kind, sender: int, body: bytes, terms: bytes, identity: Identity) -> bytes:
    """A client's signed message; terms: their digest."""
    return pack(kind, sender, body, identity.sign(_to_sign(kind, sender, body, terms)))


def trusted(message: bytes, kind: Kind, terms: Terms, digest: bytes, directory: Mapping[str, bytes]) -> Message:
    """A client's message of this kind, with its signature verified."""
    found = opened(message, kind)
    if found.sender >= len(terms.members):
        raise Refused(f"a {kind.name} of a client that is no member")
    name = terms.members[found.sender]
    if name not in directory:
        raise Refused(f"client {name!r} is not in the directory")
    what = f"the message {kind.name} of client {name!r} in round {terms.round}"
    verify(directory[name], found.signature, _to_sign(kind, found.sender, found.body, digest), what)
    return found


def _to_sign(kind: Kind, sender: int, body: bytes, terms: bytes) -> bytes:
    return HEAD.pack(MAGIC, kind, sender) + terms + hashlib.sha256(body).digest()


# -- the form of bodies ------------------------------------------------------------------------------------------------
def joined(parts: Iterable[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def parted(body: bytes) -> list[bytes]:
    """The inverse of `joined`."""
    parts, place = [], 0
    while place < len(body):
        if place + 4 > len(body):
            raise Refused("a message whose parts are not whole")
        (size,) = struct.unpack_from("<I", body, place)
        if place + 4 + size > len(body):
            raise Refused("a message whose parts are not whole")
        parts.append(body[place + 4 : place + 4 + size])
        place += 4 + size
    return parts


def addressed(parts: Mapping[int, bytes]) -> bytes:
    """Joins bytes by member into one body."""
    return joined(struct.pack("<I", member) + part for member, part in sorted(parts.items()))


def by_member(body: bytes) -> dict[int, bytes]:
    """The inverse of `addressed`; a member that occurs twice is refused."""
    found: dict[int, bytes] = {}
    for part in parted(body):
        if len(part) < 4:
            raise Refused("a message whose parts are not whole")
        (member,) = struct.unpack_from("<I", part)
        if member in found:
            raise Refused("a message that names a member twice")
        found[member] = part[4:]
    return found


def numbers_to_bytes(numbers: Words) -> bytes:
    return numbers.astype("<u8", copy=False).tobytes()


def numbers_of(body: bytes, many: int) -> Words:
    if len(body) != 8 * many:
        raise Refused(f"{len(body):,} bytes of masked numbers, where {8 * many:,} were agreed on")
    return np.frombuffer(body, dtype="<u8")


def members_to_bytes(members: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(members)}I", *members)


def members_of(body: bytes) -> tuple[int, ...]:
    """Parses numbers of members, in ascending order."""
    if len(body) % 4:
        raise Refused("a list of members that is not whole")
    members = struct.unpack(f"<{len(body) // 4}I", body)
    if any(a >= b for a, b in pairwise(members)):
        raise Refused("a list of members that is not in order")
    return members


def view_of(roster: bytes, senders: Iterable[int]) -> bytes:
    """A digest of what a client received: the roster, and whose shares arrived. All clients must have the same."""
    return hashlib.sha256(hashlib.sha256(roster).digest() + members_to_bytes(sorted(senders))).digest()


def commitment_to(seed: bytes, member: int, terms: bytes) -> bytes:
    """A commitment to a seed, with which the server checks a seed that it joined from shares."""
    return hashlib.sha256(b"self mask seed" + terms + struct.pack("<I", member) + seed).digest()
