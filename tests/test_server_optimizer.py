"""Server optimizers against torch.optim, and against their formulas by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bespoke.data.population import Population
from bespoke.data.splits import everything
from bespoke.experiment.stage import check_stage
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.methods import FedAvg
from bespoke.methods.parts.server_optimizer import ServerOptimizer
from bespoke.models.networks import Linear
from bespoke.models.task import Regression


def updates(steps: int) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(3)
    return [
        {"w": torch.randn(2, 3, generator=random), "b": torch.randn(2, generator=random)} for _ in range(steps)
    ]  # fmt: skip


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("sgd", lambda p, wd: torch.optim.SGD(p, lr=0.3, weight_decay=wd)),
        ("momentum", lambda p, wd: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=wd)),
        ("adam", lambda p, wd: torch.optim.Adam(p, lr=0.3, betas=(0.9, 0.99), eps=1e-3, weight_decay=wd)),
        ("adagrad", lambda p, wd: torch.optim.Adagrad(p, lr=0.3, eps=1e-3, weight_decay=wd)),
    ],
)
def test_torch_convention_is_torch(name: Any, theirs: Any, weight_decay: float) -> None:
    """Step by step; the mean change is minus a gradient."""
    start = {"w": torch.full((2, 3), 0.5), "b": torch.tensor([-1.0, 2.0])}
    ours = ServerOptimizer(name, lr=0.3, momentum=0.9, beta2=0.99, eps=1e-3, weight_decay=weight_decay)
    params, state = start, ours.init(start)
    live = {n: p.clone().requires_grad_() for n, p in start.items()}
    optimizer = theirs(list(live.values()), weight_decay)
    for update in updates(7):
        params, state = ours.step(state, params, update)
        for n, p in live.items():
            p.grad = -update[n]
        optimizer.step()
        for n, p in live.items():
            torch.testing.assert_close(params[n], p.detach(), rtol=1e-5, atol=1e-6)


def scalar_run(optimizer: ServerOptimizer, changes: list[float], start: float = 1.0) -> list[float]:
    params = {"w": torch.tensor([start], dtype=torch.float64)}
    state, path = optimizer.init(params), []
    for change in changes:
        params, state = optimizer.step(state, params, {"w": torch.tensor([change], dtype=torch.float64)})
        path.append(params["w"].item())
    return path


def test_tff_adam_folds_the_correction_into_the_rate() -> None:
    """m = .1 d, v = .01 d^2; with d = 2: rate sqrt(.01)/.1 = 1, so the step is .2 / (.2 + eps), not 2 / (2 + eps)."""
    optimizer = ServerOptimizer("adam", lr=1.0, momentum=0.9, beta2=0.99, eps=0.1, convention="tff")
    first, second = scalar_run(optimizer, [2.0, -1.0])
    assert first == pytest.approx(1 + 0.2 / (0.2 + 0.1))
    m, v = 0.9 * 0.2 - 0.1 * 1, 0.99 * 0.04 + 0.01
    rate = (1 - 0.99**2) ** 0.5 / (1 - 0.9**2)
    assert second == pytest.approx(first + rate * m / (v**0.5 + 0.1))


def test_reddi_adam_has_no_correction_and_starts_at_eps_squared() -> None:
    optimizer = ServerOptimizer("adam", lr=0.5, momentum=0.9, beta2=0.99, eps=0.1, convention="reddi")
    assert optimizer.init({"w": torch.zeros(2)})["second"]["w"].tolist() == pytest.approx([0.01, 0.01])
    first, second = scalar_run(optimizer, [2.0, -1.0])
    v1 = 0.99 * 0.01 + 0.01 * 4
    assert first == pytest.approx(1 + 0.5 * 0.2 / (v1**0.5 + 0.1))
    m, v2 = 0.9 * 0.2 - 0.1, 0.99 * v1 + 0.01
    assert second == pytest.approx(first + 0.5 * m / (v2**0.5 + 0.1))


def test_motley_silo() -> None:
    """Momentum m <- .9 m + .1 d; Adam without correction, v from zero."""
    optimizer = ServerOptimizer("momentum", lr=2.0, momentum=0.9, convention="motley-silo")
    assert scalar_run(optimizer, [1.0, 3.0], start=0.0) == pytest.approx([0.2, 0.2 + 2 * (0.09 + 0.3)])
    adam = ServerOptimizer("adam", lr=1.0, momentum=0.9, beta2=0.99, eps=0.1, convention="motley-silo")
    assert scalar_run(adam, [2.0], start=0.0) == pytest.approx([0.2 / (0.2 + 0.1)])
    plain = ServerOptimizer("momentum", lr=2.0, momentum=0.9)  # everybody else: m <- .9 m + d
    assert scalar_run(plain, [1.0, 3.0], start=0.0) == pytest.approx([2.0, 2.0 + 2 * 3.9])


def test_yogi_by_hand() -> None:
    """v <- v - (1 - b2) d^2 sign(v - d^2): it grows like Adam from below and shrinks slowly from above."""
    optimizer = ServerOptimizer("yogi", lr=1.0, momentum=0.5, beta2=0.9, eps=0.1, convention="reddi")
    first, second = scalar_run(optimizer, [2.0, 0.1], start=0.0)
    v1 = 0.01 + 0.1 * 4  # 0.01 < 4: grows
    assert first == pytest.approx(1.0 / (v1**0.5 + 0.1))
    v2 = v1 - 0.1 * 0.01  # 0.41 > 0.01: shrinks by 0.001
    assert second == pytest.approx(first + 0.55 / (v2**0.5 + 0.1))


def test_adagrad_by_hand() -> None:
    optimizer = ServerOptimizer("adagrad", lr=1.0, eps=0.5, convention="reddi")
    first, second = scalar_run(optimizer, [2.0, -3.0], start=0.0)
    assert first == pytest.approx(2 / (4.25**0.5 + 0.5))
    assert second == pytest.approx(first - 3 / (13.25**0.5 + 0.5))


def test_state_goes_in_and_comes_out() -> None:
    """A step changes none of its arguments: a round can be run again."""
    optimizer = ServerOptimizer("adam")
    params = {"w": torch.ones(2)}
    state = optimizer.init(params)
    results = [optimizer.step(state, params, {"w": torch.tensor([1.0, -1.0])}) for _ in range(2)]
    assert torch.equal(results[0][0]["w"], results[1][0]["w"])
    assert int(state["time"]) == 0
    assert params["w"].tolist() == [1.0, 1.0]
    assert optimizer.init(params).keys() == results[0][1].keys()


def two_clients(**knobs: Any) -> tuple[FedAvg, Any]:
    """x = 1 everywhere; client a has y = 4 once, client b y = -4 three times; one batch each."""
    rows = {"x": torch.ones(4, 1), "y": torch.tensor([4.0, -4.0, -4.0, -4.0])}
    population = Population.build(rows, np.array(["a", "b", "b", "b"]))
    method = FedAvg(Regression(Linear(1)), lr=0.25, batch_size=10, **knobs)
    params = method.task.init(0)
    with Engine(population, Choice(False, 1, 0, 1, "autograd", "")) as engine:
        engine.open(ClientWork(method, everything(population)), params)
        return method, engine.round(method.init_server(params), np.array([0, 1]), key=0)


def test_fedavg_round_by_hand() -> None:
    """From w = b = 0 the errors are -4 and 4: a moves both by +1, b by -1. Weights 1 and 3: (1 - 3) / 4 = -1/2."""
    method, result = two_clients()
    assert result.cohort.sums["delta"]["weight"].tolist() == [[-2.0]]
    assert float(result.cohort.sums["weight"]) == 4.0
    server = method.server_round(method.init_server(method.task.init(0)), result.cohort)
    assert server["params"]["weight"].tolist() == [[-0.5]]
    assert server["params"]["bias"].tolist() == [-0.5]
    assert (result.bytes_up, result.bytes_down, result.steps, result.examples) == (2 * 12, 2 * 8, 2, 4)


def test_fedavg_round_with_uniform_weights_and_a_server_rate() -> None:
    """Weights 1 and 1: the changes cancel. And server lr 3 on the weighted mean gives -3/2."""
    method, result = two_clients(weighting="uniform")
    server = method.server_round(method.init_server(method.task.init(0)), result.cohort)
    assert server["params"]["bias"].tolist() == [0.0]
    method, result = two_clients(server=ServerOptimizer("sgd", lr=3.0))
    server = method.server_round(method.init_server(method.task.init(0)), result.cohort)
    assert server["params"]["bias"].tolist() == [-1.5]


@pytest.mark.parametrize(
    ("method", "table", "name", "lr", "eps"),
    [
        ("fedpc", {"lr": 0.5}, "adam", 0.5, 1e-8),  # the paper's server, with another rate
        ("fedpc", {"name": "adam"}, "adam", 0.01, 1e-8),
        ("fedpc-meta", {"eps": 0.001}, "adam", 0.001, 0.001),
        ("fedpc", "sgd", "sgd", 1.0, 0.001),  # another optimizer has nothing of the method's
        ("fedpc", {"name": "sgd", "lr": 0.5}, "sgd", 0.5, 0.001),
        ("fedavg", {"lr": 0.5}, "sgd", 0.5, 0.001),
        ("fedavg", {"name": "adam", "lr": 0.5}, "adam", 0.5, 0.001),
    ],
)
def test_a_table_that_sets_a_part_keeps_the_methods_own_optimizer(
    method: str, table: Any, name: str, lr: float, eps: float
) -> None:
    """`server.lr` of a grid tunes the optimizer that the method has without it."""
    server = check_stage({"method": method, "rounds": 1, "server": table}, "stage 0").knobs["server"]
    assert (server.name, server.lr, server.eps) == (name, lr, eps)
