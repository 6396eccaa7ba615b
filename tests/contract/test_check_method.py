"""`check_method` finds what it is for: methods that break one promise each are refused, with the promise in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from bespoke.declarations import Reveal, Sent
from bespoke.errors import UserError
from bespoke.method import Batches, Cohort, Method
from bespoke.methods import METHODS, FedAvg
from bespoke.tensors import Params, Tree, scale, take
from bespoke.testing import CheckFailed, check_method
from bespoke.testing.check import CHECKS
from small_methods import LeakyDitto, SecretDitto, Talkative

CALLS: list[int] = []


@dataclass(frozen=True)
class FirstComes(FedAvg):
    """The server takes the change of whoever is named first."""

    card = replace(FedAvg.card, name="first-comes")
    uplink = {"delta": Sent(Reveal.EACH, change="weight"), "weight": Sent(Reveal.SUM)}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        step = scale(take(cohort.each["delta"], 0), cohort.sums["weight"].reciprocal())
        return {**server, "params": {name: p + step[name] for name, p in server["params"].items()}}


@dataclass(frozen=True)
class Remembers(FedAvg):
    """What is learned in a round depends on how many rounds this process has made."""

    card = replace(FedAvg.card, name="remembers")

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        CALLS.append(1)
        moved = super().server_round(server, cohort)
        return {**moved, "params": scale(moved["params"], torch.tensor(1 + 1e-3 * len(CALLS)))}


@dataclass(frozen=True)
class OneTooMany(FedAvg):
    """Yields two models, and names one."""

    card = replace(FedAvg.card, name="one-too-many")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        yield down["params"]
        yield down["params"]


@dataclass(frozen=True)
class OtherNewcomers(SecretDitto):
    """A client that never trained gets a state of another form."""

    card = replace(SecretDitto.card, name="other-newcomers")

    def newcomer(self, down: Tree, private: Tree, support: Batches) -> Tree:
        return {"model": down["params"], "secret": torch.zeros(3)}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Talkative, "declares"),
        (LeakyDitto, "receives the private 'secret'"),
        (FirstComes, "never trained|the order of a cohort|engines"),
        (Remembers, "not close|differ"),
        (OneTooMany, "personalize yields 2 models, and candidates\\(\\) names 1|broadcast|shape"),
        (OtherNewcomers, "newcomer returns another state|stack|size"),
    ],
)
def test_a_broken_promise_is_found(kind: type[Method], said: str) -> None:
    with pytest.raises(CheckFailed, match=f"(?s){kind.__name__} in the world 'linear'.*({said})"):
        check_method(kind, worlds=("linear",))


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_methods_that_keep_them_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bespoke.testing.check.ONCE", {})  # test_battery.py sees to worker processes
    check_method(METHODS[name], worlds=("linear",))


def test_what_needs_a_linear_model_says_so() -> None:
    with pytest.raises(UserError, match="needs a linear model"):
        check_method(METHODS["mocha"], worlds=("mlp",))
    assert len(CHECKS) > 5
