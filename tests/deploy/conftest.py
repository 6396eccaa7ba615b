"""A project of a hub and three sites, whose signs of life come faster than usual so that tests need not wait."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from bespoke.deploy.flare import hardened, running
from bespoke.deploy.flare.loopback import Loopback, make_loopback
from deploy.attackers import LONG

SITES = ("north", "south", "west")


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """A sign of life every two seconds; a site is gone after six without one, and waits three for an answer.

    For tests of this module alone: a kit that is written so is refused by a process that does not know of it.
    """
    with (
        mock.patch.object(running, "HEARTBEAT", 2.0),
        mock.patch.object(hardened, "GONE", 6.0),
        mock.patch.object(hardened, "ANSWER", 3.0),
    ):
        yield


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, quick: None) -> Iterator[Loopback]:
    """A hub with the site `north`, started; the kits of `south` and `west` are there and do not run."""
    with make_loopback(tmp_path_factory.mktemp("project"), SITES, min_sites=1) as made:
        yield made.start("north", wait=LONG)
