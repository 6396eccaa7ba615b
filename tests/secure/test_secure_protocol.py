"""The protocol of secure sums: what comes out, what is refused, and what the server sees of a client."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange import Group, changed
from scipy.stats import chisquare

import bespoke
from bespoke.errors import UserError
from bespoke.messages.secure.keys import KEY_BYTES, AgreementKey, Identity
from bespoke.messages.secure.masking import add_mask, pair_key, self_key, sign
from bespoke.messages.secure.protocol import (
    SERVER,
    Kind,
    Terms,
    by_member,
    joined,
    members_of,
    members_to_bytes,
    needed,
    opened,
    pack,
    parted,
    signed,
    view_of,
)
from bespoke.messages.secure.refused import Overflow, Refused, TooFew
from bespoke.messages.secure.server import Server
from bespoke.messages.secure.shamir import join

PACKAGE = Path(bespoke.__file__).parent
BOUND = 2.0**-33  # of a client: half a step of 32 bits


def sum_of(group: Group, *members: int) -> Any:
    return sum(group.values[i] for i in members)


# -- what comes out ----------------------------------------------------------------------------------------------------
def test_the_sum_of_all() -> None:
    group = Group.of(5)
    found = group.sum(group.server())
    assert np.abs(found - sum_of(group, 0, 1, 2, 3, 4)).max() <= 5 * BOUND


@pytest.mark.parametrize(
    ("lost", "added"),
    [
        ({"without_shares": [1]}, [0, 2, 3, 4, 5]),  # nobody masked with it
        ({"before_masking": [0, 4]}, [1, 2, 3, 5]),  # its pairwise masks are taken off
        ({"before_consent": [2]}, [0, 1, 2, 3, 4, 5]),  # its numbers are there, and counted
        ({"before_revealing": [0, 3]}, [0, 1, 2, 3, 4, 5]),
        ({"without_shares": [5], "before_masking": [1], "before_revealing": [2]}, [0, 2, 3, 4]),
    ],
)
def test_clients_may_be_lost_at_every_step(lost: dict[str, list[int]], added: list[int]) -> None:
    """With a threshold of 4 of 6; in the last case only three are left in the end, which is not enough."""
    group = Group.of(6)
    server = group.server()
    if "without_shares" in lost and len(lost) > 1:
        with pytest.raises(TooFew, match="round 1: 3 of 6 clients revealed shares, and secure sums need 4"):
            group.sum(server, **lost)
        return
    found = group.sum(server, **lost)
    assert np.abs(found - sum_of(group, *added)).max() <= 6 * BOUND


@pytest.mark.parametrize("step", ["without_shares", "before_masking", "before_consent", "before_revealing"])
def test_below_the_threshold_nothing_is_added_up(step: str) -> None:
    group = Group.of(6)
    with pytest.raises(TooFew, match=r"3 of 6 clients .*need 4 \(threshold 4, least 3\)"):
        group.sum(group.server(), **{step: [0, 1, 2]})


def test_the_least_number_counts_where_it_is_above_the_threshold() -> None:
    group = Group.of(6, least=5)
    with pytest.raises(TooFew, match="4 of 6 clients sent their numbers, and secure sums need 5"):
        group.sum(group.server(least=5), before_masking=[0, 1])


def test_a_threshold_is_always_more_than_half() -> None:
    assert [needed(0.5, n) for n in (2, 3, 4, 5, 10)] == [2, 2, 3, 3, 6]
    assert [needed(0.6, n) for n in (3, 5, 10)] == [2, 3, 6]
    assert needed(1.0, 7) == 7


def test_no_numbers_and_many_blocks_of_numbers() -> None:
    for numbers in (0, 1, 8192, 8193):
        group = Group.of(3, numbers)
        assert np.abs(group.sum(group.server()) - sum_of(group, 0, 1, 2)).max(initial=0) <= 3 * BOUND


# -- what a client refuses ---------------------------------------------------------------------------------------------
def test_a_round_is_answered_once_so_that_no_difference_can_be_taken() -> None:
    """A server that repeats a round without one client would learn this client's numbers as a difference."""
    group = Group.of(5)
    group.sum(group.server(round=7))
    for number in (7, 6):
        with pytest.raises(Refused, match=f"has answered round 7 and takes no part in {number}"):
            group.sum(group.server(round=number, members=[0, 1, 2, 3]))
    group.sum(group.server(round=8, members=[0, 1, 2, 3]))


