"""The engine spreads a cohort over the places where its clients live, and adds up their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.splits import Query, Support, Train, Validation
from bespoke.declarations import Reveal, reveals
from bespoke.errors import RemoteLost, UserError, WorkerFailed
from bespoke.federation.batches import steps_of
from bespoke.federation.calls import Call, Settle
from bespoke.federation.examine import ROWS, Scores, fill
from bespoke.federation.execution import Choice as Choice
from bespoke.federation.held import aggregate
from bespoke.federation.host import Host, home_of
from bespoke.federation.partial import Partial
from bespoke.federation.places import places
from bespoke.federation.remote import Here, Late, Remote
from bespoke.federation.roster import Roster
from bespoke.federation.work import ClientWork
from bespoke.messages.robust.exchange import Combined
from bespoke.messages.transform import State
from bespoke.method import Cohort, Method
from bespoke.plain import Named
from bespoke.tensors import Params, Tree, leaves, nbytes, stack, take, tree_map

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Secured:
    """What secure sums cost in a round (bytes besides the broadcast), and why cohorts were refused."""

    bytes_up: int
    bytes_down: int
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundResult:
    """The cohort's sums for the server, and the cost of the round."""

    cohort: Cohort
    bytes_up: int
    bytes_down: int
    steps: int
    examples: int
    state: State = field(default_factory=dict)  # of the transforms, for the next round
    ruled: Combined | None = None  # what a robust rule did
    norms: dict[int, float] = field(default_factory=dict)  # of each client's change; only a simulation sees these
    observed: Named = field(default_factory=dict)  # by the transforms, for the round's log
    secure: Secured | None = None  # what secure sums cost, and what they refused


