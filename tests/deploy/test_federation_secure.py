"""Secure sums between sites: the simulation's results, and no message from which one client's or one site's update
could be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bespoke.deploy.federated.members import SiteMembers
from bespoke.errors import UserError
from bespoke.federation.wire import _opened
from bespoke.messages.secure.settings import SecureConfig
from deploy.sites_here import Line, hub, site, three
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
    members = SiteMembers(SecureConfig(**SECURE["secure"]), host.state / "secure")
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


def test_a_round_is_not_added_up_again_with_a_part_of_its_clients(tmp_path: Path) -> None:
    """The difference of both sums would be a site's update."""
    from bespoke.messages.secure.protocol import Terms
    from bespoke.messages.secure.server import terms_for

    members = SiteMembers(SecureConfig(sums=True, least=3), tmp_path)
    names = [f"{number:016x}" for number in range(9)]

    def terms(some: list[str], number: int) -> bytes:
        made: Terms = terms_for(number, some, 3, threshold=0.6, least=3, bits=32)
        return bytes(made.to_bytes())

    members.begin(7)
    met = {name: members.answer("enrol", {place: name})[place] for place, name in enumerate(names)}
    members.answer("directory", {0: met})
    members.answer("keys", dict.fromkeys(range(9), terms(names, 1)))
    members.answer("keys", dict.fromkeys(range(9), terms(names, 2)))  # the same clients again: after a loss
    again = SiteMembers(SecureConfig(sums=True, least=3), tmp_path)
    again.begin(7)
    again.answer("enrol", dict(enumerate(names)))
    with pytest.raises(UserError, match="was added up before with 9 clients, and now with 6, some of them the same"):
        again.answer("keys", dict.fromkeys(range(6), terms(names[:6], 3)))
    again.begin(8)
    again.answer("keys", dict.fromkeys(range(6), terms(names[:6], 4)))
    again.answer("keys", dict.fromkeys((6, 7, 8), terms(names[6:], 5)))  # another group of the same round