def test_a_round_that_failed_after_numbers_were_sent_is_not_repeated_either() -> None:
    group = Group.of(5)
    with pytest.raises(TooFew):
        group.sum(group.server(round=7), before_consent=[0, 1, 2])
    with pytest.raises(Refused, match="has answered round 7"):
        group.sum(group.server(round=7))


def test_a_round_that_failed_before_has_fresh_keys_in_the_next_attempt() -> None:
    group = Group.of(5)
    keys = []

    def watch(step: str, member: int, message: bytes) -> bytes:
        if step == "keys":
            keys.append(opened(message, Kind.KEYS).body)
        return message

    with pytest.raises(TooFew):
        group.sum(group.server(round=7), before_masking=[0, 1, 2, 3], without_shares=[4], hand=watch)
    found = group.sum(group.server(round=7), hand=watch)
    assert np.abs(found - sum_of(group, 0, 1, 2, 3, 4)).max() <= 5 * BOUND
    halves = [half for body in keys for half in (body[:KEY_BYTES], body[KEY_BYTES:])]
    assert len(set(halves)) == len(halves) == 20


def test_what_could_overflow_is_refused_before_anything_is_sent() -> None:
    group = Group.of(4)
    group.values[2] = np.array([0, 0, 0, 2.0**30, 0])
    with pytest.raises(Overflow, match=r"the value 1\.07374e\+09 is beyond 2\.68435e\+08") as refusal:
        group.sum(group.server())
    assert refusal.value.place == 3
    assert group.clients[2].spent == -1


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"least": 2}, "asks for a threshold of 3 and at least 3 clients"),
        ({"members": [0, 1]}, "asks for a threshold of 2 and at least 3 clients"),
    ],
)
def test_a_client_insists_on_its_own_limits(limits: dict[str, Any], problem: str) -> None:
    group = Group.of(5)
    with pytest.raises(Refused, match=problem):
        group.sum(group.server(**limits))


def test_a_threshold_below_the_clients_own_is_refused() -> None:
    group = Group.of(5, threshold=0.9)
    with pytest.raises(Refused, match=r"threshold 3, least 3.*asks for a threshold of 5"):
        group.sum(group.server())


def test_members_that_nobody_knows_are_refused() -> None:
    """The server may not fill a round with clients of its own, which would leave one honest client's numbers alone."""
    group = Group.of(4)
    server = group.server()
    server.terms = replace(server.terms, members=(*server.terms.members, "site of the server"))
    with pytest.raises(Refused, match="members that client 'site 0' does not know"):
        group.clients[0].keys(server.terms.to_bytes())


def test_terms_that_do_not_fit_together_are_refused() -> None:
    good = {"round": 1, "session": "s", "members": ("a", "b", "c"), "least": 3, "bits": 32, "numbers": 1}
    assert Terms.from_bytes(Terms(threshold=2, **good).to_bytes()).threshold == 2
    for threshold in (0, 1, 4):  # half of the members or fewer; more than there are
        with pytest.raises(Refused, match="nobody may agree to"):
            Terms(threshold=threshold, **good)
    for text in (b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"protocol":"bespoke secure sums, 1","members":[1]}'):
        with pytest.raises(Refused, match="not of the agreed form"):
            Terms.from_bytes(pack(Kind.TERMS, SERVER, text))


def test_steps_out_of_order_are_refused() -> None:
    group = Group.of(3)
    client = group.clients[0]
    with pytest.raises(Refused, match="not the next one"):
        client.consent(pack(Kind.SURVIVORS, SERVER, members_to_bytes([0, 1, 2])))
    group.sum(group.server())
    with pytest.raises(Refused, match="not the next one"):  # everything of the attempt is forgotten
        client.reveal(pack(Kind.CONSENTS, SERVER, b""))


def opening(group: Group) -> tuple[Server, dict[int, bytes]]:
    """An attempt as far as the inboxes."""
    server = group.server()
    roster = server.roster([client.keys(server.terms.to_bytes()) for client in group.clients])
    return server, server.inboxes([client.shares(roster) for client in group.clients])


