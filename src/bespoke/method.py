"""The contract of a method: seven declarations and pure functions, in a frozen dataclass. Nothing else in the package
is needed to read one: bespoke.declarations has the declared values, bespoke.task what may be asked of a task.

Clients never see the server's state, the server never sees private state; `uplink` declares what leaves a client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor

from bespoke.declarations import Card, Choosing, Handoff, Needs, Observed, Sent
from bespoke.task import Task
from bespoke.tensors import Params, Tree


@dataclass(frozen=True)
class Batching:  # how a client's rows form minibatches
    size: int = 32
    epochs: int = 1
    _: KW_ONLY
    reshuffle: bool = True  # a new order every epoch
    shuffle: bool = True  # False: rows as they are stored
    drop_last: bool = False  # skip the last, partial batch (a client smaller than a batch keeps its only one)
    uses: int = 1  # number of descents over them, to count the work
    steps: int = 0  # if given, steps instead of epochs; the private leaf `steps` has a client's own number, if smaller


class Batches(Protocol):  # one client's minibatches, as slices or as padded stacks
    @property
    def examples(self) -> Tensor: ...  # how many rows the client has, as a float scalar
    @property
    def round(self) -> int: ...  # of the stage, from 1; 0 for personal models
    def __len__(self) -> int: ...
    def __getitem__(self, step: int) -> Params: ...
    def live(self, step: int) -> float | Tensor: ...  # 1.0; 0.0 for a step that only pads to the longest client
    def epochs(self, many: int = 1) -> Iterator[Batches]: ...  # groups of so many epochs
    def part(self, begin: int, end: int) -> Batches: ...  # only these epochs
    def first(self, steps: Tensor, most: int) -> Batches: ...  # with Batching.steps: each client's own number
    def again(self, step: int, times: int) -> Batches: ...  # only this step's batch, so many times
    def rows(self) -> Params: ...  # all rows at once, with their mask
    def chances(self, count: int, purpose: str) -> Tensor: ...  # the client's own uniform numbers, new every round


@dataclass(frozen=True)
class Cohort:  # the result of a round for the server, and its clients
    sums: Tree  # with `groups`: a row per group, each a cohort of its own
    each: Tree  # the first dimension of leaves is the client, in the order of `clients`
    clients: tuple[int, ...]  # those whose update was used
    excluded: tuple[int, ...] = ()  # those whose update was not finite


@dataclass(frozen=True)
class Setting:  # the server's knowledge before the first round
    seed: int = 0
    clients: int = 0  # numbered from 0
    training: int = 0  # clients that may take part in rounds; cross-device holds some out
    groups: Tensor | None = None  # by client, given or found by the stage before: from 1; 0 if unknown


def knob(default: Any, doc: str, **bounds: Any) -> Any:  # a hyper-parameter; bounds: ge, gt, le, lt, always checked
    return field(default=default, metadata={"doc": doc, "bounds": bounds})


@dataclass(frozen=True)
class Method:  # the defaults: one model on the server, nothing private, the global model for all clients
    task: Task
    card: ClassVar[Card] = Card()  # name, paper, what clients end up with
    trains: ClassVar[bool] = (
        False  # not declared: whether it has a client_round; without one, all work is in personalize
    )

    # The other declarations are plain values in a method (uplink = {...}), or properties if they depend on knobs.
    @property
    def uplink(self) -> dict[str, Sent]:  # every field that leaves a client
        return {}

    @property
    def downlink(self) -> dict[str, str]:  # what a client receives, by name
        return {"params": "the global model"}

    @property
    def private(self) -> dict[str, str]:  # what stays on the client, by name
        return {}

    @property
    def needs(self) -> Needs:  # what it cannot do without
        return Needs()

    @property
    def handoff(self) -> Handoff:  # the models it can start from, and those for the next stage
        return Handoff()

    @property
    def choosing(self) -> Choosing:  # who chooses among the candidates
        return Choosing()

    def __init_subclass__(cls) -> None:
        cls.trains = cls.client_round is not Method.client_round

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:  # a true leaf `settled` ends "auto"
        return {"params": params}

    def groups(self, server: Tree) -> Tensor | None:  # each client's row of `broadcast` and `sums`
        return None

    def broadcast(self, server: Tree) -> Tree:  # what all clients receive; with groups, a row per group
        return {"params": server["params"]}

    def unicast(self, server: Tree, client: int) -> Tree:  # what one client receives besides, if anything
        return {}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        return server

    def observe(self, server: Tree, cohort: Cohort) -> Observed:  # for the round's log: sizes of clusters, ...
        return {}

    def params(self, server: Tree) -> Params:  # the model that the next stage starts from
        return cast(Params, server["params"])

    def batching(self) -> Batching:  # minibatches of a training round
        return Batching()

    support_batching = batching  # and of the rows on which a client adapts

    def init_private(self, params: Params) -> Tree:  # a client's state before its first round
        return {}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:  # (private, what is sent)
        raise NotImplementedError(f"{self.card.name} has no training rounds")

    def newcomer(self, down: Tree, private: Tree, support: Batches) -> Tree:  # of a client that never trained
        return private

    def candidates(self) -> tuple[str, ...]:  # names of what `personalize` yields; validation data choose one
        return ("model",)

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Any]:  # the shared model comes first
        yield down["params"]

    def predict(self, personal: Any, batch: Params) -> Tensor:
        return self.task.predict(personal, batch)

    def outputs(self, models: Iterator[Any], parts: dict[str, Params]) -> Iterator[Params]:  # may share work
        for personal in models:
            yield {part: self.predict(personal, rows) for part, rows in parts.items()}
