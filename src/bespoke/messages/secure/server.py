"""The server of one attempt at a secure sum. It forwards messages and learns only the sum of the survivors."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bespoke.messages.secure.fixed_point import Floats, Words
from bespoke.messages.secure.keys import KEY_BYTES, AgreementKey
from bespoke.messages.secure.masking import add_mask, pair_key, self_key, sign
from bespoke.messages.secure.protocol import (
    SERVER,
    Kind,
    Message,
    Terms,
    addressed,
    by_member,
    commitment_to,
    joined,
    members_to_bytes,
    needed,
    numbers_of,
    pack,
    trusted,
)
from bespoke.messages.secure.refused import Refused
from bespoke.messages.secure.shamir import SHARE_BYTES, join

COMMITMENT_BYTES = 32


def terms_for(
    round: int, members: Sequence[str], numbers: int, *, threshold: float, least: int, bits: int
) -> Terms:  # fmt: skip
    """Terms of a new attempt, for members in the order of their numbers."""
    many = needed(threshold, len(members))
    return Terms(round, secrets.token_hex(16), tuple(members), many, least, bits, numbers)


@dataclass
class Server:
    """One attempt: ask for `terms`, then, in order, roster, inboxes, add and survivors, consents, total."""

    terms: Terms
    directory: Mapping[str, bytes]
    keys: dict[int, Message] = field(default_factory=dict)
    signed_keys: dict[int, bytes] = field(default_factory=dict)
    commitments: dict[int, bytes] = field(default_factory=dict)
    arrived: list[int] = field(default_factory=list)  # members whose numbers were added

    def __post_init__(self) -> None:
        self.digest = self.terms.digest
        self.sum: Words = np.zeros(self.terms.numbers, np.uint64)

    def _trusted(self, message: bytes, kind: Kind, known: Mapping[int, object] | Sequence[int]) -> Message:
        """Verifies a member's message for this step; `known`: the members that have already sent one."""
        found = trusted(message, kind, self.terms, self.digest, self.directory)
        if found.sender in known:
            raise Refused(f"client {self.terms.members[found.sender]!r} has sent {kind.name} twice")
        return found

    def roster(self, messages: Sequence[bytes]) -> bytes:
        """All keys, for all members that sent theirs."""
        for message in messages:
            found = self._trusted(message, Kind.KEYS, self.keys)
            if len(found.body) != 2 * KEY_BYTES:
                raise Refused(f"the keys of client {self.terms.members[found.sender]!r} are not whole")
            self.keys[found.sender], self.signed_keys[found.sender] = found, message
        self.terms.enough(len(self.keys), "sent keys")
        return pack(Kind.ROSTER, SERVER, joined(self.signed_keys[member] for member in sorted(self.keys)))

    def inboxes(self, messages: Sequence[bytes]) -> dict[int, bytes]:
        """The sealed shares by recipient, for members that sent theirs."""
        boxes: dict[int, dict[int, bytes]] = {}
        for message in messages:
            found = self._trusted(message, Kind.SHARES, self.commitments)
            sealed = by_member(found.body[COMMITMENT_BYTES:])
            if set(sealed) != set(self.keys) - {found.sender}:
                raise Refused(f"client {self.terms.members[found.sender]!r} did not share with every member")
            self.commitments[found.sender] = found.body[:COMMITMENT_BYTES]
            for member, part in sealed.items():
                boxes.setdefault(member, {})[found.sender] = part
        self.terms.enough(len(self.commitments), "shared their secrets")
        return {member: pack(Kind.INBOX, SERVER, addressed(boxes[member])) for member in sorted(self.commitments)}

    def add(self, message: bytes) -> None:
        """Adds a client's masked numbers to the sum when they arrive."""
        found = self._trusted(message, Kind.MASKED, self.arrived)
        if found.sender not in self.commitments:
            raise Refused(f"client {self.terms.members[found.sender]!r} sent numbers but no shares")
        self.sum += numbers_of(found.body, self.terms.numbers)
        self.arrived.append(found.sender)

    def survivors(self) -> bytes:
        """The clients whose numbers have arrived; later messages are ignored."""
        self.terms.enough(len(self.arrived), "sent their numbers")
        self.arrived.sort()
        return pack(Kind.SURVIVORS, SERVER, members_to_bytes(self.arrived))

    def consents(self, messages: Sequence[bytes]) -> bytes:
        """The consents of the survivors, for all survivors that consented."""
        found: dict[int, bytes] = {}
        for message in messages:
            found[self._trusted(message, Kind.CONSENT, found).sender] = message
        self.terms.enough(len(found), "consented")
        return pack(Kind.CONSENTS, SERVER, joined(found[member] for member in sorted(found)))

    def total(self, messages: Sequence[bytes]) -> Floats:
        """The sum over the survivors; callable once."""
        shares: dict[int, dict[int, bytes]] = {}  # by member: the holder's number -> share
        holders: set[int] = set()
        for message in messages:
            found = self._trusted(message, Kind.REVEALED, tuple(holders))
            given = by_member(found.body)
            if set(given) != set(self.commitments) or any(len(share) != SHARE_BYTES for share in given.values()):
                raise Refused(f"client {self.terms.members[found.sender]!r} did not reveal one share of each member")
            holders.add(found.sender)
            for member, share in given.items():
                shares.setdefault(member, {})[found.sender + 1] = share
        self.terms.enough(len(holders), "revealed shares")
        for member in sorted(self.commitments):
            secret = join(shares[member], self.terms.threshold)
            if member in self.arrived:
                self._take_off_self_mask(member, secret)
            else:
                self._take_off_pairwise_masks(member, secret)
        return self.terms.fixed_point.decode(self.sum)

    def _take_off_self_mask(self, member: int, seed: bytes) -> None:
        if commitment_to(seed, member, self.digest) != self.commitments[member]:
            raise self._changed(member)
        add_mask(self.sum, self_key(seed, member, self.digest), -1)

    def _take_off_pairwise_masks(self, lost: int, private: bytes) -> None:
        key = AgreementKey(private)
        if key.public != self.keys[lost].body[KEY_BYTES:]:
            raise self._changed(lost)
        for member in self.arrived:
            theirs = self.keys[member].body[KEY_BYTES:]
            add_mask(self.sum, pair_key(key, lost, theirs, member, self.digest), -sign(member, lost))

    def _changed(self, member: int) -> Refused:
        return Refused(
            f"round {self.terms.round}: the shares of client {self.terms.members[member]!r} do not make the secret "
            "that it has: one of them was changed; nothing is added up"
        )
