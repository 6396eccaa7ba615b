"""The contract of a method: frozen dataclasses of pure functions. Nothing else in the package is needed to read one.

Clients never see the server's state, the server never sees private state; `uplink` declares what leaves a client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any, ClassVar, Protocol

from torch import Tensor

from bespoke.tensors import Params, Tree


class Reveal(Enum):  # what the server learns of a field that leaves the client
    SUM = "the cohort's sum only (fits secure aggregation and central privacy)"
    COUNT = "how many clients there are: the same number for everyone, whatever its data"
    EACH = "every client's value (not private unless noised on the client)"


class Task(Protocol):  # data joined with a model; knows nothing of federation: see bespoke.models.task
    def linear(self) -> Any: ...  # the last layer to be solved, or None: see bespoke.models.linear_problem
    def fresh(self, seed: int) -> Params: ...  # a random start, also where the task's own is fixed
    def loss(self, params: Params, batch: Params) -> Tensor: ...
    def gradient(self, params: Params, batch: Params) -> Params: ...
    def predict(self, params: Params, batch: Params) -> Tensor: ...
    def features(self, params: Params, batch: Params) -> Tensor: ...
    def scored(self, params: Params, batch: Params) -> Params: ...  # sums of scores, and their count


@dataclass(frozen=True)
class Batching:  # how a client's rows become minibatches
    size: int = 32
    epochs: int = 1
    _: KW_ONLY
    reshuffle: bool = True  # a new order every epoch
    shuffle: bool = True  # False: rows as they are stored
    drop_last: bool = False  # leave out the last, partial batch (a client smaller than a batch keeps its only one)
    uses: int = 1  # how many descents go over them: for counting the work
    steps: int = 0  # if given, so many steps, not epochs; a private leaf `steps` says how many a client took, if fewer


class Batches(Protocol):  # one client's minibatches; the engine decides how they come about
    @property
    def examples(self) -> Tensor: ...  # how many rows the client has, as a float scalar
    def __len__(self) -> int: ...
    def __getitem__(self, step: int) -> Params: ...
    def live(self, step: int) -> float | Tensor: ...  # 1.0; 0.0 for a step that only pads to the longest client
    def epochs(self, many: int = 1) -> Iterator[Batches]: ...  # stretches of so many epochs
    def part(self, begin: int, end: int) -> Batches: ...  # these epochs only
    def first(self, steps: Tensor, most: int) -> Batches: ...  # with Batching.steps: each client's own number of them
    def again(self, step: int, times: int) -> Batches: ...  # this step's batch alone, so many times
    def rows(self) -> Params: ...  # all rows at once, with their mask
    def chances(self, count: int, purpose: str) -> Tensor: ...  # uniform numbers of the client's own, new every round


@dataclass(frozen=True)
class Cohort:  # what a round hands the server, and which clients stand behind it
    sums: Tree  # of methods with `groups` a row a group: every group is a cohort of its own
    each: Tree  # leaves have a first dimension: a client each, in the order of `clients`
    clients: tuple[int, ...]  # those whose update was used
    excluded: tuple[int, ...] = ()  # those whose update was not finite


@dataclass(frozen=True)
class Setting:  # what the server knows before the first round
    seed: int = 0
    clients: int = 0  # numbered from 0
    training: int = 0  # of these, how many may take part in rounds; cross-device holds some out
    groups: Tensor | None = None  # each client's, given or found by the stage before: from 1, and 0 where not known


def knob(default: Any, doc: str, **bounds: Any) -> Any:  # a hyper-parameter; bounds: ge, gt, le, lt, always checked
    return field(default=default, metadata={"doc": doc, "bounds": bounds})


@dataclass(frozen=True)
class Method:  # the defaults: one model in the server, nothing private, the global model for everyone
    task: Task
    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    uplink: ClassVar[dict[str, Reveal]] = {}
    changes: ClassVar[dict[str, str]] = {}  # field that is a shared model's change -> weight it is times, or ""
    rowed: ClassVar[tuple[str, ...]] = ()  # leaves ("delta/...") with a row a cluster, zeros but for the client's own
    downlink: ClassVar[dict[str, str]] = {"params": "the global model"}
    private: ClassVar[dict[str, str]] = {}  # what stays on the client, by name
    personal: ClassVar[str] = "the global model itself"  # what a client ends up with
    unseen: ClassVar[str] = "a client that never trained gets the global model"
    trains: ClassVar[bool] = True  # False: all of its work is in personalize, no rounds
    after: ClassVar[str] = ""  # the method whose model it starts from, as a stage before it
    tunes: ClassVar[dict[str, tuple[Any, ...]]] = {}  # knobs that `compare` chooses on validation data
    tunes_exact: ClassVar[dict[str, tuple[Any, ...]]] = {}  # the same where its knob solver is "exact"
    hands_on = 1  # how many models `params` gives the next stage, stacked if several; 0: one a group; -1: none
    starts_from: ClassVar[tuple[int, ...]] = (1,)  # how many models a stage before it may hand on
    linear_only: ClassVar[bool] = False  # it needs a model with one affine layer
    most_clients: ClassVar[int] = 0  # more it cannot serve; 0: any number
    everyone: ClassVar[bool] = False  # True: all clients take part in its rounds, whatever the cohort
    stackable = False  # True: client_round takes stacked clients too, having only whole descents and elementwise sums
    choose = "global"  # who chooses among candidates: see bespoke.selection.choose
    keep_shared = True  # the first candidate, what a client without a personal model has, may be chosen too

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:  # true leaf `settled`: "auto" ends
        return {"params": params}

    def groups(self, server: Tree) -> Tensor | None:  # each client's row in `broadcast` and `sums`, where by group
        return None

    def broadcast(self, server: Tree) -> Tree:  # what every client of the cohort is sent; with groups, a row a group
        return {"params": server["params"]}

    def unicast(self, server: Tree, client: int) -> Tree:  # what one client is sent besides, if it must be known
        return {}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        return server

    def observe(self, server: Tree, cohort: Cohort) -> dict[str, Any]:  # for the round's log: sizes of clusters, ...
        return {}

    def params(self, server: Tree) -> Params:  # the model that the next stage starts from
        return server["params"]

    def batching(self) -> Batching:  # minibatches of a training round
        return Batching()
    support_batching = batching  # and of the rows a client adapts on

    def init_private(self, params: Params) -> Tree:  # what a client holds before its first round
        return {}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:  # (private, what is sent)
        raise NotImplementedError(f"{self.name} has no training rounds")

    def newcomer(self, down: Tree, private: Tree, support: Batches) -> Tree:  # private state of one that never trained
        return private

    def candidates(self) -> tuple[str, ...]:  # the names of what `personalize` yields; one is chosen on validation data
        return ("model",)

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Any]:  # the shared model comes first
        yield down["params"]

    def predict(self, personal: Any, batch: Params) -> Tensor:
        return self.task.predict(personal, batch)

    def outputs(self, models: Iterator[Any], parts: dict[str, Params]) -> Iterator[Params]:  # may share work
        for personal in models:
            yield {part: self.predict(personal, rows) for part, rows in parts.items()}
