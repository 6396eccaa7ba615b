"""`check_method`: checks that a method keeps its contract, on small worlds.

from bespoke.testing import check_method

def test_fedper():
    check_method(FedPer)
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from bespoke.data.splits import cross_silo
from bespoke.declarations import Reveal, reveals
from bespoke.errors import UserError
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.batches import Orders
from bespoke.federation.engine import Choice, Engine
from bespoke.messages.clip import Clip
from bespoke.messages.compress import Compress
from bespoke.messages.transform import Transform
from bespoke.method import Method
from bespoke.privacy.gaussian import Gaussian
from bespoke.runs.events import Interrupted
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.tensors import flatten, take
from bespoke.testing.play import IN_PROCESS, LINEAR_ONLY, LOOP, ROUNDS, Play, assert_same, play, setting, start
from bespoke.testing.worlds import BATCH, FRACTIONS, World, spoiled, world

SMALL = {"batch_size": BATCH, "epochs": 2, "lr": 0.1}  # knobs with which several batches and epochs are seen
LATE = ((1, 3, 5), (3, 4, 5))  # cohorts in which some clients never come
WINDOW = 16  # bytes: four numbers in a row do not occur by chance
NOT_A_RESULT = ("timing.jsonl", ".lock")  # what two runs of the same do not have in common
WORKERS = replace(LOOP, workers=2)
ROUNDS_OF_A_RUN = 3


class CheckFailed(AssertionError):
    """A part of the contract that a method breaks, and the world in which it does."""


def check_method(kind: type[Method], *, worlds: tuple[str, ...] = ("linear", "mlp"), **knobs: Any) -> None:
    """Raise CheckFailed if this method does not keep the contract, with these knobs.

    The same results, up to rounding, of every engine: one client after the other, many at once in chunks of all sizes
    (so that clients are padded to each other), in worker processes. The same whatever the order of a cohort. Clipping,
    compression and noise act on what is sent, or are refused. A message has the declared fields. A client whose update
    is not finite changes nothing. Clients that never trained get personal models. Nothing private is among what the
    server receives. A run that is interrupted and resumed leaves the same bytes.

    worlds: small data and models, of "linear", "logistic", "mlp" and others; a method that needs a linear model is
    tried in linear worlds alone. Worker processes import the class, so it has to be defined in a module.
    """
    tried = 0
    for name in worlds:
        place = world(name)
        sums = tuple(metric for metric in place.task.metrics if metric != "auc")  # it jumps where rounding breaks a tie
        place = replace(place, task=replace(place.task, metrics=sums))
        known = {entry.name for entry in fields(kind) if entry.init}
        method = kind(place.task, **{k: v for k, v in SMALL.items() if k in known} | knobs)
        if method.needs.linear and not place.linear:
            continue
        tried += 1
        for what, check in (CHECKS if tried > 1 else {**CHECKS, **ONCE}).items():
            with _saying(f"{kind.__name__} in the world {name!r}: {what}"):
                check(method, place)
    if not tried:
        raise UserError(f"check_method({kind.__name__}): it needs a linear model; give worlds=('linear', 'logistic')")


@contextmanager
def _saying(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckFailed(f"{what}: {error or type(error).__name__}") from error


def _played(method: Method, place: World, choice: Choice = LOOP, **how: Any) -> Play:
    with Engine(place.population, choice) as engine:
        return play(engine, place, method, **how)


def declarations(method: Method, place: World) -> None:
    """The card names the method, and a method that trains declares what it sends."""
    assert method.card.name, "its card has no name"
    assert (type(method).__doc__ or "").strip(), "its class has no docstring, of which the first line describes it"
    assert method.trains == bool(method.uplink), "a method with a client_round declares in uplink what it sends"
    state = flatten(method.init_private(start(place)))
    assert not state or method.private, "init_private returns something, and `private` does not say what it is"


def engines(method: Method, place: World) -> None:
    """One by one, in chunks of several sizes, compiled: the same results."""
    expected = _played(method, place)
    others = IN_PROCESS | (LINEAR_ONLY if place.linear else {})
    for name, choice in others.items():
        if place.task.vectorizes and choice.threads == 1:
            with _saying(f"by {name}, against one client after the other"):
                assert_same(_played(method, place, choice), expected)


def workers(method: Method, place: World) -> None:
    """In worker processes, which import the method: the same results."""
    again = pickle.loads(pickle.dumps(method))
    assert type(again) is type(method), "another class is found under its name in its module"
    assert_same(_played(method, place, WORKERS), _played(method, place))


def cohort_order(method: Method, place: World) -> None:
    """The order in which a cohort is named changes nothing."""
    turned = tuple(tuple(reversed(cohort)) for cohort in ROUNDS)
    assert_same(_played(method, place, rounds=turned), _played(method, place))


def transforms(method: Method, place: World) -> None:
    """Clipping, compression and noise give the same on all engines, or are refused if nothing can be transformed."""
    noised = tuple(name for name, reveal in reveals(method.uplink).items() if reveal is not Reveal.COUNT)
    counts = tuple(name for name in method.uplink if name not in noised)
    acting: dict[str, tuple[Transform, ...]] = {
        "clipping": (Clip(0.5),),
        "compression": (Compress(0.5, "stochastic", least=2), Clip(0.5)),
        "noise": (Gaussian(noised, 0.5, 0.02, 0.03, False, 5.0, counts, reproducible=True),),
    }
    for name, some in acting.items():
        needed = {field for transform in some for field in transform.needs}
        if not method.trains or needed - set(method.uplink):
            continue  # refused in words, before anything is run
        with _saying(name):
            expected = _played(method, place, transforms=some)
            if place.task.vectorizes:
                assert_same(_played(method, place, IN_PROCESS["func, chunk 3"], transforms=some), expected)


def not_finite(method: Method, place: World) -> None:
    """A client with rows that are not numbers is left out; the others' results are those without it."""
    if not method.trains or not place.population.columns["x"].is_floating_point():
        return
    bad = 4
    everyone = tuple(range(len(place.population)))
    others = tuple(client for client in everyone if client != bad)
    expected = _played(method, place, rounds=(others,))
    split = cross_silo(spoiled(place.population, bad), FRACTIONS, seed=3)
    found = _played(method, replace(place, population=split.train.population, split=split), rounds=(everyone,))
    assert found.cohorts == [(set(others), {bad})], f"used and excluded were {found.cohorts}"
    for name, leaf in expected.server.items():
        close = bool(np.allclose(found.server[name].numpy(), leaf.numpy(), rtol=1e-4, atol=2e-6))
        assert close, f"the server's {name} is not what it is without this client"


