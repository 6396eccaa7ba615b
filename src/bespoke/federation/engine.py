"""The engine: spreads a cohort over the places where its clients live, and adds up what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.splits import Query, Support, Train, Validation
from bespoke.declarations import Reveal, reveals
from bespoke.errors import UserError
from bespoke.federation.batches import steps_of
from bespoke.federation.calls import Call, Settle
from bespoke.federation.examine import ROWS, Scores, fill
from bespoke.federation.execution import Choice as Choice
from bespoke.federation.held import aggregate
from bespoke.federation.host import Host, home_of
from bespoke.federation.partial import Partial
from bespoke.federation.places import places
from bespoke.federation.processes import RemoteLost, WorkerFailed
from bespoke.federation.remote import Here, Remote
from bespoke.federation.roster import Roster
from bespoke.federation.work import ClientWork
from bespoke.messages.robust.exchange import Combined
from bespoke.messages.transform import State
from bespoke.method import Cohort, Method
from bespoke.tensors import Params, Tree, leaves, nbytes, stack, take, tree_map

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Secured:
    """Secure sums in a round: bytes of the protocol beside the broadcast, and why a cohort was not added up."""

    bytes_up: int
    bytes_down: int
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundResult:
    """A cohort for the server, and what the round cost."""

    cohort: Cohort
    bytes_up: int
    bytes_down: int
    steps: int
    examples: int
    state: State = field(default_factory=dict)  # of the transforms, for the next round
    ruled: Combined | None = None  # what a robust rule did
    norms: dict[int, float] = field(default_factory=dict)  # of each client's change: for the one who simulates
    observed: dict[str, Any] = field(default_factory=dict)  # by the transforms, for the round's log
    secure: Secured | None = None  # what secure sums cost, and what they refused


class Engine:
    """Runs client work at the places where clients live. Use as a context manager: places end with it.

    By default these are of a simulation: hosts of a population, as chosen. Else `remotes` are given, whose clients are
    numbered as those of `population`, which may be a roster. `homes`: where each client lives, if in one place alone.
    """

    def __init__(
        self, population: Population | Roster, choice: Choice, remotes: Sequence[Remote] | None = None,
        homes: Ints | None = None,
    ) -> None:  # fmt: skip
        self.choice, self.homes = choice, homes
        self.roster = population if isinstance(population, Roster) else Roster.of(population)
        if remotes is None:
            assert isinstance(population, Population), "a roster has no rows: say where its clients live"
            remotes = places(population, choice)
        self.remotes = list(remotes)
        self.owed: list[Settle | None] = [None] * len(self.remotes)  # what each is yet to be told of the last round
        self.unsettled: tuple[list[int], Settle] | None = None  # the last round: who took part, and what it is told
        self.closed = False
        self.sums: Any = None  # secure sums, where there are any

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for remote in () if self.closed else self.remotes:
            remote.close()
        self.closed = True

    @property
    def host(self) -> Host | None:
        """The host in this process, if there is one, with the state of the last round: for those who look closer."""
        here = self.remotes[0] if self.remotes else None
        if not isinstance(here, Here):
            return None
        self._settle()
        self._ask({0: Call("settle")})
        return here.host

    # -- calls ---------------------------------------------------------------------------------------------------------
    def _ask(self, calls: dict[int, Call]) -> dict[int, Any]:
        """The answers of places to these calls; all are heard out before a failure of one is raised."""
        for place, call in calls.items():
            settle, self.owed[place] = self.owed[place], None
            self.remotes[place].start(replace(call, settle=settle))
        answers: dict[int, Any] = {}
        failures: list[WorkerFailed] = []
        for place in calls:
            try:
                answers[place] = self.remotes[place].finish()
            except WorkerFailed as error:
                failures.append(error)
        if failures:
            raise next((error for error in failures if isinstance(error, RemoteLost)), failures[0])
        return answers

    def _all(self, operation: str, **values: Any) -> list[Any]:
        """The same call at every place."""
        self._settle()
        return self._everywhere(Call(operation, values))

    def _everywhere(self, call: Call) -> list[Any]:
        return list(self._ask(dict.fromkeys(range(len(self.remotes)), call)).values())

    def _settle(self) -> None:
        """Whoever took part in the last round is told what became of it, with the next call."""
        if self.unsettled is not None:
            took_part, settle = self.unsettled
            self.unsettled = None
            for place in took_part:
                self.owed[place] = settle

    def commit(self) -> None:
        """The server has used the last round: the private state that it made is kept. Any later call says so, too."""
        self._settle()

    def abandon(self) -> None:
        """The server has not used the last round, which did not happen."""
        if self.unsettled is not None:
            took_part, settle = self.unsettled
            self.unsettled = took_part, replace(settle, used=np.zeros(0, np.int64))
            self._settle()

    def open(self, work: ClientWork, params: Params) -> None:
        """Begin a stage: a method, its rows, and the parameters its private state starts from."""
        self.work = work
        self.layered = bool(work.method.task.layers)
        self.stateful = bool(work.method.init_private(params)) or work.remembers or self.layered
        if work.secure is not None and self.sums is None:
            from bespoke.federation.masked import SecureSums  # needs cryptography, an extra

            self.sums = SecureSums(work.secure, self.roster.keys)
        self._all("open", work=work, params=params)

    def move(self, train: Train) -> None:
        """Go on with other rows of the same clients; their private state stays where it is."""
        self.roster, self.work = Roster.of(train.population), replace(self.work, train=train)
        self._all("move", train=train)

    def home(self, clients: Ints) -> Ints:
        """The place that owns a client's private state."""
        return home_of(self.roster.keys[clients], len(self.remotes)) if self.homes is None else self.homes[clients]

    def _shares(self, clients: Ints, weight: Callable[[], Ints]) -> list[Ints]:
        """Positions of the cohort for each place: at their home if something of theirs lies there, else by work."""
        if len(self.remotes) == 1:
            return [np.arange(len(clients))]
        if self.stateful or self.work.masks or self.homes is not None:
            home = self.home(clients)
            return [np.flatnonzero(home == place) for place in range(len(self.remotes))]
        load, weights = np.zeros(len(self.remotes)), weight()
        shares: list[list[int]] = [[] for _ in self.remotes]
        for position in np.argsort(-weights, kind="stable"):  # longest first, to whoever has least
            target = int(np.argmin(load))
            load[target] += weights[position]
            shares[target].append(int(position))
        return [np.array(sorted(share), dtype=np.int64) for share in shares]

    def _own(self, server: Tree, clients: Ints) -> Tree | None:
        return unicast(self.work.method, server, clients)

    def _rows(self, server: Tree, clients: Ints) -> Ints | None:
        """Whose group's row of the broadcast each client is sent; None if there are no groups."""
        groups = self.work.method.groups(server)
        return None if groups is None else groups[torch.from_numpy(clients)].numpy()

    # -- a round -------------------------------------------------------------------------------------------------------
    def round(
        self, server: Tree, clients: Ints, key: int, next_clients: Ints | None = None, state: State | None = None,
        number: int = 0, contacted: Ints | None = None,
    ) -> RoundResult:  # fmt: skip
        """Run one round on a cohort and hand back sums; `commit` or `abandon` says whether the server has used them.

        `next_clients`: the next cohort, if it is known; `state`: of the transforms, after the last round;
        `number`: of the round, from 1, which clients' schedules go by;
        `contacted`: the clients, and those that do not answer: secure sums have to get over their loss.
        """
        method, sent_to, refused = self.work.method, len(clients), []
        everyone = clients if contacted is None else contacted
        if self.work.masks:
            clients, refused = self.sums.enough(everyone, clients, self._rows(server, everyone))
        state = self.start() if state is None else state
        shared, own = method.broadcast(server), self._own(server, clients) if len(clients) else None
        rows = self._rows(server, clients)
        merged, asked = Partial(), []
        if len(clients):
            shares = self._shares(clients, lambda: steps_of(self.work.train.sizes(clients), method.batching()))
            waits = self.work.holds or self.work.masks  # what an earlier round left there is not to be asked for
            asked = [place for place, share in enumerate(shares) if len(share) or waits]
            alone = len(self.remotes) == 1
            values = {
                "shared": shared, "key": key, "next_clients": next_clients if alone else None, "number": number,
                "transform_state": state,
            }  # fmt: skip
            self._settle()
            calls = {
                place: Call("train", {
                    **values, "own": own if alone or not own else take(own, torch.from_numpy(shares[place])),
                    "clients": clients[shares[place]], "rows": _some(rows, shares[place]),
                })
                for place in asked
            }  # fmt: skip
            for part in self._ask(calls).values():
                merged.merge(part)
            merged.joined()
        if merged.sums is None and any(transform.covers for transform in self.work.transforms):
            empty = self.template()  # that nobody sent anything must not be seen
            if rows is not None:
                empty = tree_map(lambda leaf: leaf.new_zeros((len(leaves(shared)[0]), *leaf.shape)), empty)
            sent = reveals(method.uplink)
            merged.sums = {name: empty[name] for name, reveal in sent.items() if reveal is not Reveal.EACH}
        cohort = Cohort(merged.sums or {}, merged.each, tuple(merged.clients), tuple(merged.excluded))
        secure = None
        if self.work.masks:
            cohort, secure = self._masked(cohort, everyone, self._rows(server, everyone), shared, refused)
        ruled = self._aggregated(cohort, clients, rows, shared) if self.work.holds and cohort.clients else None
        if ruled is not None:
            cohort = replace(cohort, sums=ruled.sums, each=ruled.each, clients=ruled.clients)
        observed: dict[str, Any] = {}
        for transform in reversed(self.work.transforms):
            observed |= transform.observe(cohort, state)
            cohort, state = transform.server(cohort, state, key)
        down = (broadcast_bytes(method, server) + 4 * len(state)) * sent_to + (nbytes(own) if own else 0)
        up, down = merged.bytes_up + (ruled.bytes_up if ruled else 0), down + (ruled.bytes_down if ruled else 0)
        norms = dict(zip(merged.clients, merged.norms))
        used = np.array(cohort.clients, np.int64) if self.work.masks else None
        self.unsettled = (asked, Settle(key, used)) if asked else None
        return RoundResult(cohort, up, down, merged.steps, merged.examples, state, ruled, norms, observed, secure)

    def _aggregated(self, cohort: Cohort, asked: Ints, rows: Ints | None, shared: Tree) -> Combined:
        """A cohort by the robust rule, of the messages that hosts hold."""
        mine = None
        if rows is not None:
            mine = rows[np.argsort(asked)[np.searchsorted(np.sort(asked), cohort.clients)]]

        def ask(question: str, inputs: Tree) -> list[Tree]:
            answers = self._everywhere(Call("answer", {"question": question, "inputs": inputs}))
            return [found for found in answers if found is not None]

        many = len(leaves(shared)[0]) if rows is not None else 1
        work = self.work
        return aggregate(work.method, work.robust, work.collusion, ask, cohort.clients, mine, many)

    def _masked(
        self, cohort: Cohort, contacted: Ints, rows: Ints | None, shared: Tree, refused: list[str]
    ) -> tuple[Cohort, Secured]:
        """A cohort by secure sums, of the messages that hosts hold, and what it cost."""
        ready = np.sort(np.array(cohort.clients, np.int64))
        many = len(leaves(shared)[0]) if rows is not None else 1
        found = self.sums.add_up(self._secure, contacted, ready, rows, many)
        sums = found.sums or cohort.sums  # empty, or the zeros that noise has to cover
        secured = Secured(found.bytes_up, found.bytes_down, (*refused, *found.refused))
        return replace(cohort, sums=sums, clients=found.clients), secured

    def _secure(self, step: str, messages: dict[int, Any]) -> dict[int, Any]:
        """A step of secure sums: each client is asked where it lives; one that refuses ends the run."""
        if len(self.remotes) == 1 or step in ("directory", "form"):
            answers = self._everywhere(Call("secure", {"step": step, "messages": messages}))
        else:
            home = self.home(np.array(list(messages), np.int64))
            shares = [
                [client for client, at in zip(messages, home) if at == place] for place in range(len(self.remotes))
            ]
            asked = {
                place: Call("secure", {"step": step, "messages": {client: messages[client] for client in share}})
                for place, share in enumerate(shares)
            }
            answers = list(self._ask(asked).values())
        for _, refusal in answers:
            if refusal:
                raise UserError(refusal)
        return {client: message for found, _ in answers for client, message in found.items()}

    def start(self) -> State:
        """The transforms' state before the first round of a stage."""
        return {name: value for transform in self.work.transforms for name, value in transform.start().items()}

    def template(self) -> Tree:
        """What a message of the stage looks like, all zeros."""
        self._settle()
        template: Tree = self._ask({0: Call("template")})[0]
        return template

    # -- personal models -----------------------------------------------------------------------------------------------
    def examine(
        self, server: Tree, clients: Ints, support: Support, parts: dict[str, Support | Validation | Query], key: int,
        by_row: str = "",
    ) -> Scores:  # fmt: skip
        """Scores of every candidate personal model of these clients: part -> metric sum -> (clients, candidates).

        by_row: the metric of which each query row's part is wanted too, as ROWS: (rows, candidates).
        """
        method = self.work.method
        shared, own, rows = method.broadcast(server), self._own(server, clients), self._rows(server, clients)
        parts = {name: part for name, part in parts.items() if part.sizes(clients).sum()}
        self._settle()
        shares = self._shares(clients, lambda: support.sizes(clients) + 1)
        alone = len(self.remotes) == 1
        common = {"shared": shared, "support": support, "parts": parts, "key": key, "by_row": by_row}
        answers: dict[int, Scores] = self._ask({
            place: Call("examine", {
                **common, "own": own if alone or not own else take(own, torch.from_numpy(share)),
                "clients": clients[share], "rows": _some(rows, share),
            })
            for place, share in enumerate(shares) if alone or len(share)
        })  # fmt: skip
        if alone:
            return answers[0]
        out: Scores = {}
        for at, answer in answers.items():
            share = shares[at]
            for part, sums in answer.items():
                for metric, values in sums.items():
                    sizes = parts[part].sizes(clients)
                    many, places = len(clients), share
                    if metric == ROWS:
                        many, places = int(sizes.sum()), _stretches(sizes, share)
                    fill(out.setdefault(part, {}), metric, many, places, np.asarray(values))
        return out

    def personal(self, server: Tree, client: int, support: Support, candidate: int, key: int) -> Params:
        """One client's chosen personal model."""
        shared, own = self.work.method.broadcast(server), self._own(server, np.array([client]))
        self._settle()
        values: dict[str, Any] = {"shared": shared, "own": own, "rows": self._rows(server, np.array([client]))}
        values |= {"client": client, "support": support, "candidate": candidate, "key": key}
        place = int(self.home(np.array([client]))[0])
        params: Params = self._ask({place: Call("personal", values)})[place]
        return params

    # -- private state on disk -----------------------------------------------------------------------------------------
    def save_private(self, folder: Path, name: str, only_dirty: bool = True, run: str = "") -> list[str]:
        """Each host writes its own clients' rows; returns the names of all files that private state now lies in."""
        if not self.stateful:
            return []
        self._settle()
        values = {"folder": str(folder), "only_dirty": only_dirty, "run": run}
        calls = {
            place: Call("save_private", {**values, "name": f"{name}-{place}"}) for place in range(len(self.remotes))
        }
        return list(dict.fromkeys(segment for segments in self._ask(calls).values() for segment in segments))

    def kept_layers(self, point: str = "") -> list[str]:
        """The files of clients' own layers that a stage before this one left."""
        return [name for names in self._all("kept_layers", point=point) for name in names] if self.layered else []

    def load_private(self, paths: Sequence[Path], point: str = "") -> None:
        """Give each host the rows of its own clients, in the order written; `point`: the name of what was saved."""
        if not paths and not self.stateful:
            return
        self._settle()
        several = len(self.remotes) if self.homes is None else 1
        values = {
            "folder": str(paths[0].parent) if paths else "",
            "names": [path.name for path in paths],
            "point": point,
        }
        self._ask({
            place: Call("load_private", {**values, "share": (place, several) if several > 1 else None})
            for place in range(len(self.remotes))
        })  # fmt: skip


def _stretches(sizes: Ints, share: Ints) -> Ints:
    """The places of the rows of some clients, where all clients' rows lie one after the other."""
    begins = np.cumsum(sizes) - sizes
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(begins[i], begins[i] + sizes[i]) for i in share)])


def _some(rows: Ints | None, share: Ints) -> Ints | None:
    return None if rows is None else rows[share]


def broadcast_bytes(method: Method, server: Tree) -> int:
    """What one client is sent of the broadcast: all of it, or its group's row."""
    shared = method.broadcast(server)
    return nbytes(shared if method.groups(server) is None else take(shared, 0))


def unicast(method: Method, server: Tree, clients: Ints) -> Tree | None:
    """What each of these clients is sent for itself, stacked; None if the method sends nothing so, or to nobody."""
    if type(method).unicast is Method.unicast or not len(clients):
        return None
    return stack([method.unicast(server, int(client)) for client in clients])
