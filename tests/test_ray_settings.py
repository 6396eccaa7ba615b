"""What is said and refused of a Ray cluster before there is one; none is started here."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bespoke
from bespoke.cli.app import app, placed
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.experiment.config import EngineConfig, ExperimentConfig
from bespoke.federation import ray_cluster
from bespoke.federation.ray_cluster import Node, shared_out
from bespoke.runs.beginning import same_elsewhere
from bespoke.runs.folder import RunFolder
from bespoke.runs.places import at_its_places
from bespoke.runs.training import Run
from bespoke.study.ray_runs import on_cluster
from test_protocol import experiment, people


def config(**engine: Any) -> ExperimentConfig:
    return checked({"engine": engine, "stage": [{"method": "fedavg", "rounds": 1}]}, "exp.toml")


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({}, False),
        ({"backend": "auto"}, False),  # auto never means Ray unless there is an address
        ({"backend": "processes"}, False),
        ({"backend": "ray"}, True),
        ({"address": "auto"}, True),
        ({"backend": "auto", "address": "10.0.0.1:6379"}, True),
        ({"backend": "ray", "address": "[fe80::1]:6379"}, True),
    ],
)
def test_where_clients_live(engine: dict[str, Any], expected: bool) -> None:
    assert config(**engine).engine.on_ray is expected


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"backend": "flower"}, "engine.backend"),
        ({"backend": "processes", "address": "auto"}, "engine.address = 'auto' is that of a Ray cluster"),
        ({"address": "10.0.0.1"}, "engine.address = '10.0.0.1': 'auto', or host:port of the cluster's head"),
        ({"address": "ray://head:10001"}, "run the command on one of its nodes"),
        ({"backend": "ray", "device": "cuda:1"}, "each actor is given a GPU by the cluster; use 'cuda', or 'cpu'"),
        ({"backend": "ray", "device": "mps"}, "engine.device = 'mps' on Ray"),
        ({"backend": "ray", "workers": 0}, "engine.workers = 0 is this process"),
    ],
)
def test_what_does_not_go_together_is_refused(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        config(**engine)
    assert message in str(refused.value)
    assert "exp.toml" in str(refused.value)


def test_old_run_folders_are_those_of_the_same_experiment(tmp_path: Path) -> None:
    """Where nothing is said of a cluster, config.toml is what it was; and where a run is made may change."""
    from bespoke.experiment.build import to_toml

    assert "backend" not in to_toml(config())
    begun = tmp_path / "config.toml"
    begun.write_text(to_toml(config()))
    assert same_elsewhere(begun, config(backend="ray", address="auto")) == begun.read_text()
    assert same_elsewhere(begun, config(backend="ray", chunk=3)) is None


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is written; by all three commands, and from Python."""
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    people().save(tmp_path / "people")
    raw: dict[str, Any] = {
        "data": {"population": str(tmp_path / "people")}, "engine": {"backend": "ray"},
        "stage": [{"method": "fedavg", "rounds": 1}],
    }  # fmt: skip
    expected = r"engine.backend = 'ray' needs the package 'ray'; install it with: pip install 'bespoke-fl\[ray\]'"
    with pytest.raises(UserError, match=expected):
        bespoke.run(raw, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=expected):
        bespoke.tune(raw, tmp_path / "tuned", space={"fedavg": {"lr": [0.1, 0.2]}})
    with pytest.raises(UserError, match=expected):
        bespoke.compare(tmp_path / "people", out=tmp_path / "compared", settings={"engine": {"backend": "ray"}})
    file = tmp_path / "exp.toml"
    file.write_text(f'[data]\npopulation = "{tmp_path / "people"}"\n[[stage]]\nmethod = "fedavg"\nrounds = 1\n')
    done = CliRunner().invoke(app, ["run", str(file), "--engine", "ray", "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, UserError)
    assert "bespoke-fl[ray]" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_cluster_that_does_not_answer_is_said_at_once(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install 'bespoke-fl[ray]'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = Run(experiment("alone"), RunFolder.create(tmp_path / "run", ""))
        expected = rf"engine.address = '{address}': no Ray cluster can be used there \(.*refused\); start one with `ray"
        with pytest.raises(UserError, match=expected), at_its_places(run, EngineConfig(address=address)):
            pass


def test_options_are_keys_of_the_experiment() -> None:
    assert placed(["seed=1"], "ray", "head:6379") == ["seed=1", 'engine.backend="ray"', 'engine.address="head:6379"']
    assert placed(None, None, None) == []


def test_a_study_spreads_runs_and_their_clients_stay_in_one_process() -> None:
    base = {"engine": {"backend": "ray", "address": "auto", "chunk": 4}, "seed": 3}
    rest, places = on_cluster(base)
    assert rest == {"engine": {"chunk": 4}, "seed": 3}
    assert places is not None
    assert places.address == "auto"
    assert on_cluster({"engine": {"chunk": 4}}) == ({"engine": {"chunk": 4}}, None)
    assert on_cluster({"engine": {"backend": "processes"}}) == ({"engine": {}}, None)
    with pytest.raises(UserError, match=r"engine.address = 'nowhere'"):
        on_cluster({"engine": {"address": "nowhere"}})


def test_a_model_of_this_program_cannot_leave_it(tmp_path: Path) -> None:
    def local() -> Any:
        import torch

        return torch.nn.Linear(3, 2)

    from bespoke.models.own.model import local_name

    made = experiment("alone", model={"name": local_name(local, "model")})
    run = Run(made, RunFolder.create(tmp_path / "run", ""))
    with (
        pytest.raises(UserError, match=r"engine.backend = 'ray': .*other"),
        at_its_places(run, EngineConfig(backend="ray")),
    ):
        pass
    with at_its_places(run, EngineConfig()) as same:  # and where nothing was said nothing changes
        assert same is run
        assert run.losses == 0


# -- who gets which machine --------------------------------------------------------------------------------------------
def node(name: str, cpus: float, gpus: float = 0.0) -> Node:
    return Node(name, f"10.0.0.{ord(name) - 96}", cpus, gpus)


@pytest.mark.parametrize(
    ("nodes", "many", "gpus", "expected"),
    [
        ([node("a", 2), node("b", 2)], 4, False, "abab"),
        ([node("a", 1), node("b", 3)], 4, False, "bbab"),
        ([node("a", 4), node("b", 1)], 2, False, "aa"),
        ([node("a", 2)], 3, False, "aaa"),  # after a loss: they share what is left
        ([node("a", 0), node("b", 1)], 2, False, "bb"),  # a head that computes nothing
        ([node("a", 8, 1), node("b", 8, 2)], 3, True, "bab"),
        ([node("a", 8)], 2, True, ""),
        ([], 2, False, ""),
    ],
)
def test_places_are_shared_out_by_what_each_has_to_itself(
    nodes: list[Node], many: int, gpus: bool, expected: str
) -> None:
    found = "".join(one.id for one in shared_out(nodes, many, gpus))
    assert sorted(found) == sorted(expected)
    assert len(found) == len(expected)


def test_a_place_that_is_built_anew_goes_where_there_is_room() -> None:
    """Not onto a processor that another place has, or it would wait for it forever."""
    two = [node("a", 1), node("b", 1)]
    assert [one.id for one in shared_out(two, 1, False, beside=two[:1])] == ["b"]
    assert [one.id for one in shared_out(two, 1, False, beside=two[1:])] == ["a"]
    assert [one.id for one in shared_out(two[:1], 1, False, beside=two)] == ["a"]


def test_the_settings_are_not_those_of_hosts() -> None:
    """`choose` takes the other keys of [engine] alone."""
    made = build(config(backend="ray", address="auto", chunk=3).model_copy(update={"data": _people()}), people())
    assert made.engine == {"kind": "auto", "chunk": 3, "device": "cpu", "precision": "float32"}


def _people() -> Any:
    from bespoke.experiment.config import DataConfig

    return DataConfig(population="people", standardize="none")
