"""Secure sums between sites: the simulation's results, and no message from which one client's or one site's update
could be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bespoke.deploy.federated.identities import Papers, key_fingerprint
from bespoke.deploy.federated.members import SiteMembers
from bespoke.errors import RemoteLost, UserError
from bespoke.federation.masked import SecureSums
from bespoke.federation.wire import _opened, decode_call, encode_call
from bespoke.messages.secure.client import Client
from bespoke.messages.secure.keys import Identity
from bespoke.messages.secure.settings import SecureConfig
from deploy.papers import agreed, certificate, key, papers
from deploy.sites_here import NAMES, Line, hub, site, three
from deploy.test_federation import assert_like
from deploy.test_federation_losses import run
from loopback import split_up
from test_protocol import STAGES, asked, people, ran

SECURE = {"secure": {"sums": True, "least": 3}, "cohort": {"size": 12, "dropout": 0.0}}


def both(name: str, folder: Path) -> dict[str, Line]:
    from bespoke.experiment.build import build

    config = asked(STAGES[name], **SECURE)
    ran(build(config, people()), folder / "here")
    lines = three(split_up(people(), 3), folder)
    hub(config, folder / "hub").run(lambda: lines)
    assert_like(folder / "hub", folder / "here")
    return lines


@pytest.mark.parametrize("name", ["fedavg", "hypcluster"])
def test_masked_sums_of_three_sites_are_those_of_a_simulation(name: str, tmp_path: Path) -> None:
    both(name, tmp_path)


def test_no_sites_update_is_on_the_wire(tmp_path: Path) -> None:
    """What a site answers to `train` has no numbers of any client; the sum that comes out is of all sites."""
    lines = both("fedavg", tmp_path)
    trained = 0
    for line in lines.values():
        for message, reply in zip(line.sent, line.received):
            if b'"call": "train"' in message[:400]:
                said: Any = _opened(reply, 2**20)["value"]
                assert not said.sums
                assert not said.each
                trained += 1
            if b'"call": "secure"' in message[:400]:
                answers = _opened(reply, 2**20).get("value")
                assert answers is not None
                for found in answers[0].values():
                    assert not isinstance(found, torch.Tensor)
    assert trained == 6


def encodings(values: np.ndarray) -> list[bytes]:
    """A vector as bytes, in the forms in which it could travel."""
    fixed = np.rint(np.ldexp(values, 32)).astype(np.int64)
    return [values.astype(np.float32).tobytes(), values.tobytes(), fixed.tobytes()]


@pytest.mark.parametrize("masks", [True, False], ids=["masked", "bare"])
def test_the_bytes_on_the_wire_hold_no_clients_and_no_sites_numbers(
    masks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searched for as floats and in fixed point. Without masks, which both sides then leave out, it is found."""
    seen: list[tuple[str, np.ndarray]] = []
    plain = Client.masked

    def masked(self: Client, message: bytes, values: Any) -> bytes:
        seen.append((self.name, values.copy()))
        return plain(self, message, values)

    monkeypatch.setattr(Client, "masked", masked)
    if not masks:
        for module in ("client", "server"):
            monkeypatch.setattr(f"bespoke.messages.secure.{module}.add_mask", lambda *given: None)
    parts = split_up(people(), 3)
    lines = three(parts, tmp_path)
    hub(asked(STAGES["fedavg"], **SECURE), tmp_path / "hub").run(lambda: lines)
    wires = b"".join(reply for line in lines.values() for reply in [*line.received, *line.sent])
    assert len(seen) == 24  # two rounds of twelve clients
    of_clients = [any(form in wires for form in encodings(values)) for _, values in seen]
    assert of_clients == [not masks] * 24
    for part in parts:
        names = {f"{int(key):016x}" for key in part.keys}
        for some in (seen[:12], seen[12:]):
            update = np.sum([values for name, values in some if name in names], axis=0)
            assert not any(form in wires for form in encodings(update))  # no site adds up by itself


