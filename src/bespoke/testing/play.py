"""Plays a method on an engine and records everything observable, to compare engines with each other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bespoke.data.splits import Train
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.host import Host
from bespoke.federation.private_state import PrivateTable
from bespoke.federation.work import ClientWork, Mode
from bespoke.messages.transform import Transform
from bespoke.method import Method, Setting
from bespoke.tensors import Params, Tree, flatten, leaves, take
from bespoke.testing.worlds import World

ROUNDS = ((0, 1, 2, 3, 4, 5, 6), (1, 3, 5), (0, 2, 5, 6))  # cohorts: everyone, and some twice


@dataclass
class Play:
    """The outcome of three rounds and an examination."""

    server: Params
    private: Params
    bytes: list[tuple[int, int]] = field(default_factory=list)  # up, down
    steps: list[tuple[int, int]] = field(default_factory=list)  # steps, examples
    cohorts: list[tuple[set[int], set[int]]] = field(default_factory=list)  # used, excluded
    each: list[dict[int, Params]] = field(default_factory=list)  # by round and client
    seen: list[bytearray] = field(default_factory=list)  # what the server received and what it made of it
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)


def setting(world: World) -> Setting:
    groups = torch.arange(len(world.population)) % 3  # of some the group is not known
    return Setting(seed=3, clients=len(world.population), groups=groups)


def start(world: World) -> Params:
    return world.task.init(5)


def play(
    engine: Engine,
    world: World,
    method: Method,
    transforms: tuple[Transform, ...] = (),
    rounds: tuple[tuple[int, ...], ...] = ROUNDS,
    train: Train | None = None,
    work: Callable[[ClientWork], ClientWork] = lambda work: work,
) -> Play:
    params = start(world)
    engine.open(work(ClientWork(method, train or world.split.train, transforms, setting(world))), params)
    server: Tree = method.init_server(params, setting(world))
    out, state = Play({}, {}), engine.start()
    for number, cohort in enumerate(rounds if method.trains else ()):
        result = engine.round(server, np.array(cohort), key=100 + number, state=state, number=number + 1)
        state = result.state
        out.bytes.append((result.bytes_up, result.bytes_down))
        out.steps.append((result.steps, result.examples))
        out.cohorts.append((set(result.cohort.clients), set(result.cohort.excluded)))
        assert len(result.cohort.clients) == len(out.cohorts[-1][0])  # nobody twice
        out.each.append({c: flatten(take(result.cohort.each, i)) for i, c in enumerate(result.cohort.clients)})
        server = method.server_round(server, result.cohort)
        received = (result.cohort.sums, result.cohort.each, server)
        out.seen += [bytearray(leaf.contiguous().numpy().tobytes()) for tree in received for leaf in leaves(tree)]
    out.server = flatten(server)
    test = world.split.test
    if len(test.query.clients):
        parts: Any = {"validation": test.validation, "query": test.query}
        out.scores = engine.examine(server, test.query.clients, test.support, parts, key=9)
    out.private = private_state(engine, params, world)
    return out


def private_state(engine: Engine, params: Params, world: World) -> Params:
    """All clients' private state, stacked, read from what the hosts write: the same way for any engine."""
    alone = Host(world.population, Mode(False))
    alone.open(engine.work, params)
    table = PrivateTable(alone._initial(params))
    with tempfile.TemporaryDirectory() as folder:
        for name in engine.save_private(Path(folder), "all", only_dirty=False):
            table.load(Path(folder) / name)
        return flatten(table.read(range(len(world.population))))


def assert_same(found: Play, expected: Play, rtol: float = 1e-4, atol: float = 2e-6) -> None:
    """Equal up to the rounding of float32 sums; everything counted is exactly equal."""
    assert found.bytes == expected.bytes
    assert found.steps == expected.steps
    assert found.cohorts == expected.cohorts
    close = {"rtol": rtol, "atol": atol}
    assert_close(found.server, expected.server, **close)
    assert_close(found.private, expected.private, **close)
    for one, other in zip(found.each, expected.each, strict=True):
        assert one.keys() == other.keys()
        for client in one:
            assert_close(one[client], other[client], **close)
    assert found.scores.keys() == expected.scores.keys()
    for part, sums in expected.scores.items():
        assert found.scores[part].keys() == sums.keys()
        for metric, values in sums.items():
            np.testing.assert_allclose(found.scores[part][metric], values, rtol=1e-3, atol=1e-4, err_msg=metric)


def assert_close(found: Params, expected: Params, rtol: float, atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert found[name].dtype == leaf.dtype
        torch.testing.assert_close(found[name], leaf, rtol=rtol, atol=atol, msg=partial("{}: {}".format, name))


LOOP = Choice(False, 1, 0, 1, "autograd", "the reference")
IN_PROCESS = {
    "loop, 2 threads": replace(LOOP, threads=2),
    "func, chunk 1": Choice(True, 1, 0, 1, "func", ""),
    "func, chunk 3": Choice(True, 3, 0, 1, "func", ""),
    "func, chunk 64": Choice(True, 64, 0, 1, "func", ""),
    "func, chunk 64, 2 threads": Choice(True, 64, 0, 2, "func", ""),
}
LINEAR_ONLY = {
    "loop, closed form": replace(LOOP, gradient="closed-form"),
    "closed form, chunk 2": Choice(True, 2, 0, 1, "closed-form", ""),
    "closed form, chunk 64": Choice(True, 64, 0, 1, "closed-form", ""),
    "fused, chunk 1": Choice(True, 1, 0, 1, "fused", ""),
    "fused, chunk 64": Choice(True, 64, 0, 1, "fused", ""),
    "fused, chunk 64, 2 threads": Choice(True, 64, 0, 2, "fused", ""),
}
