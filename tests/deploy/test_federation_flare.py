"""A federation of FLARE, three sites on loopback: equal to the simulation, also when a process of it is killed.

More of it, which takes minutes: slow_federation.py (`make federation`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bespoke.deploy.flare.loopback import Loopback
from bespoke.experiment.build import build
from command import bespoke
from deploy.on_flare import Watched, job_process, project_of
from deploy.sites_here import NAMES
from deploy.test_federation import assert_like
from deploy.test_federation_losses import private, results, run
from kills import contents
from test_protocol import asked, people, ran

STAGES = [
    {"method": "fedavg", "rounds": 3, "lr": 0.1, "batch_size": 4},
    {"method": "ditto", "rounds": 6, "lr": 0.1, "batch_size": 4},
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    with project_of(people(), tmp_path_factory.mktemp("flare")) as made:
        made.start()
        started = [running.process.pid for running in made.running.values()]
        yield made
    assert not [pid for pid in started if psutil.pid_exists(pid)]


def state(project: Loopback, name: str) -> Path:
    return project.sites[name].parent / "state"


def test_fedavg_and_ditto_on_flare_are_those_of_the_simulation_though_a_sites_process_is_killed(
    project: Loopback, tmp_path: Path
) -> None:
    """Up to rounding the simulation, and to the bit an undisturbed federation in one process."""
    config = asked(STAGES)
    ran(build(config, people()), tmp_path / "here")
    calm = run(tmp_path / "calm", config=config, mode=None)  # as sites choose by themselves
    watched = Watched(project, config, "ditto")
    watched.until(6)
    job_process(project.running["north"]).kill()
    watched.ended()
    assert_like(watched.folder, tmp_path / "here")
    found = results(contents(watched.folder))
    for name in ("rounds.jsonl", "clients.parquet", "sites.json", "choices.json"):
        assert found[name] == results(calm)[name], name
    legs = [json.loads(line) for line in (watched.folder / "federation" / "legs.jsonl").read_text().splitlines()]
    assert len([leg for leg in legs if "leg" in leg]) >= 2, "the kill came too late to disturb anything"
    for name in NAMES:
        (tmp_path / "flare" / name).mkdir(parents=True)
        (tmp_path / "flare" / name / "runs").symlink_to(state(project, name) / "runs")
    assert private(tmp_path / "flare") == private(tmp_path / "calm")


def test_the_command_runs_an_experiment_and_says_what_sites_did(project: Loopback, tmp_path: Path) -> None:
    """[data] of the file is what a simulation would use; the federation's rows are those of its sites. A code that is
    no method of the catalogue, or a file of a site, is refused in words, and exits with 2."""
    file = tmp_path / "exp.toml"
    file.write_text('seed = 4\n[data]\nsource = "synthetic"\nstandardize = "none"\n'
                    '[[stage]]\nmethod = "fedavg"\nrounds = 2\nlr = 0.1\n')  # fmt: skip
    hub = project.kit.parent
    done = bespoke("deploy", "run", file, "--hub", hub)
    assert done.code == 0, done.err
    assert done.out.splitlines()[0].startswith("fedavg: mean mse per client ")
    for name, line in zip(NAMES, done.out.splitlines()[1:]):
        assert line.strip().startswith(f"{name}  " if name == "north" else name)
        assert "4 clients: mse " in line
    again = bespoke("deploy", "run", file, "--hub", hub, "--json")
    assert json.loads(again.out)["rounds"] == 2  # it is done: nothing is run again
    other = bespoke("deploy", "run", file, "--hub", hub, "--set", "seed=5")
    assert other.code == 2
    assert "holds another experiment of this name; choose another with --name" in other.err
    refused = bespoke("deploy", "run", file, "--hub", hub, "--name", "refused", "--set", 'attack.kind="sign-flip"')
    assert refused.code == 2
    assert "this site carries out no experiment with [attack]" in refused.err