def test_a_site_that_is_killed_is_who_it_was_and_answers_no_round_twice(tmp_path: Path) -> None:
    config = asked(STAGES["fedavg"], **SECURE)
    expected = run(tmp_path / "calm", config=config)
    many = sum(1 for _ in (tmp_path / "calm" / "north" / "sent.jsonl").open())
    for at in range(8, many, max(many // 4, 1)):
        folder = tmp_path / f"killed at {at}"
        found = run(folder, lambda site, n, at=at: site == "north" and n == at, config)
        for name in ("rounds.jsonl", "clients.parquet"):
            assert found[name] == expected[name], f"killed at message {at}: {name}"
    host = site(split_up(people(), 3)[1], folder / "north").host
    members = SiteMembers(SecureConfig(**SECURE["secure"]), host.state / "secure", papers("north"))
    assert len(members.directory) == 12
    assert len(members.spent) == 4
    assert min(members.spent.values()) > 0


def test_a_client_with_another_identity_than_before_is_refused(tmp_path: Path) -> None:
    """West has lost its secret; the other sites know its clients, and take part in no sum with strangers."""
    config = asked(STAGES["fedavg"], **SECURE)
    run(tmp_path, config=config)
    (tmp_path / "west" / "secure" / "identity.key").unlink()
    with pytest.raises(UserError, match=r"client '[0-9a-f]{16}' has another identity than before"):
        hub(config, tmp_path / "again").run(lambda: three(split_up(people(), 3), tmp_path))


class Nine:
    """Nine clients of a site and their sums; a new one of the same folder is the site after a restart."""

    def __init__(self, folder: Path, rounds: int = 0) -> None:
        secure = SecureConfig(sums=True, least=3)
        self.members = SiteMembers(secure, folder, papers("north"))
        self.sums = SecureSums(secure, np.arange(9, dtype=np.uint64), rounds=rounds)
        self.values = torch.arange(9.0)[:, None] + torch.tensor([0.25, 0.5])
        self.lost_at = ""

    def ask(self, step: str, messages: dict[int, Any]) -> dict[int, Any]:
        if step == self.lost_at:
            raise RemoteLost(step)
        return self.members.answer(step, messages)

    def sum(self, key: int, clients: range) -> list[float]:
        self.members.begin(key)
        self.members.hold({"w": self.values}, list(range(9)))
        found = self.sums.add_up(self.ask, np.array(clients), np.array(clients), None, 1)
        return [float(value) for value in found.sums["w"]]


def test_a_round_is_not_added_up_again_with_a_part_of_its_clients(tmp_path: Path) -> None:
    """The difference of both sums would be a site's update. The same sum again, after a loss, tells nothing."""
    nine = Nine(tmp_path)
    assert nine.sum(7, range(9)) == [36 + 9 * 0.25, 36 + 9 * 0.5]
    again = Nine(tmp_path, rounds=5)
    assert again.sum(7, range(9)) == [36 + 9 * 0.25, 36 + 9 * 0.5]
    with pytest.raises(UserError, match="was added up before with 9 clients, and now with 6, some of them the same"):
        again.sum(7, range(6))
    assert again.sum(8, range(6)) == [15 + 6 * 0.25, 15 + 6 * 0.5]
    assert again.sum(8, range(6, 9)) == [21 + 3 * 0.25, 21 + 3 * 0.5]  # another group of the same round


def test_a_round_that_nobody_consented_to_may_be_added_up_with_fewer(tmp_path: Path) -> None:
    """Its numbers were sent and stay masked; from the consents on, nobody knows what the hub has unmasked."""
    nine = Nine(tmp_path)
    for at in ("shares", "masked", "consent"):
        nine.lost_at = at
        with pytest.raises(RemoteLost):
            nine.sum(7, range(9))
    nine.lost_at = "reveal"
    with pytest.raises(RemoteLost):
        nine.sum(8, range(9))
    nine.lost_at = ""
    assert nine.sum(7, range(6)) == [15 + 6 * 0.25, 15 + 6 * 0.5]
    with pytest.raises(UserError, match="was added up before with 9 clients, and now with 6"):
        nine.sum(8, range(6))


def test_the_same_members_with_other_survivors_are_refused(tmp_path: Path) -> None:
    """A hub that says of some clients, in the second attempt, that their numbers have not come."""
    nine = Nine(tmp_path)
    nine.sum(7, range(9))
    nine.members.begin(7)
    nine.members.hold({"w": nine.values}, list(range(9)))
    with pytest.raises(UserError, match="was added up before with 9 clients, and now with 8"):
        nine.sums.add_up(nine.ask, np.arange(9), np.arange(8), None, 1)


# -- who vouches for whom ----------------------------------------------------------------------------------------------
CLIENT, PUBLIC = "00000000000000aa", bytes(range(32))


def heard(folder: Path, said: bytes, shown: Papers | None = None, client: str = CLIENT) -> SiteMembers:
    """North is told, by its hub, who this client of west is."""
    members = SiteMembers(SecureConfig(sums=True, least=3), folder, shown or papers("north"))
    members.answer("directory", {0: {client: said}})
    return members


def by_the_hub(name: str = "west", public: bytes = PUBLIC, **how: Any) -> bytes:
    """The word of a hub that has made itself a certificate with this name, which its authority may do."""
    made = replace(papers("west"), key=key("hub"), certificate=certificate(name, key("hub").public_key(), **how))
    return made.vouch(CLIENT, public)


def test_a_key_that_the_hub_has_swapped_is_refused(tmp_path: Path) -> None:
    said = papers("west").vouch(CLIENT, PUBLIC)
    assert heard(tmp_path, said).directory == {CLIENT: PUBLIC}
    for place in (0, 40, len(said) - 1):  # the key itself, the certificate, the signature
        changed = bytearray(said)
        changed[place] ^= 1
        with pytest.raises(UserError, match=r"is not signed by the key of site 'west'|without a certificate of this"):
            heard(tmp_path / str(place), bytes(changed))
    with pytest.raises(UserError, match="is not signed by the key of site 'west'"):
        heard(tmp_path / "another client", said, client="00000000000000bb")
    for junk in (b"", PUBLIC, said[:100]):
        with pytest.raises(UserError, match="comes without a certificate of this project's authority"):
            heard(tmp_path / "junk", junk)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"by": "another authority"}, "comes without a certificate of this project's authority"),
        ({"days": -1}, "with a certificate of site 'west' that is not valid now"),
        ({"role": "server"}, "the certificate of 'west', which is no site's but a server's"),
        ({"role": "project_admin"}, "is no site's but a project_admin's"),
        ({"name": "north"}, "site 'north' shows a key with the fingerprint .* the name of this site, which has"),
    ],
)
def test_a_word_of_somebody_else_is_refused(how: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        heard(tmp_path, by_the_hub(**how))


def test_a_hub_that_signs_itself_a_certificate_is_refused_by_sites_that_have_agreed(tmp_path: Path) -> None:
    """The limit, and what lifts it: at the very first contact nobody can tell, unless fingerprints were compared."""
    right, wrong = papers("west").fingerprint, key_fingerprint(key("hub").public_key())
    with pytest.raises(UserError, match=f"{wrong}, and .peers. of site.toml has {right}: somebody may have put"):
        heard(tmp_path / "agreed", by_the_hub(), agreed("north", west=right))
    with pytest.raises(UserError, match=r"clients of site 'ghost' .* not among the peers of site.toml \(west\)"):
        heard(tmp_path / "invented", by_the_hub("ghost"), agreed("north", west=right))
    heard(tmp_path / "before", papers("west").vouch(CLIENT, PUBLIC))
    with pytest.raises(UserError, match=f"{wrong}, and this site before, which has {right}: somebody may have put"):
        heard(tmp_path / "before", by_the_hub())
    deceived = heard(tmp_path / "first", by_the_hub())
    assert deceived.directory == {CLIENT: PUBLIC}
    assert deceived.sites == {"west": wrong}  # what `bespoke deploy peers` shows, to compare


def test_what_was_heard_before_sites_agreed_does_not_count(tmp_path: Path) -> None:
    """A hub that has lied at first contact, and then says nothing more of that client: it is a stranger."""
    heard(tmp_path, by_the_hub())
    peers = {"west": papers("west").fingerprint}
    assert SiteMembers(SecureConfig(sums=True, least=3), tmp_path, papers("north")).directory == {CLIENT: PUBLIC}
    assert SiteMembers(SecureConfig(sums=True, least=3), tmp_path, agreed("north", **peers)).directory == {}
    right = bytes(reversed(PUBLIC))
    found = heard(tmp_path, papers("west").vouch(CLIENT, right), agreed("north", **peers))
    assert found.directory == {CLIENT: right}
    assert found.sites == peers


def test_a_renewed_certificate_has_the_same_key(tmp_path: Path) -> None:
    heard(tmp_path, papers("west").vouch(CLIENT, PUBLIC))
    renewed = replace(papers("west"), certificate=certificate("west", key("west").public_key(), days=300))
    assert heard(tmp_path, renewed.vouch(CLIENT, PUBLIC)).directory == {CLIENT: PUBLIC}


def test_sites_that_have_agreed_add_up_and_a_hub_in_between_is_noticed(tmp_path: Path) -> None:
    """The hub gives north and east its own identities in the place of west's: the first sum is refused."""
    config = asked(STAGES["fedavg"], **SECURE)
    prints = {name: papers(name).fingerprint for name in NAMES}

    def lines(folder: Path, kind: type[Line]) -> dict[str, Line]:
        shown = {name: agreed(name, **{peer: prints[peer] for peer in NAMES if peer != name}) for name in NAMES}
        return {
            name: kind(site(rows, folder / name, shown=shown[name])) for name, rows in zip(NAMES, split_up(people(), 3))
        }

    class Between(Line):
        def send(self, message: bytes) -> None:
            call = decode_call(message)
            if call.values.get("step") == "directory":
                (met,) = call.values["messages"].values()
                public = Identity().public
                swapped = {
                    name: replace(papers("west"), key=key("hub"), certificate=mine).vouch(name, public)
                    if b"west" in said
                    else said
                    for name, said in met.items()
                }
                message = encode_call(replace(call, values={**call.values, "messages": {0: swapped}}))
            super().send(message)

    mine = certificate("west", key("hub").public_key())
    there = lines(tmp_path / "calm", Line)
    hub(config, tmp_path / "calm" / "hub").run(lambda: there)
    assert json.loads((tmp_path / "calm" / "east" / "secure" / "sites.json").read_text())["west"] == prints["west"]
    there = lines(tmp_path / "between", Between)
    with pytest.raises(UserError, match=r"site 'west' shows a key with the fingerprint .* \[peers\] of site.toml has"):
        hub(config, tmp_path / "between" / "hub").run(lambda: there)
