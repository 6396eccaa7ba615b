"""The commands that stay: a hub and a site on loopback, started as people do, and ended by Ctrl-C without traces."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import tomli_w

from bespoke.deploy.flare.loopback import make_loopback
from bespoke.deploy.flare.running import session, sites_of, start
from bespoke.errors import UserError
from deploy.attackers import LONG, wait_until


@contextmanager
def staying(output: Path, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """A command that stays, with what it prints in a file; it is ended by Ctrl-C."""
    with open(output, "wb") as file:
        command = [sys.executable, "-m", "bespoke", "deploy", *map(str, words)]
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # else ignored in the background
        )  # fmt: skip
    try:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG) == 0, output.read_text()
    finally:
        process.kill()


def test_hub_and_site_start_and_end(tmp_path: Path) -> None:
    project = make_loopback(tmp_path, ("north", "south"), columns={"client": "school", "target": "score"})
    said = project.hub.model_dump(by_alias=True, exclude_none=True)
    (tmp_path / "hub/hub.toml").write_text(tomli_w.dumps(said))
    invitation = (tmp_path / "hub/site.toml").read_text()
    told = invitation.replace('name = ""', 'name = "north"').replace('org = ""', 'org = "org-north"')
    (tmp_path / "north/site.toml").write_text(told)
    rows = tmp_path / "rows.csv"
    rows.write_text("\n".join(["school,age,score", *(f"s{i % 4},{i % 7},{i % 5}.5" for i in range(40))]))
    hub, site = tmp_path / "hub.out", tmp_path / "site.out"
    with (
        staying(hub, "hub", tmp_path / "hub") as one,
        staying(site, "site", tmp_path / "north", "--data", rows) as other,
    ):
        lines = (
            (one, hub, "The hub listens."),
            (other, site, "Registered with the hub."),
            (one, hub, "The site north is"),
        )
        for process, output, line in lines:
            wait_until(lambda: line in output.read_text() or process.poll() is not None)  # noqa: B023
            assert line in output.read_text(), output.read_text()
        with session(project.kit) as admin:
            assert sites_of(admin) == ["north"]
        with pytest.raises(UserError, match=r"runs already \(process \d+\)"):
            start(project.sites["north"])
        started = [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if any(str(tmp_path) in word for word in process.info["cmdline"] or ())
        ]
        assert len(started) == 4  # two commands and two processes of FLARE
    assert site.read_text().startswith(f"{rows}: 40 rows of 4 clients\n")
    assert site.read_text().endswith("the site north has stopped.\n")
    assert not [pid for pid in started if psutil.pid_exists(pid)]