def test_a_step_is_not_left_out() -> None:
    """Asked for its consent, a client that has not given its numbers refuses, and forgets the attempt."""
    group = Group.of(3)
    _, boxes = opening(group)
    client = group.clients[0]
    with pytest.raises(Refused, match="not the next one"):
        client.consent(pack(Kind.SURVIVORS, SERVER, members_to_bytes([0])))
    with pytest.raises(Refused, match="not the next one"):
        client.masked(boxes[0], group.values[0])


def test_a_step_that_failed_is_not_answered_again() -> None:
    group = Group.of(3)
    _, boxes = opening(group)
    client = group.clients[0]
    with pytest.raises(Refused, match="was changed on its way"):
        client.masked(changed(boxes[0]), group.values[0])
    with pytest.raises(Refused, match="not the next one"):
        client.masked(boxes[0], group.values[0])


# -- what is changed on its way ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", ["keys", "shares", "masked", "consent", "reveal"])
def test_a_message_with_one_changed_bit_is_refused(step: str) -> None:
    group = Group.of(4)

    def hand(at: str, member: int, message: bytes) -> bytes:
        return changed(message) if (at, member) == (step, 2) else message

    with pytest.raises(Refused, match=r"client 'site 2' in round 1 is not signed"):
        group.sum(group.server(), hand=hand)


@pytest.mark.parametrize("step", ["keys", "shares", "masked", "consent", "reveal"])
def test_a_message_of_another_round_is_refused(step: str) -> None:
    group = Group.of(4)
    kept = {}

    def keep(at: str, member: int, message: bytes) -> bytes:
        kept[at, member] = message
        return message

    group.sum(group.server(1), hand=keep)
    with pytest.raises(Refused, match="site 1' in round 2 is not signed"):
        group.sum(group.server(2), hand=lambda a, m, sent: kept[a, m] if (a, m) == (step, 1) else sent)


def test_a_message_sent_twice_is_refused() -> None:
    group = Group.of(4)
    server = group.server()
    sent = [client.keys(server.terms.to_bytes()) for client in group.clients]
    with pytest.raises(Refused, match="'site 3' has sent KEYS twice"):
        server.roster([*sent, sent[3]])


def test_a_key_swapped_by_the_server_is_refused_by_the_others() -> None:
    """Who stands in the middle and shows others a key of its own has no signature for it."""
    group = Group.of(4)
    server = group.server()
    sent = [client.keys(server.terms.to_bytes()) for client in group.clients]
    swapped = AgreementKey().public * 2
    for forged in (
        pack(Kind.KEYS, 2, swapped, opened(sent[2], Kind.KEYS).signature),
        signed(Kind.KEYS, 2, swapped, server.digest, Identity()),
    ):
        roster = pack(Kind.ROSTER, SERVER, joined([*sent[:2], forged, sent[3]]))
        client = group.clients[0]
        with pytest.raises(Refused, match="KEYS of client 'site 2' in round 1 is not signed"):
            client.shares(roster)
        sent[0] = client.keys(server.terms.to_bytes())


def test_a_key_that_two_clients_claim_is_refused() -> None:
    group = Group.of(4)
    server = group.server()
    sent = [client.keys(server.terms.to_bytes()) for client in group.clients]
    copied = signed(Kind.KEYS, 3, opened(sent[2], Kind.KEYS).body, server.digest, group.clients[3].identity)
    with pytest.raises(Refused, match="a key that came twice"):
        group.clients[0].shares(pack(Kind.ROSTER, SERVER, joined([*sent[:3], copied])))


def test_shares_that_are_changed_or_swapped_are_refused_by_their_holder() -> None:
    for swap in (False, True):
        group = Group.of(4)
        server = group.server()
        roster = server.roster([client.keys(server.terms.to_bytes()) for client in group.clients])
        boxes = server.inboxes([client.shares(roster) for client in group.clients])
        box = boxes[1] if swap else changed(boxes[0])  # meant for another, or with a changed bit
        with pytest.raises(Refused, match=r"the shares of client 'site \d' was changed|sent no keys"):
            group.clients[0].masked(box, group.values[0])
        assert group.clients[0].spent == -1


