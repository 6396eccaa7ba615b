"""A federation of sites in this process, with their own rules, over the wire: what real transports carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bespoke.data.population import Population
from bespoke.deploy.federated.guarded import GuardedSite
from bespoke.deploy.federated.hub import Hub
from bespoke.deploy.federated.identities import Papers
from bespoke.deploy.federated.place import SiteHost
from bespoke.deploy.federated.rules import Rules
from bespoke.errors import RemoteLost
from bespoke.experiment.config import ExperimentConfig
from bespoke.federation.work import Mode
from deploy.papers import papers

OPEN = Rules(least=1, share_clients=True)
MODE: Mode | None = Mode(vectorized=False)
NAMES = ("east", "north", "west")


class Line:
    """A transport to a site of this process. `gone(n)`: whether the site is gone when message n is sent."""

    def __init__(self, site: GuardedSite, gone: Callable[[int], bool] = lambda _: False) -> None:
        self.site, self.gone = site, gone
        self.sent: list[bytes] = []
        self.received: list[bytes] = []
        self.there = True

    def send(self, message: bytes) -> None:
        self.sent.append(message)
        if self.gone(len(self.sent)):
            self.there = False

    def receive(self) -> bytes:
        if not self.there:
            raise RemoteLost("the site is gone")
        answer = self.site.answer(self.sent[-1])
        self.received.append(answer)
        return answer

    def ready(self) -> bool:
        return True

    def alive(self) -> bool:
        return self.there

    def close(self) -> None:
        pass


def site(
    rows: Population, state: Path, rules: Rules = OPEN, mode: Mode | None = MODE, shown: Papers | None = None
) -> GuardedSite:
    """A site that is called as its folder of state is."""
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        raise error

    host = SiteHost(rows, state, rules, mode, shown or papers(state.name))
    return GuardedSite(host, state / "sent.jsonl", failed=failed)


def three(parts: Sequence[Population], folder: Path, rules: Rules = OPEN) -> dict[str, Line]:
    return {name: Line(site(rows, folder / name, rules)) for name, rows in zip(NAMES, parts)}


def hub(config: ExperimentConfig, folder: Path, min_sites: int = 1) -> Hub:
    return Hub(config, folder, NAMES, min_sites)
