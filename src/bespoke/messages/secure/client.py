"""The client of secure sums. It trusts only the directory of identities, and enforces its own limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bespoke.messages.secure.fixed_point import Floats
from bespoke.messages.secure.keys import KEY_BYTES, AgreementKey, Identity, derived, fresh_seed, seal, unseal
from bespoke.messages.secure.masking import add_mask, pair_key, self_key, sign
from bespoke.messages.secure.protocol import (
    Kind,
    Terms,
    addressed,
    by_member,
    commitment_to,
    members_of,
    members_to_bytes,
    needed,
    numbers_to_bytes,
    opened,
    parted,
    signed,
    trusted,
    view_of,
)
from bespoke.messages.secure.refused import Refused
from bespoke.messages.secure.shamir import SHARE_BYTES, split


@dataclass
class _Attempt:
    """A client's state during one attempt."""

    terms: Terms
    digest: bytes
    me: int
    next: Kind  # the next step that it answers
    for_shares: AgreementKey = field(default_factory=AgreementKey)
    for_masks: AgreementKey = field(default_factory=AgreementKey)
    seed: bytes = field(default_factory=fresh_seed)
    keys: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # of others: (for shares, for masks)
    roster: bytes = b""
    shares: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # held for members: (of mask key, of seed)
    view: bytes = b""
    survivors: tuple[int, ...] = ()


