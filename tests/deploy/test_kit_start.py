"""A hub and three sites on loopback: started, registered by name, ended without traces."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from bespoke.deploy.flare.loopback import make_loopback
from bespoke.deploy.flare.running import session, sites_of, start
from bespoke.errors import UserError


def test_hub_and_sites_start_and_end(tmp_path: Path) -> None:
    with make_loopback(tmp_path).start() as project:
        with session(project.kit) as admin:
            assert sites_of(admin) == ["north", "south", "west"]
        with pytest.raises(UserError, match=r"runs already \(process \d+\)"):
            start(project.sites["north"])
        started = [running.process.pid for running in project.running.values()]
    assert not [pid for pid in started if psutil.pid_exists(pid)]
    assert not Path("/tmp/nvflare").exists()  # FLARE's default for jobs and snapshots