class Engine:
    """Runs client work at the places where clients live. Use it as a context manager, which closes the places.

    Without `remotes`, the engine simulates: it makes hosts of the population, as chosen. With `remotes`, `population`
    may be a roster, whose numbers of clients the remotes use. `homes`: the remote of each client, if it has only one.
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
        self.owed: list[Settle | None] = [None] * len(self.remotes)  # by remote: the settle that its next call carries
        self.unsettled: tuple[list[int], Settle] | None = None  # remotes of the last round, and its settle
        self.behind: set[int] = set()  # remotes that were late, and whose answer is still to come
        self.patient = False  # whether a round waits for late remotes, too
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
        """The host in this process, if there is one, after the last round is settled. For tests and studies."""
        here = self.remotes[0] if self.remotes else None
        if not isinstance(here, Here):
            return None
        self._settle()
        self._ask({0: Call("settle")})
        return here.host

    # -- calls ---------------------------------------------------------------------------------------------------------
    def _ask(self, calls: dict[int, Call], without_late: bool = False) -> dict[int, Any]:
        """Sends calls and returns the answers, by place. It waits for all answers before it raises a failure.

        without_late: a place that is late is left out of the answers, and is `behind` from then on. Otherwise it is
        waited for once more.
        """
        for place in calls:
            self._catch_up(place)
        for place, call in calls.items():
            settle, self.owed[place] = self.owed[place], None
            self.remotes[place].start(replace(call, settle=settle))
        answers: dict[int, Any] = {}
        failures: list[WorkerFailed] = []
        for place in calls:
            try:
                answers[place] = self._finish(place, 1 if without_late else 2)
            except WorkerFailed as error:
                if isinstance(error, Late) and without_late:
                    self.behind.add(place)
                else:
                    failures.append(error)
        if failures:
            raise next((error for error in failures if isinstance(error, RemoteLost)), failures[0])
        return answers

    def _finish(self, place: int, times: int) -> Any:
        """The answer of a place, waited for so many times as long as it may take."""
        for _ in range(times - 1):
            with suppress(Late):
                return self.remotes[place].finish()
        return self.remotes[place].finish()

    def _catch_up(self, place: int) -> None:
        """Waits for the answer of a place that was late. It is not used, even if it is a refusal."""
        if place in self.behind:
            with suppress(UserError):
                self.remotes[place].finish()
            self.behind.discard(place)

    @property
    def _in_time(self) -> list[int]:
        """The places that are not behind."""
        return [place for place in range(len(self.remotes)) if place not in self.behind]

    def _all(self, operation: str, **values: Any) -> list[Any]:
        """Settles the last round, and sends the same call to every place."""
        self._settle()
        return self._everywhere(Call(operation, values))

    def _everywhere(self, call: Call) -> list[Any]:
        return list(self._ask(dict.fromkeys(range(len(self.remotes)), call)).values())

    def _settle(self) -> None:
        """Attaches the last round's settle to the next call of each place that took part."""
        if self.unsettled is not None:
            took_part, settle = self.unsettled
            self.unsettled = None
            for place in took_part:
                self.owed[place] = settle

    def commit(self) -> None:
        """Keeps the private state of the last round, because the server has used it. Any later call does the same."""
        self._settle()

    def abandon(self) -> None:
        """Discards the private state of the last round, because the server has not used it."""
        if self.unsettled is not None:
            took_part, settle = self.unsettled
            self.unsettled = took_part, replace(settle, used=np.zeros(0, np.int64))
            self._settle()

    def open(self, work: ClientWork, params: Params) -> None:
        """Begins a stage. `params` are the parameters from which private state starts."""
        self.work = work
        self.layered = bool(work.method.task.layers)
        self.stateful = bool(work.method.init_private(params)) or work.remembers or self.layered
        if work.secure is not None and self.sums is None:
            from bespoke.federation.masked import SecureSums  # needs cryptography, an extra

            self.sums = SecureSums(work.secure, self.roster.keys)
        self._all("open", work=work, params=params)

    def move(self, train: Train) -> None:
        """Replaces the clients' rows by others; private state stays."""
        self.roster, self.work = Roster.of(train.population), replace(self.work, train=train)
        self._all("move", train=train)

    def home(self, clients: Ints) -> Ints:
        """The place that owns each client's private state."""
        return home_of(self.roster.keys[clients], len(self.remotes)) if self.homes is None else self.homes[clients]

    def _shares(self, clients: Ints, weight: Callable[[], Ints]) -> list[Ints]:
        """Positions of the cohort for each place: at home if a client has state there, else balanced by work."""
        if len(self.remotes) == 1:
            return [np.arange(len(clients))]
        if self.stateful or self.work.masks or self.homes is not None:
            home = self.home(clients)
            return [np.flatnonzero(home == place) for place in range(len(self.remotes))]
        load, weights = np.zeros(len(self.remotes)), weight()
        shares: list[list[int]] = [[] for _ in self.remotes]
        for position in np.argsort(-weights, kind="stable"):  # longest first, to the place with the least work
            target = int(np.argmin(load))
            load[target] += weights[position]
            shares[target].append(int(position))
        return [np.array(sorted(share), dtype=np.int64) for share in shares]

    def _own(self, server: Tree, clients: Ints) -> Tree | None:
        return unicast(self.work.method, server, clients)

    def _rows(self, server: Tree, clients: Ints) -> Ints | None:
        """The row of the broadcast that each client receives, by its group; None without groups."""
        groups = self.work.method.groups(server)
        return None if groups is None else groups[torch.from_numpy(clients)].numpy()

    # -- a round -------------------------------------------------------------------------------------------------------
    def round(
        self, server: Tree, clients: Ints, key: int, next_clients: Ints | None = None, state: State | None = None,
        number: int = 0, contacted: Ints | None = None,
    ) -> RoundResult:  # fmt: skip
        """Runs one round on a cohort and returns sums. Call `commit` or `abandon` afterwards.

        `next_clients`: the next cohort, if known, whose rows are then read ahead. `state`: the transforms' state after
        the last round. `number`: the round's number from 1, for schedules. `contacted`: these clients and those that
        do not answer, whose loss secure sums must survive.
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
            waits = self.work.holds or self.work.masks  # ask all: none may keep messages of an earlier round
            asked = [place for place in self._in_time if len(shares[place]) or waits]
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
            for part in self._ask(calls, not self.patient).values():
                merged.merge(part)
            merged.joined()
            asked = self._without_late(asked, key)
        if merged.sums is None and any(transform.covers for transform in self.work.transforms):
            empty = self.template()  # the output must not show that no client sent anything
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
        observed: Named = {}
        for transform in reversed(self.work.transforms):
            observed |= transform.observe(cohort, state)
            cohort, state = transform.server(cohort, state, key)
        down = (broadcast_bytes(method, server) + 4 * len(state)) * sent_to + (nbytes(own) if own else 0)
        up, down = merged.bytes_up + (ruled.bytes_up if ruled else 0), down + (ruled.bytes_down if ruled else 0)
        norms = dict(zip(merged.clients, merged.norms))
        used = np.array(cohort.clients, np.int64) if self.work.masks else None
        self.unsettled = (asked, Settle(key, used)) if asked else None
        return RoundResult(cohort, up, down, merged.steps, merged.examples, state, ruled, norms, observed, secure)

    def _without_late(self, asked: list[int], key: int) -> list[int]:
        """Those of the places asked that have answered; for the others the round did not happen.

        Under secure sums all of them stay: who was added up is known at the end, and says whose state is kept.
        """
        if self.work.masks:
            return asked
        for place in self.behind.intersection(asked):
            self.owed[place] = Settle(key, np.zeros(0, np.int64))
        return [place for place in asked if place not in self.behind]

    def _aggregated(self, cohort: Cohort, asked: Ints, rows: Ints | None, shared: Tree) -> Combined:
        """Aggregates the messages that hosts hold by the robust rule."""
        mine = None
        if rows is not None:
            mine = rows[np.argsort(asked)[np.searchsorted(np.sort(asked), cohort.clients)]]

        def ask(question: str, inputs: Tree) -> list[Tree]:
            answers = self._ask(dict.fromkeys(self._in_time, Call("answer", {"question": question, "inputs": inputs})))
            return [found for found in answers.values() if found is not None]

        many = len(leaves(shared)[0]) if rows is not None else 1
        work = self.work
        return aggregate(work.method, work.robust, work.collusion, ask, cohort.clients, mine, many)

    def _masked(
        self, cohort: Cohort, contacted: Ints, rows: Ints | None, shared: Tree, refused: list[str]
    ) -> tuple[Cohort, Secured]:
        """Adds up the messages that hosts hold by secure sums; returns the cohort and the cost."""
        ready = np.sort(np.array(cohort.clients, np.int64))
        many = len(leaves(shared)[0]) if rows is not None else 1
        found = self.sums.add_up(self._secure, contacted, ready, rows, many)
        sums = found.sums or cohort.sums  # empty, or the zeros that noise covers
        secured = Secured(found.bytes_up, found.bytes_down, (*refused, *found.refused))
        return replace(cohort, sums=sums, clients=found.clients), secured

    def _secure(self, step: str, messages: dict[int, Any]) -> dict[int, Any]:
        """Runs a step of secure sums at every client's place. A client that refuses ends the run.

        Clients of a place that is late are lost to the sum from then on, which the protocol bears.
        """
        if len(self.remotes) == 1 or step in ("directory", "form"):
            asked = dict.fromkeys(self._in_time, Call("secure", {"step": step, "messages": messages}))
        else:
            home = self.home(np.array(list(messages), np.int64))
            asked = {}
            for place in self._in_time:
                mine = {client: messages[client] for client, at in zip(messages, home) if at == place}
                asked[place] = Call("secure", {"step": step, "messages": mine})
        introduces = step in ("enrol", "directory")  # whom a place does not know it takes part in no sum with
        answers = self._ask(asked, not (introduces or self.patient)).values()
        for _, refusal in answers:
            if refusal:
                raise UserError(refusal)
        return {client: message for found, _ in answers for client, message in found.items()}

    def start(self) -> State:
        """The transforms' state before the first round of a stage."""
        return {name: value for transform in self.work.transforms for name, value in transform.start().items()}

    def template(self) -> Tree:
        """A message of the stage, all zeros."""
        self._settle()
        place = next(iter(self._in_time), 0)
        template: Tree = self._ask({place: Call("template")})[place]
        return template

    # -- personal models -----------------------------------------------------------------------------------------------
    def examine(
        self, server: Tree, clients: Ints, support: Support, parts: dict[str, Support | Validation | Query], key: int,
        by_row: str = "",
    ) -> Scores:  # fmt: skip
        """Scores of every candidate personal model of these clients: part -> metric sum -> (clients, candidates).

        by_row: the metric whose value for each query row is returned too, as ROWS: (rows, candidates).
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
        """Makes one client's chosen personal model."""
        shared, own = self.work.method.broadcast(server), self._own(server, np.array([client]))
        self._settle()
        values: dict[str, Any] = {"shared": shared, "own": own, "rows": self._rows(server, np.array([client]))}
        values |= {"client": client, "support": support, "candidate": candidate, "key": key}
        place = int(self.home(np.array([client]))[0])
        params: Params = self._ask({place: Call("personal", values)})[place]
        return params

    # -- private state on disk -----------------------------------------------------------------------------------------
    def save_private(self, folder: Path, name: str, only_dirty: bool = True, run: str = "") -> list[str]:
        """Lets each host write its own clients' state; returns the names of all files that now hold private state."""
        if not self.stateful:
            return []
        self._settle()
        values = {"folder": str(folder), "only_dirty": only_dirty, "run": run}
        calls = {place: Call("save_private", {**values, "name": f"{name}-{place}"}) for place in self._in_time}
        return list(dict.fromkeys(segment for segments in self._ask(calls).values() for segment in segments))

    def kept_layers(self, point: str = "") -> list[str]:
        """The names of the files with clients' own layers from the stage before."""
        return [name for names in self._all("kept_layers", point=point) for name in names] if self.layered else []

    def load_private(self, paths: Sequence[Path], point: str = "") -> None:
        """Lets each host read its own clients' state, in the order written; `point`: the name of the save."""
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
    """The positions of some clients' rows in the concatenation of all clients' rows."""
    begins = np.cumsum(sizes) - sizes
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(begins[i], begins[i] + sizes[i]) for i in share)])


def _some(rows: Ints | None, share: Ints) -> Ints | None:
    return None if rows is None else rows[share]


def broadcast_bytes(method: Method, server: Tree) -> int:
    """Bytes of the broadcast that one client receives: all of it, or its group's row."""
    shared = method.broadcast(server)
    return nbytes(shared if method.groups(server) is None else take(shared, 0))


def unicast(method: Method, server: Tree, clients: Ints) -> Tree | None:
    """The unicast messages to these clients, stacked; None if there are none."""
    if type(method).unicast is Method.unicast or not len(clients):
        return None
    return stack([method.unicast(server, int(client)) for client in clients])