@pytest.mark.parametrize("lost", [True, False], ids=["of a mask key", "of a seed"])
def test_a_share_that_its_holder_changed_is_noticed(lost: bool) -> None:
    """A holder signs whatever it likes; the secret that comes out is not the one that the client has committed to."""
    group = Group.of(5)
    server = group.server()

    def lie(step: str, member: int, message: bytes) -> bytes:
        if step != "reveal" or member != 1:
            return message
        body = opened(message, Kind.REVEALED).body
        about = 0 if lost else 2
        place = body.index(by_member(body)[about]) + 20
        return signed(Kind.REVEALED, 1, changed(body, place), server.digest, group.clients[1].identity)

    with pytest.raises(Refused, match=r"shares of (client 'site [02]' do not make|a secret do not belong)"):
        group.sum(server, before_masking=[0] if lost else [], hand=lie)


def test_clients_that_are_shown_different_survivors_reveal_nothing() -> None:
    """Otherwise one half could be asked for the seed and the other for the key of the same client."""
    group = Group.of(6)
    server = group.server()
    roster = server.roster([client.keys(server.terms.to_bytes()) for client in group.clients])
    boxes = server.inboxes([client.shares(roster) for client in group.clients])
    for i, client in enumerate(group.clients):
        server.add(client.masked(boxes[i], group.values[i]))
    lists = [(0, 1, 2, 3, 4), (1, 2, 3, 4, 5)]
    shown = [lists[0] if i < 3 else lists[1] for i in range(6)]
    consents = [c.consent(pack(Kind.SURVIVORS, SERVER, members_to_bytes(s))) for c, s in zip(group.clients, shown)]
    with pytest.raises(Refused, match="shown different survivors"):
        group.clients[0].reveal(pack(Kind.CONSENTS, SERVER, joined(consents)))
    with pytest.raises(TooFew, match="3 of 6 clients consented"):  # those of its own list alone are not enough
        group.clients[1].reveal(pack(Kind.CONSENTS, SERVER, joined(consents[:3])))


def test_a_consent_to_fewer_survivors_is_not_taken_for_one_to_all() -> None:
    """Every consent is of a survivor on the client's own list, and yet two clients were shown another list."""
    group = Group.of(6)
    server, boxes = opening(group)
    for i, client in enumerate(group.clients):
        server.add(client.masked(boxes[i], group.values[i]))
    shown = [(0, 1, 2, 3, 4) if i in (3, 4) else (0, 1, 2, 3, 4, 5) for i in range(6)]
    consents = [c.consent(pack(Kind.SURVIVORS, SERVER, members_to_bytes(s))) for c, s in zip(group.clients, shown)]
    with pytest.raises(Refused, match="shown different survivors"):
        group.clients[0].reveal(pack(Kind.CONSENTS, SERVER, joined(consents)))


def test_never_both_shares_of_one_client_are_revealed() -> None:
    """Each answer has one share of each member: put together they make seeds of survivors and keys of the lost."""
    group = Group.of(5)
    revealed: dict[int, dict[int, bytes]] = {}

    def watch(step: str, member: int, message: bytes) -> bytes:
        if step == "reveal":
            revealed[member] = by_member(opened(message, Kind.REVEALED).body)
        return message

    secrets = {}

    def remember(step: str, member: int, message: bytes) -> bytes:
        at = group.clients[member].attempt
        if step == "shares" and at is not None:
            secrets[member] = (at.for_masks.private, at.seed)
        return watch(step, member, message)

    group.sum(group.server(), before_masking=[4], hand=remember)
    assert set(revealed) == {0, 1, 2, 3}
    for member in range(5):
        secret = join({holder + 1: given[member] for holder, given in revealed.items()}, 3)
        key, seed = secrets[member]
        assert secret == (key if member == 4 else seed)


@pytest.mark.parametrize("junk", [b"", b"x", b"bsec\x01", b"bsec\x02\x01\0\0\0\0" + bytes(64), bytes(200)])
def test_junk_is_refused_in_one_sentence(junk: bytes) -> None:
    group = Group.of(3)
    server, client = group.server(), group.clients[0]
    with pytest.raises(UserError):
        server.roster([junk])
    with pytest.raises(UserError):
        client.keys(junk)
    for wrong in (b"\1", b"\5\0\0\0ab"):
        with pytest.raises(Refused, match="not whole"):
            parted(wrong)
    with pytest.raises(Refused, match="not in order"):
        members_of(members_to_bytes([2, 1]))


