"""The places of a simulation: hosts of one population, in this process or in worker processes."""

from __future__ import annotations

from bespoke.data.population import Population
from bespoke.federation.execution import Choice
from bespoke.federation.host import Host
from bespoke.federation.remote import Here, Remote
from bespoke.federation.workers import Lending, Worker


def places(population: Population, choice: Choice) -> list[Remote]:
    """Makes the remotes of this population, as chosen. Each may execute any client."""
    if not choice.workers:
        return [Here(Host(population, choice.mode()))]
    lending = Lending(population, choice.workers)
    return [
        Worker(lending, mode, f"worker {place} of {choice.workers}") for place, mode in enumerate(choice.modes(), 1)
    ]
