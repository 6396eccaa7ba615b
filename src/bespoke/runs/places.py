"""Where a run's clients live: on this machine, or in actors of a Ray cluster if the experiment says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from bespoke import devices
from bespoke.data.population import Population
from bespoke.digests import read_json
from bespoke.errors import UserError
from bespoke.experiment.config import EngineConfig
from bespoke.federation.engine import Choice, Engine
from bespoke.imported import bound_to_this_process, only_here
from bespoke.runs.training import Run

LOSSES = 3  # that a run on a cluster bears in a row


def check_places(config: EngineConfig) -> None:
    """Refuses, before anything is written, a device or a cluster that cannot be used here."""
    if not config.on_ray:
        devices.chosen(config.device)
        return
    from bespoke.federation.ray_cluster import check_installed

    check_installed()


@contextmanager
def at_its_places(run: Run, config: EngineConfig) -> Iterator[Run]:
    """The run with the places that its experiment asks for; a cluster is connected to as long as the block lasts."""
    if not config.on_ray or (run.folder.path / "result.json").exists():
        yield run
        return
    from bespoke.federation.ray_actors import actors
    from bespoke.federation.ray_cluster import Cluster

    experiment = run.experiment
    if bound := bound_to_this_process(experiment.config):
        raise UserError(f"engine.backend = 'ray': {only_here(bound[0])}")
    if not experiment.task.portable:
        raise UserError(
            "engine.backend = 'ray': the model was given as an object of this program, and other machines cannot "
            "import it; put it into a module, as net = bespoke.model(...) in mypkg/nets.py"
        )
    shared = run.folder.path / ".rows"
    with Cluster(config.address, run.progress.note) as cluster:
        device = config.device
        if device == "auto":  # where it was begun, if it was
            begun = run.folder.path / "engine.json"
            found = "cuda" if any(node.gpus for node in cluster.nodes()) else "cpu"
            device = read_json(begun, "remove it and resume the run")["device"] if begun.exists() else found
        many = config.workers or cluster.most(device == "cuda")
        run.progress.note(f"{cluster.text()}; worker processes are actors there")

        def engine(population: Population, choice: Choice) -> Engine:
            shared.mkdir(exist_ok=True)
            return Engine(population, choice, actors(cluster, population, choice, shared))

        run.experiment = replace(experiment, engine={**experiment.engine, "workers": many, "device": device})
        run.engine_of, run.losses = engine, LOSSES
        try:
            with devices.elsewhere(device):
                yield run
        finally:
            with suppress(OSError):
                shared.rmdir()