# -- what the server sees ----------------------------------------------------------------------------------------------
def test_the_masked_numbers_of_a_client_look_uniform() -> None:
    """Chi-square over the bytes, whatever the numbers are: all zeros, and all alike. Keys are random, so the level is
    one in a million; unmasked numbers fail by far."""
    for value in (0.0, 0.125):
        group = Group.of(3, 40_000)
        group.values = [np.full(40_000, value)] * 3
        seen: dict[int, bytes] = {}

        def watch(step: str, member: int, message: bytes, seen: dict[int, bytes] = seen) -> bytes:
            if step == "masked":
                seen[member] = opened(message, Kind.MASKED).body
            return message

        server = group.server()
        group.sum(server, hand=watch)
        for body in seen.values():
            counts = np.bincount(np.frombuffer(body, np.uint8), minlength=256)
            assert chisquare(counts).pvalue > 1e-6
            words = np.frombuffer(body, np.uint64)
            assert max(Counter(words.tolist()).values()) == 1
        plain = server.terms.fixed_point.encode(group.values[0]).view(np.uint8)
        assert chisquare(np.bincount(plain, minlength=256)).pvalue < 1e-100


def test_all_others_and_the_server_together_know_a_clients_numbers() -> None:
    """What is not claimed: the sum less what the others sent is what is left."""
    group = Group.of(4)
    found = group.sum(group.server())
    assert np.abs((found - sum_of(group, 1, 2, 3)) - group.values[0]).max() <= 4 * BOUND


def test_a_lost_client_whose_numbers_arrive_late_stays_masked() -> None:
    """Its pairwise masks were revealed; without the self mask the late message would be readable."""
    group = Group.of(5)
    server = group.server()
    roster = server.roster([client.keys(server.terms.to_bytes()) for client in group.clients])
    boxes = server.inboxes([client.shares(roster) for client in group.clients])
    for i in range(4):
        server.add(group.clients[i].masked(boxes[i], group.values[i]))
    at = group.clients[4].attempt
    assert at is not None
    private, seed = at.for_masks, at.seed
    words = np.frombuffer(opened(group.clients[4].masked(boxes[4], group.values[4]), Kind.MASKED).body, np.uint64)
    without_pairs = words.copy()
    for them in range(4):
        public = server.keys[them].body[KEY_BYTES:]
        add_mask(without_pairs, pair_key(private, 4, public, them, server.digest), -sign(4, them))
    point = server.terms.fixed_point
    assert np.abs(point.decode(without_pairs) - group.values[4]).max() > 1e3
    add_mask(without_pairs, self_key(seed, 4, server.digest), -1)
    assert np.abs(point.decode(without_pairs) - group.values[4]).max() <= BOUND
    survivors = server.survivors()
    assert members_of(opened(survivors, Kind.SURVIVORS).body) == (0, 1, 2, 3)
    with pytest.raises(Refused, match="survivors without client 'site 4'"):
        group.clients[4].consent(survivors)


def test_consents_hold_what_a_client_was_shown() -> None:
    assert view_of(b"roster", [2, 1]) == view_of(b"roster", (1, 2)) != view_of(b"roster", (1, 3))
    assert view_of(b"roster", [1, 2]) != view_of(b"other", [1, 2])


def test_what_needs_the_package_is_imported_where_secure_sums_are_asked_for() -> None:
    """Else every experiment would need the extra: what needs it is imported inside functions alone."""
    needing = {f"bespoke.messages.secure.{name}" for name in ("keys", "masking", "protocol", "client", "server")}
    theirs = ("members", "sums", "identities")
    needing |= {"bespoke.federation.masked", "cryptography", *(f"bespoke.deploy.federated.{name}" for name in theirs)}
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name in ("secure", "flare") or path.stem in ("masked", *theirs):
            continue  # `flare` belongs to the extra `deploy`, which brings it, too
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not needing & {".".join(name.split(".")[:4]) for name in found}, path
    settings = ast.parse((PACKAGE / "messages/secure/settings.py").read_text(encoding="utf-8"))
    assert not [n for n in ast.walk(settings) if isinstance(n, ast.ImportFrom) and n.module in needing]