@dataclass
class Client:
    """A member of secure sums. Keep `spent` across restarts: it ensures that no round is answered twice."""

    name: str
    identity: Identity
    directory: Mapping[str, bytes]  # the public keys of identities by name; between machines: of certificates
    least: int = 3  # it refuses sums of fewer clients
    threshold: float = 0.6  # it refuses a lower threshold
    spent: int = -1  # the last round for which it sent its numbers
    attempt: _Attempt | None = None

    def keys(self, message: bytes) -> bytes:
        """Agrees to terms; a new attempt at a round ends the one before."""
        terms = Terms.from_bytes(message)
        self.attempt = None
        if terms.round <= self.spent:
            raise Refused(f"client {self.name!r} has answered round {self.spent} and takes no part in {terms.round}")
        if self.name not in terms.members or not set(terms.members) <= set(self.directory):
            raise Refused(f"round {terms.round}: members that client {self.name!r} does not know, or without it")
        wanted = needed(self.threshold, len(terms.members))
        if terms.least < self.least or terms.threshold < wanted or len(terms.members) < terms.least:
            raise Refused(
                f"round {terms.round}: {len(terms.members)} members, threshold {terms.threshold}, least {terms.least}, "
                f"where client {self.name!r} asks for a threshold of {wanted} and at least {self.least} clients"
            )
        self.attempt = made = _Attempt(terms, terms.digest, terms.members.index(self.name), Kind.SHARES)
        return self._message(made, Kind.KEYS, made.for_shares.public + made.for_masks.public)

    def shares(self, message: bytes) -> bytes:
        """Verifies all keys and shares both secrets among their owners."""
        at = self._at(Kind.SHARES, Kind.MASKED)
        at.roster = opened(message, Kind.ROSTER).body
        for part in parted(at.roster):
            found = trusted(part, Kind.KEYS, at.terms, at.digest, self.directory)
            if found.sender in at.keys or len(found.body) != 2 * KEY_BYTES:
                raise Refused(f"round {at.terms.round}: keys that came twice, or are not whole")
            at.keys[found.sender] = found.body[:KEY_BYTES], found.body[KEY_BYTES:]
        at.terms.enough(len(at.keys), "sent keys")
        if at.keys.get(at.me) != (at.for_shares.public, at.for_masks.public):
            raise Refused(f"round {at.terms.round}: not the keys that client {self.name!r} has sent")
        flat = [key for pair in at.keys.values() for key in pair]
        if len(set(flat)) != len(flat):
            raise Refused(f"round {at.terms.round}: a key that came twice")
        holders = [member + 1 for member in sorted(at.keys)]
        of_key, of_seed = (split(secret, holders, at.terms.threshold) for secret in (at.for_masks.private, at.seed))
        at.shares[at.me] = of_key[at.me + 1], of_seed[at.me + 1]
        sealed = {
            them: seal(self._sealing(at, them, at.me, them), of_key[them + 1] + of_seed[them + 1], at.digest)
            for them in at.keys
            if them != at.me
        }
        return self._message(at, Kind.SHARES, commitment_to(at.seed, at.me, at.digest) + addressed(sealed))

    def masked(self, message: bytes, values: Floats) -> bytes:
        """The numbers under all masks. They are sent once per round, whatever happens afterwards."""
        at = self._at(Kind.MASKED, Kind.CONSENT)
        if len(values) != at.terms.numbers:
            raise Refused(f"round {at.terms.round}: {len(values):,} numbers, where {at.terms.numbers:,} were agreed on")
        numbers = at.terms.fixed_point.encode(values)
        for them, sealed in by_member(opened(message, Kind.INBOX).body).items():
            if them not in at.keys or them == at.me:
                raise Refused(f"round {at.terms.round}: shares of a client that sent no keys")
            what = f"round {at.terms.round}: the shares of client {at.terms.members[them]!r}"
            both = unseal(self._sealing(at, them, them, at.me), sealed, at.digest, what)
            if len(both) != 2 * SHARE_BYTES:
                raise Refused(f"{what} are not whole")
            at.shares[them] = both[:SHARE_BYTES], both[SHARE_BYTES:]
        at.terms.enough(len(at.shares), "shared their secrets")
        at.view = view_of(at.roster, at.shares)
        add_mask(numbers, self_key(at.seed, at.me, at.digest))
        for them in at.shares:
            if them != at.me:
                add_mask(numbers, pair_key(at.for_masks, at.me, at.keys[them][1], them, at.digest), sign(at.me, them))
        self.spent = at.terms.round
        return self._message(at, Kind.MASKED, numbers_to_bytes(numbers))

    def told(self, message: bytes) -> list[str]:
        """The names of the survivors that a message before `consent` says; none if no attempt is on."""
        survivors = members_of(opened(message, Kind.SURVIVORS).body)
        members = self.attempt.terms.members if self.attempt else ()
        return sorted(members[member] for member in survivors if member < len(members))

    def consent(self, message: bytes) -> bytes:
        """Signs the survivors: the clients whose numbers are added."""
        at = self._at(Kind.CONSENT, Kind.REVEALED)
        survivors = members_of(opened(message, Kind.SURVIVORS).body)
        if at.me not in survivors or not set(survivors) <= set(at.shares):
            raise Refused(f"round {at.terms.round}: survivors without client {self.name!r}, or who shared no secrets")
        at.terms.enough(len(survivors), "sent their numbers")
        at.survivors = survivors
        return self._message(at, Kind.CONSENT, at.view + members_to_bytes(survivors))

    def reveal(self, message: bytes) -> bytes:
        """Gives one share of each member, if enough survivors have signed the same survivors."""
        at = self._at(Kind.REVEALED, None)
        consents = set()
        for part in parted(opened(message, Kind.CONSENTS).body):
            found = trusted(part, Kind.CONSENT, at.terms, at.digest, self.directory)
            if found.body != at.view + members_to_bytes(at.survivors) or found.sender not in at.survivors:
                raise Refused(f"round {at.terms.round}: clients were shown different survivors, keys or shares")
            consents.add(found.sender)
        at.terms.enough(len(consents), "consented")
        given = {them: held[1 if them in at.survivors else 0] for them, held in at.shares.items()}
        return self._message(at, Kind.REVEALED, addressed(given))

    def _at(self, step: Kind, after: Kind | None) -> _Attempt:
        """The attempt, if this is its next step. A failed step ends the attempt, so that none is answered twice."""
        at, self.attempt = self.attempt, None
        if at is None or at.next != step:
            raise Refused(f"client {self.name!r} is asked for a step that is not the next one")
        if after is not None:
            at.next = after
        return at

    def _message(self, at: _Attempt, kind: Kind, body: bytes) -> bytes:
        self.attempt = at if kind is not Kind.REVEALED else None
        return signed(kind, at.me, body, at.digest, self.identity)

    def _sealing(self, at: _Attempt, them: int, sender: int, receiver: int) -> bytes:
        secret = at.for_shares.agree(at.keys[them][0])
        return derived(secret, at.digest, b"shares %d to %d" % (sender, receiver))