def newcomers(method: Method, place: World) -> None:
    """Clients that never trained get personal models, as many as candidates() names, on every engine."""
    expected = _played(method, place, rounds=LATE)
    if place.task.vectorizes:
        assert_same(_played(method, place, IN_PROCESS["func, chunk 64"], rounds=LATE), expected)
    params, names = start(place), method.candidates()
    assert len(set(names)) == len(names), f"candidates() names one twice: {names}"
    server = method.init_server(params, setting(place))
    orders = Orders.draw(place.split.test.support, np.array([5]), method.support_batching(), key=1).sliced(0)
    groups, shared = method.groups(server), method.broadcast(server)
    down = {**(shared if groups is None else take(shared, int(groups[5]))), **method.unicast(server, 5)}
    private = method.init_private(params)
    made = method.newcomer(down, private, orders)
    there, asked = {n: leaf.shape for n, leaf in flatten(made).items()}, flatten(private)
    assert there == {n: leaf.shape for n, leaf in asked.items()}, "newcomer returns another state than init_private"
    models = list(method.personalize(down, made, orders))
    assert len(models) == len(names), f"personalize yields {len(models)} models, and candidates() names {len(names)}"


def private_bytes(method: Method, place: World) -> None:
    """No private state of a client is found in what the server receives or holds."""
    if not method.trains:
        return
    found, begun = _played(method, place), flatten(method.init_private(start(place)))
    public = b"".join(leaf.contiguous().numpy().tobytes() for leaf in [*begun.values(), *start(place).values()])
    blob = b"|".join(found.seen)
    for name, leaf in found.private.items():
        for client in range(len(place.population)):
            own = leaf[client].contiguous().numpy().tobytes()
            for at in range(0, len(own) - WINDOW + 1, leaf.element_size()):
                window = own[at : at + WINDOW]
                secret = any(window) and window not in public
                assert not (secret and window in blob), f"the server receives the private {name!r} of client {client}"


def resumed(method: Method, place: World) -> None:
    """A run that is interrupted after every round and resumed leaves the same bytes as one that is not."""
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder) / "whole", Path(folder) / "parts"
        _run(method, place, whole, lambda: False)
        rounds = ROUNDS_OF_A_RUN if method.trains else 0
        for _ in range(rounds):
            seen: list[int] = []

            def after_one(seen: list[int] = seen) -> bool:
                seen.append(1)
                return len(seen) > 1

            try:
                _run(method, place, parts, after_one)
            except Interrupted:
                continue
            break
        _run(method, place, parts, lambda: False)
        found, expected = _contents(parts), _contents(whole)
        assert found.keys() == expected.keys(), f"other files: {sorted(found.keys() ^ expected.keys())}"
        different = [name for name in expected if found[name] != expected[name]]
        assert not different, f"these files differ: {', '.join(different)}"


def _run(method: Method, place: World, folder: Path, stop: Callable[[], bool]) -> None:
    stage = Stage(method, ROUNDS_OF_A_RUN if method.trains else 0)
    experiment = Experiment(
        "check", place.population, place.split, place.task, (stage,), place.task.metrics[0], cohort=4
    )
    Run(experiment, RunFolder.create(folder, ""), how=LOOP, stop=stop).run()


def _contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in NOT_A_RESULT)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


CHECKS: dict[str, Callable[[Method, World], None]] = {
    "what it declares": declarations,
    "clients that never trained": newcomers,
    "private state": private_bytes,
    "a client that is not finite": not_finite,
    "the order of a cohort": cohort_order,
    "engines": engines,
    "clipping, compression, noise": transforms,
    "interrupted and resumed": resumed,
}
ONCE = {"worker processes": workers}  # in the first world: starting them takes seconds
