"""The values that a method declares: see bespoke.method. The rest of the package knows a method by these alone, without
running it: for traffic, privacy, robust rules, the order of stages, and reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Observed = dict[str, Any]  # what a method says of a round in the log, by names of its own


@dataclass(frozen=True)
class Card:
    """A method in words."""

    name: str = ""  # in experiments
    paper: str = ""
    title: str = ""  # in print; if empty, the name of its class
    personal: str = "the global model itself"  # what a client ends up with
    unseen: str = "a client that never trained gets the global model"
    after: str = ""  # the method of an earlier stage, from whose model it starts
    tunes: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # knobs that `compare` chooses on validation data
    tunes_exact: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # the same if its knob solver is "exact"


class Reveal(Enum):
    """What the server learns of a field that leaves the client."""

    SUM = "the cohort's sum only (fits secure aggregation and central privacy)"
    COUNT = "how many clients there are: the same number for everyone, whatever its data"
    EACH = "every client's value (not private unless noised on the client)"


@dataclass(frozen=True)
class Sent:
    """A field of the message that a client sends."""

    reveal: Reveal
    change: str | None = None  # a shared model's change, multiplied by the weight in this field ("": unweighted)
    rows: tuple[str, ...] = ()  # leaves (by prefix; "": all) with a row per cluster, zero except the client's own


def reveals(uplink: dict[str, Sent]) -> dict[str, Reveal]:
    """What the server learns of each field."""
    return {name: sent.reveal for name, sent in uplink.items()}


def changes(uplink: dict[str, Sent]) -> dict[str, str]:
    """The fields that are changes of a shared model, each with the field of its weight."""
    return {name: sent.change for name, sent in uplink.items() if sent.change is not None}


@dataclass(frozen=True)
class Needs:
    """What a method requires. A number is an upper limit; 0 means no limit."""

    linear: bool = False  # a model of one affine layer
    head: bool = False  # an affine last layer under a known loss, which can be solved
    smooth: bool = False  # a loss with a second derivative
    last: bool = False  # a model whose last layer has a known name
    still: bool = False  # no buffers that training changes: its steps are not those of parts/descend.py
    words: bool = False  # rows of words
    groups: bool = False  # clients in groups, given or found by the stage before
    everyone: bool = False  # all clients take part in every round
    clients: int = 0
    coefficients: int = 0  # in the last layer
    parameters: int = 0  # in the model


@dataclass(frozen=True)
class One:
    """One model."""

    def __str__(self) -> str:
        return "one model"


@dataclass(frozen=True)
class PerGroup:
    """A model for each group, stacked; row 0 is for clients whose group is not known."""

    def __str__(self) -> str:
        return "a model for each group"


@dataclass(frozen=True)
class Stacked:
    """k models, stacked."""

    k: int

    def __str__(self) -> str:
        return f"{self.k} models"


@dataclass(frozen=True)
class Nothing:
    """No model with which another method could start."""

    def __str__(self) -> str:
        return "no model of its kind"


Models = One | PerGroup | Stacked | Nothing


@dataclass(frozen=True)
class Handoff:
    """The models that `Method.params` gives the next stage, and those from which a method may start."""

    gives: Models = One()
    takes: tuple[Models, ...] = (One(),)


@dataclass(frozen=True)
class Choosing:
    """How a client's personal model is chosen among candidates."""

    by: str = "global"  # who chooses: see bespoke.experiment.choosing.choose
    keep_shared: bool = True  # the first candidate, the shared model, may be chosen too


def stackable(when: Callable[[Any], bool] = lambda method: True) -> Callable[[Function], Function]:
    """Marks a client_round that also takes stacked clients, for methods of which `when` is true.

    It may have whole descents and elementwise sums only. A function that overrides a marked one has no mark. If
    client_round calls a function that methods may override, that function is marked too, and `when` checks its mark.
    """

    def marked(function: Function) -> Function:
        function.stackable_when = when  # type: ignore[attr-defined]
        return function

    return marked


def stacks(bound: Callable[..., Any]) -> bool:
    """Whether this function of a method (method.client_round) takes stacked clients."""
    when = getattr(bound, "stackable_when", None)
    return when is not None and when(bound.__self__)  # type: ignore[attr-defined]
