"""Every method x engine x transform through one battery: the same server, private state, bytes, steps and scores."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from battery import (
    IN_PROCESS,
    LINEAR_ONLY,
    LOOP,
    ROUNDS,
    Play,
    assert_close,
    assert_same,
    every_method,
    method_of,
    play,
    private_state,
    setting,
    start,
)

from bespoke.data.population import Population
from bespoke.data.splits import cross_silo, everything
from bespoke.declarations import Reveal, reveals
from bespoke.errors import UserError, WorkerFailed
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.batches import Orders
from bespoke.federation.choice import choose
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.host import Host
from bespoke.federation.work import ClientWork, Mode
from bespoke.messages.clip import Clip
from bespoke.messages.compress import Compress
from bespoke.messages.transform import Outgoing, Transform
from bespoke.method import Batching, Method
from bespoke.methods import METHODS, FedAvg, FineTune, HypCluster
from bespoke.privacy.gaussian import Adaptive, Gaussian
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.tensors import Params, flatten, subtract, take, tree_map
from small_methods import SOLVED_METHODS, Silent, SmallDitto, Talkative
from small_worlds import BATCH, FRACTIONS, SIZES, WORLDS, World, owners, spoiled, world

METHOD_NAMES = tuple(every_method())
CLIP = (Clip(0.5),)  # of the order of the updates: it bites on some clients and leaves others
TRANSFORMS = {"plain": (), "clip": CLIP}


def transforms_of(method: str) -> tuple[str, ...]:
    """Those that act on what the method sends."""
    made = every_method()[method](known_world("linear").task)
    return tuple(TRANSFORMS) if "delta" in made.uplink else ("plain",)


# In other worlds than the linear one what differs is the gradient: one method of each kind suffices.
ELSEWHERE = ("fedavg", "fedprox", "scaffold", "finetune", "knn-per", "per-fedavg", "hypcluster", "ditto", "offsets")
# Fits to convergence differ by the loss: closed form, Newton's method, an interior point.
SOLVED = ("shared", "mixed", *(method.card.name for method in SOLVED_METHODS))
STEPPING = ("fedavg", "ditto", "pfedme", "per-fedavg", "apfl", "scaffold", "hypcluster")  # rounds in steps
HEAVY = ("fedavg", "hypcluster", "ditto", "knn-per")  # convolutions and recurrences: slow, nothing new in the others


def _cases() -> Iterator[tuple[str, str, str]]:
    for name in ("linear", "logistic", "logistic-bytes", "hinge"):
        for method in METHOD_NAMES if name == "linear" else (*ELSEWHERE, "mocha"):
            yield from ((name, method, engine) for engine in (*IN_PROCESS, *LINEAR_ONLY) if _worth(method, engine))
    for name in ("logistic", "hinge"):
        for method in SOLVED if name == "logistic" else (n for n in SOLVED if n.startswith("solved")):
            yield from ((name, method, engine) for engine in ("closed form, chunk 64", "fused, chunk 1"))
    for method in ELSEWHERE:
        yield from (("mlp", method, engine) for engine in IN_PROCESS if _worth(method, engine))
    yield from (("cnn", method, "func, chunk 64") for method in HEAVY)
    yield ("cnn", "fedavg", "func, chunk 3")


def _worth(method: str, engine: str) -> bool:
    """Two threads for a tiny model are slow, and one method shows what there is to see."""
    return "threads" not in engine or method == "fedavg"


@cache
def known_world(name: str) -> World:
    return world(name)


@cache
def reference(name: str, method: str, transform: str = "plain", drop_last: bool = False) -> Play:
    """The plain loop, one thread: what all others are held against."""
    place = known_world(name)
    with Engine(place.population, LOOP) as engine:
        return play(engine, place, method_of(every_method()[method], place, drop_last), TRANSFORMS[transform])


@pytest.mark.parametrize(("name", "method", "engine"), list(_cases()))
def test_engines_agree(name: str, method: str, engine: str) -> None:
    place = known_world(name)
    for transform in transforms_of(method) if name != "cnn" else ("plain",):
        for drop_last in (False, True) if (name, transform) == ("linear", "plain") else (False,):
            with Engine(place.population, {**IN_PROCESS, **LINEAR_ONLY}[engine]) as running:
                made = method_of(every_method()[method], place, drop_last)
                assert_same(
                    play(running, place, made, TRANSFORMS[transform]), reference(name, method, transform, drop_last)
                )


def messages(method: Method, kind: str) -> tuple[Transform, ...]:
    """What may act on a method's messages: clipping, compression, noise of both kinds with a bound that follows."""
    if kind != "noisy":
        return {
            "top_k": (Compress(0.5),),  # leaves of sixteen entries and more: none of the small worlds has so many
            "quantize": (Compress(None, "nearest", least=2),),
            "compressed": (Compress(0.5, "stochastic", least=2), Clip(0.5)),
        }[kind]
    template = {name: reveal for name, reveal in reveals(method.uplink).items() if reveal is not Reveal.COUNT}
    counts = tuple(name for name in method.uplink if name not in template)
    adaptive = Adaptive(quantile=0.6)
    groups = {1: 3.0, 2: 2.0} if method.card.name == "group-fl" else {}
    return (Gaussian(tuple(template), 0.5, 0.02, 0.03, False, 5.0, counts, adaptive, True, groups),)


def acts_on(method: Method, place: World, transforms: tuple[Transform, ...]) -> bool:
    """Whether these change anything of what a client sends."""
    host = Host(place.population, Mode(False))
    host.open(ClientWork(method, place.split.train, (), setting(place)), start(place))
    ones = tree_map(lambda leaf: torch.arange(1.0, leaf.numel() + 1).reshape(leaf.shape)[None], host.template())
    sent = Outgoing(ones, 0, place.population.keys[:1], 0)
    for transform in transforms:
        memory = tree_map(lambda leaf: leaf[None], transform.memory(host.template()))
        sent = transform.client(replace(sent, state=transform.start(), memory=memory))
    after = flatten(sent.up)
    return after.keys() != flatten(ones).keys() or any(not leaf.equal(after[n]) for n, leaf in flatten(ones).items())


def refused(method: Method, transforms: tuple[Transform, ...]) -> bool:
    """The rule: a transform acts on fields, and a method that trains without sending them is refused."""
    return method.trains and any(set(transform.needs) - set(method.uplink) for transform in transforms)


@pytest.mark.parametrize("name", ["linear", "mlp"])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_every_method_under_every_transform(method: str, name: str) -> None:
    """It runs; or the method sends nothing to act on, and is refused in words.

    In the linear world other tests see to clipping, noise and memory, on every engine.
    """
    place = known_world(name)
    made = method_of(every_method()[method], place)
    if made.needs.linear and not place.linear:
        return  # refused whatever acts on its messages
    how = {"top_k": LOOP, "quantize": LOOP}
    if not place.linear:
        how |= {"compressed": IN_PROCESS["func, chunk 64"], "noisy": LOOP}
    for kind, choice in how.items():
        transforms = messages(made, kind)
        if refused(made, transforms):
            with pytest.raises(UserError, match=f"transform.* as delta, and {method} sends .* instead"):
                ClientWork(made, place.split.train, transforms)
            continue
        with Engine(place.population, choice) as engine:
            found = play(engine, place, made, transforms, rounds=((1, 2), (2,)))
        assert all(bool(leaf.isfinite().all()) for leaf in found.server.values())


@pytest.mark.parametrize("method", [name for name, kind in every_method().items() if kind.trains])
def test_noise_is_the_same_on_every_engine(method: str, looping_workers: Engine, fused_workers: Engine) -> None:
    """Each client draws its own noise, in any chunk of any worker."""
    place = known_world("linear")
    made = method_of(every_method()[method], place)
    transforms = messages(made, "noisy")
    with Engine(place.population, LOOP) as engine:
        expected = play(engine, place, made, transforms)
    for choice in (IN_PROCESS["func, chunk 3"], LINEAR_ONLY["fused, chunk 64"]):
        with Engine(place.population, choice) as engine:
            assert_same(play(engine, place, made, transforms), expected)
    for workers in (looping_workers, fused_workers):
        assert_same(play(workers, place, made, transforms), expected)
    if acts_on(made, place, transforms):  # and it is not that nothing happened
        with pytest.raises(AssertionError):
            assert_same(expected, reference("linear", method))


class Measured(Compress):
    """Compression that keeps the largest step between two values that it can send."""

    steps: ClassVar[list[float]] = []

    def encode(self, *sent: Any) -> Params:
        wire = super().encode(*sent)
        self.steps.append(float(wire["unit"].max()))
        return wire


@pytest.mark.parametrize("method", [name for name, kind in every_method().items() if kind.trains])
def test_compression_is_the_same_on_every_engine(method: str, looping_workers: Engine, fused_workers: Engine) -> None:
    """Each client rounds by its own draw and remembers its own error, in any chunk of any worker.

    An entry that lies at the border between two steps may be rounded to either by the last digit of an engine's sums.
    So after one round nearly all entries have to agree, and the others within a step. After three rounds, in which a
    client that forgot its error would be far off, all have to agree within a few steps.
    """
    place = known_world("linear")
    made = method_of(every_method()[method], place)
    transforms = messages(made, "compressed")
    if refused(made, transforms):
        with pytest.raises(UserError, match="transform"):
            looping_workers.open(ClientWork(made, place.split.train, transforms), start(place))
        return
    Measured.steps.clear()
    measured = tuple(Measured(t.keep, t.rounding, t.least) if isinstance(t, Compress) else t for t in transforms)
    rounds = ROUNDS[:1], ROUNDS
    with Engine(place.population, LOOP) as engine:
        expected = [play(engine, place, made, measured, some) for some in rounds]
    step = max(Measured.steps, default=0.0)
    choices = (IN_PROCESS["func, chunk 3"], LINEAR_ONLY["fused, chunk 64"])
    for running in (*(Engine(place.population, choice) for choice in choices), looping_workers, fused_workers):
        once, thrice = (play(running, place, made, transforms, some) for some in rounds)
        assert_within(once, expected[0], 1.01 * step, share=0.05)
        assert_within(thrice, expected[1], 4 * step, share=1.0)
    if acts_on(made, place, transforms):  # and it is not that nothing happened
        with pytest.raises(AssertionError):
            assert_same(expected[1], reference("linear", method))


def assert_within(found: Play, expected: Play, most: float, share: float) -> None:
    """Equal counts; numbers equal up to rounding but for a `share` of them, which differ by `most`."""
    assert (found.bytes, found.steps, found.cohorts) == (expected.bytes, expected.steps, expected.cohorts)
    for mine, theirs in ((found.server, expected.server), (found.private, expected.private)):
        assert mine.keys() == theirs.keys()
        far = [(mine[name] - leaf).abs().flatten() for name, leaf in theirs.items() if leaf.is_floating_point()]
        near = [2e-6 + 1e-4 * leaf.abs().flatten() for leaf in theirs.values() if leaf.is_floating_point()]
        off, allowed = torch.cat([torch.zeros(0), *far]), torch.cat([torch.zeros(0), *near])
        assert bool((off <= allowed + most).all())
        assert int((off > allowed).sum()) <= math.ceil(share * len(off))


def test_the_battery_can_fail() -> None:
    """The references are not trivially equal: the settings that ought to matter do."""
    plain, clipped = reference("linear", "fedavg"), reference("linear", "fedavg", "clip")
    dropped = reference("linear", "fedavg", "plain", True)
    other = reference("linear", "fedprox")
    for different in (clipped, dropped, other):
        with pytest.raises(AssertionError):
            assert_same(different, plain)


def test_momentum_and_uniform_weights_agree() -> None:
    """Momentum has no fused form: it must fall back, and padding must not carry a velocity on."""
    place = known_world("linear")
    made = method_of(FedAvg, place, momentum=0.8, weighting="uniform")
    with Engine(place.population, LOOP) as engine:
        expected = play(engine, place, made)
    for choice in ({**IN_PROCESS, **LINEAR_ONLY}).values():
        with Engine(place.population, choice) as engine:
            assert_same(play(engine, place, made), expected)


@pytest.mark.parametrize("knobs", [{"upload": "index"}, {"share": "body"}, {"share": "body", "upload": "index"}])
@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_all_ways_of_clustering_agree(name: str, knobs: dict[str, str]) -> None:
    place = known_world(name)
    made = method_of(HypCluster, place, **knobs)
    with Engine(place.population, LOOP) as engine:
        expected = play(engine, place, made)
    for engine_name in ("func, chunk 3", *(("fused, chunk 64",) if place.linear else ())):
        with Engine(place.population, CHOICES[engine_name]) as engine:
            assert_same(play(engine, place, made), expected)


@pytest.mark.parametrize(
    ("method", "knobs"),
    [
        ("scaffold", {"option": "I"}),
        ("per-fedavg", {"variant": "hessian-free"}),
        ("apfl", {"adapt": "round"}),
        ("apfl", {"adapt": "never"}),
        ("self-fl-clustered", {"clusters": "uncertainty"}),
        *((method, {"steps_per_round": 5}) for method in STEPPING),
    ],
)
@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_variants_agree(name: str, method: str, knobs: dict[str, Any]) -> None:
    place = known_world(name)
    made = method_of(METHODS[method], place, **knobs)
    with Engine(place.population, LOOP) as engine:
        expected = play(engine, place, made)
    for engine_name in ("func, chunk 3", *(("fused, chunk 64",) if place.linear else ())):
        with Engine(place.population, CHOICES[engine_name]) as engine:
            assert_same(play(engine, place, made), expected)


def test_fused_falls_back_where_there_is_no_closed_form() -> None:
    place = known_world("mlp")
    with Engine(place.population, Choice(True, 8, 0, 1, "fused", "")) as engine:
        assert_same(play(engine, place, method_of(FedAvg, place)), reference("mlp", "fedavg"))


def test_a_recurrent_network_is_not_vectorized() -> None:
    """torch.func.vmap runs nn.LSTM slowly with gradients and not at all without: chosen never, refused when told."""
    place = known_world("lstm")
    work = ClientWork(method_of(FedAvg, place), place.split.train)
    assert not choose(place.population, work, start(place), 7).vectorized
    with pytest.raises(UserError, match="vectorized"):
        choose(place.population, work, start(place), 7, kind="vectorized")


@pytest.mark.parametrize("name", [name for name in WORLDS if name != "lstm"])
def test_networks_can_be_first_used_inside_vmap(name: str) -> None:
    """A resumed run never ran the loop; nor did a worker, whose network comes out of a pickle."""
    place = world(name)
    task = pickle.loads(pickle.dumps(place.task))
    fresh = replace(place, task=replace(task, network=replace(task.network)))
    with Engine(fresh.population, IN_PROCESS["func, chunk 64"]) as engine:
        assert play(engine, fresh, method_of(FedAvg, fresh), rounds=((0, 1, 2),)).steps == [(6, 10)]


# -- workers -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def looping_workers() -> Iterator[Engine]:
    with Engine(known_world("linear").population, replace(LOOP, workers=2)) as engine:
        yield engine


@pytest.fixture(scope="module")
def fused_workers() -> Iterator[Engine]:
    with Engine(known_world("linear").population, Choice(True, 3, 2, 1, "fused", "")) as engine:
        yield engine


@pytest.fixture(scope="module")
def sequence_workers() -> Iterator[Engine]:
    with Engine(known_world("lstm").population, replace(LOOP, workers=2)) as engine:
        yield engine


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_workers_agree(method: str, looping_workers: Engine, fused_workers: Engine) -> None:
    place = known_world("linear")
    for engine in (looping_workers, fused_workers):
        for transform in transforms_of(method):
            found = play(engine, place, method_of(every_method()[method], place), TRANSFORMS[transform])
            assert_same(found, reference("linear", method, transform))


@pytest.mark.parametrize("method", HEAVY)
def test_workers_agree_on_sequences(method: str, sequence_workers: Engine) -> None:
    place = known_world("lstm")
    found = play(sequence_workers, place, method_of(every_method()[method], place))
    assert_same(found, reference("lstm", method))


def test_worker_makes_the_same_personal_model(looping_workers: Engine, tmp_path: Path) -> None:
    place = known_world("linear")
    made = method_of(SmallDitto, place)
    models = []
    with Engine(place.population, LOOP) as alone:
        for engine in (alone, looping_workers):
            play(engine, place, made)
            server = made.init_server(start(place))
            models.append(engine.personal(server, 4, place.split.test.support, 2, key=9))
    assert_close(models[1], models[0], rtol=1e-5, atol=1e-6)


def test_private_state_moves_between_numbers_of_workers(looping_workers: Engine, tmp_path: Path) -> None:
    """Segments written by one process are read by two, each taking its own clients."""
    place, made = known_world("linear"), method_of(SmallDitto, known_world("linear"))
    with Engine(place.population, LOOP) as alone:
        played = play(alone, place, made)
        files = alone.save_private(tmp_path, "all", only_dirty=False)
    looping_workers.open(ClientWork(made, place.split.train), start(place))
    looping_workers.load_private([tmp_path / name for name in files])
    assert_close(private_state(looping_workers, start(place), place), played.private, rtol=0, atol=0)


def test_examine_where_one_worker_has_no_rows_to_score(fused_workers: Engine) -> None:
    """Only one client is scored, so that the other worker's share of the part is empty."""
    place = known_world("linear")
    made = method_of(SmallDitto, place)
    fused_workers.open(ClientWork(made, place.split.train), start(place))
    server = made.init_server(start(place))
    test = place.split.test
    homes = fused_workers.home(np.arange(len(place.population)))
    # clients 0 and 1 have no validation rows; someone at the other home has
    other = next(c for c in range(2, 7) if homes[c] != homes[1])
    clients = np.array([1, other])
    parts = {"validation": test.validation, "query": test.query}
    found = fused_workers.examine(server, clients, test.support, parts, key=9)
    with Engine(place.population, LOOP) as alone:
        alone.open(ClientWork(made, place.split.train), start(place))
        expected = alone.examine(server, clients, test.support, parts, key=9)
    np.testing.assert_allclose(found["query"]["mse"], expected["query"]["mse"], rtol=1e-4)
    np.testing.assert_allclose(found["validation"]["mse"][1], expected["validation"]["mse"][1], rtol=1e-4)
    assert np.nan_to_num(found["validation"]["count"][0]).max() == 0


# -- what is refused, and who is left out ------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [Talkative, Silent])
def test_undeclared_and_missing_fields_are_errors(kind: type[FedAvg]) -> None:
    place = known_world("linear")
    for choice in (LOOP, IN_PROCESS["func, chunk 64"], LINEAR_ONLY["fused, chunk 64"]):
        with Engine(place.population, choice) as engine, pytest.raises(TypeError, match="declares"):
            play(engine, place, method_of(kind, place))


def test_an_undeclared_field_is_an_error_in_workers_and_they_live_on(looping_workers: Engine) -> None:
    place = known_world("linear")
    with pytest.raises(WorkerFailed, match="declares"):
        play(looping_workers, place, method_of(Talkative, place))
    # the answers of the failed call must not be taken for those of the next
    assert_same(play(looping_workers, place, method_of(FedAvg, place)), reference("linear", "fedavg"))


BAD = 4
CHOICES = {"loop": LOOP, **{n: c for n, c in {**IN_PROCESS, **LINEAR_ONLY}.items() if "2 threads" not in n}}


FINITE_CASES = [(name, engine) for name in ("linear", "logistic", "hinge") for engine in CHOICES]
FINITE_CASES += [("mlp", engine) for engine in CHOICES if engine not in LINEAR_ONLY]


@pytest.mark.parametrize(("name", "engine"), FINITE_CASES)
def test_a_client_that_is_not_finite_is_left_out(name: str, engine: str) -> None:
    """Named as excluded, its private state untouched, and the sums are those of the others."""
    place = known_world(name)
    with Engine(place.population, CHOICES[engine]) as running:
        made = method_of(SmallDitto, place)
        rounds = (tuple(range(7)), (1, 3, BAD, 5))
        running.open(ClientWork(made, place.split.train), start(place))
        without = play(running, place, made, rounds=tuple(tuple(c for c in r if c != BAD) for r in rounds))
    with Engine(spoiled(place.population, BAD), CHOICES[engine]) as running:
        found = play(running, place, made, rounds=rounds)
    assert [excluded for _, excluded in found.cohorts] == [{BAD}, {BAD}]
    assert [used for used, _ in found.cohorts] == [used for used, _ in without.cohorts]
    assert_close(found.server, without.server, rtol=1e-5, atol=1e-6)
    assert_close(found.private, without.private, rtol=1e-5, atol=1e-6)
    untouched = flatten(made.init_private(start(place)))
    for leaf_name, leaf in untouched.items():
        assert torch.equal(found.private[leaf_name][BAD], leaf)


def test_a_run_names_whom_it_left_out(tmp_path: Path) -> None:
    """By id, in the log of every round and in the result; the run goes on without them."""
    place = known_world("linear")
    bad = spoiled(place.population, BAD)
    split = cross_silo(bad, FRACTIONS, seed=3)
    made = method_of(SmallDitto, place)
    experiment = Experiment("spoiled", bad, split, place.task, (Stage(made, 2),), "mse", cohort=7)
    result = Run(experiment, RunFolder.create(tmp_path / "run", ""), how=LOOP).run()
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["excluded"] for line in lines] == [[], ["client 4"], ["client 4"]]
    assert [line["clients"] for line in lines] == [0, 6, 6]
    assert result["excluded"] == {"client 4": 2}


def test_a_cohort_of_which_nobody_is_finite() -> None:
    place = known_world("linear")
    made = method_of(SmallDitto, place)
    with Engine(spoiled(place.population, BAD), LOOP) as engine:
        engine.open(ClientWork(made, place.split.train), start(place))
        result = engine.round(made.init_server(start(place)), np.array([BAD]), key=1)
    assert result.cohort.clients == ()
    assert result.cohort.excluded == (BAD,)


def test_bytes_and_steps_by_hand() -> None:
    """Regression 3 -> 1 has 4 floats. Up: 4 and a weight; down: 4. Rows 1, 1, 3, 4, 8, 11, 5 in batches of 4."""
    found = reference("linear", "fedavg")
    assert found.bytes == [(7 * 20, 7 * 16), (3 * 20, 3 * 16), (4 * 20, 4 * 16)]
    steps = np.array([1, 1, 1, 1, 2, 3, 2])
    rows = np.array([1, 1, 3, 4, 8, 11, 5])
    assert found.steps == [(2 * int(steps[list(c)].sum()), 2 * int(rows[list(c)].sum())) for c in ROUNDS]
    dropped = np.array([1, 1, 1, 1, 2, 2, 1])  # with drop_last a client smaller than a batch keeps its only one
    assert [s for s, _ in reference("linear", "fedavg", "plain", True).steps] == [
        2 * int(dropped[list(c)].sum()) for c in ROUNDS
    ]
    unicast = reference("linear", "offsets")
    assert unicast.bytes[0] == (7 * 20, 7 * (16 + 4 + 12))


# -- what must not matter ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedavg", "hypcluster", "small-ditto", "median", "offsets", "four-types"])
def test_the_order_of_the_cohort_does_not_matter(method: str) -> None:
    place = known_world("linear")
    turned = tuple(tuple(reversed(cohort)) for cohort in ROUNDS)
    for choice in (LOOP, LINEAR_ONLY["fused, chunk 64"]):
        with Engine(place.population, choice) as engine:
            found = play(engine, place, method_of(every_method()[method], place), rounds=turned)
        expected = reference("linear", method)
        assert_same(found, expected)


def _more(place: World) -> Population:
    """The same clients among others, whose ids sort before, between and after theirs."""
    x, y = place.population.columns["x"], place.population.columns["y"]
    extra = np.repeat(["a first", "client 3a", "client 3b", "zuletzt"], [5, 9, 1, 30])
    random = np.random.default_rng(1)
    more_x = torch.from_numpy(random.standard_normal((45, 3)).astype(np.float32))
    more_y = torch.from_numpy(random.standard_normal(45).astype(np.float32))
    names = np.concatenate([extra, owners()])
    return Population.build({"x": torch.cat([more_x, x]), "y": torch.cat([more_y, y])}, names)


def test_adding_clients_changes_nobody() -> None:
    """Neither splits, nor batches, nor updates of those who were there."""
    place = known_world("linear")
    few, many = place.population, _more(place)
    there = [many.index(few.ids[c]) for c in range(len(few))]
    assert there != list(range(len(few)))
    split_few, split_many = place.split, cross_silo(many, (0.5, 0.25, 0.25), seed=3)
    for part in ("train", "validation", "query"):
        for client, position in enumerate(there):
            rows = {}
            for population, split, c in ((few, split_few, client), (many, split_many, position)):
                own = {"train": split.train, "validation": split.test.validation, "query": split.test.query}[part]
                rows[c, id(population)] = population.columns["x"][own.of(np.array([c]))[0]]
            mine, theirs = rows.values()
            assert torch.equal(mine, theirs)
    batching = Batching(BATCH, epochs=2)
    orders_few = Orders.draw(split_few.train, np.arange(7), batching, key=4)
    orders_many = Orders.draw(split_many.train, np.array(there), batching, key=4)
    for epoch in range(2):
        assert torch.equal(few.columns["x"][orders_few.rows[epoch]], many.columns["x"][orders_many.rows[epoch]])
    made = method_of(FedAvg, place)
    server = made.init_server(start(place))
    sums = []
    for population, split, cohort in ((few, split_few, np.arange(7)), (many, split_many, np.array(there))):
        with Engine(population, LOOP) as engine:
            engine.open(ClientWork(made, split.train), start(place))
            sums.append(flatten(engine.round(server, cohort, key=4).cohort.sums))
    assert_close(sums[1], sums[0], rtol=0, atol=0)


# -- personal models ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_candidates_are_as_many_as_models(method: str) -> None:
    place = known_world("linear")
    made = method_of(every_method()[method], place)
    orders = Orders.draw(place.split.test.support, np.array([5]), made.support_batching(), key=1)
    params = start(place)
    server = made.init_server(params, setting(place))
    groups, shared = made.groups(server), made.broadcast(server)
    down = {**(shared if groups is None else take(shared, int(groups[5]))), **made.unicast(server, 5)}
    models = list(made.personalize(down, made.init_private(params), orders.sliced(0)))
    assert len(models) == len(made.candidates())
    assert len(set(made.candidates())) == len(models)
    sums = reference("linear", method).scores["query"]
    assert sums["mse"].shape[1] == len(models)
    assert sums["count"].shape[1] == 1  # the same for all candidates


@pytest.mark.parametrize("part", ["all", "last"])
@pytest.mark.parametrize("engine", ["loop", "func, chunk 64"])
def test_fine_tuning_the_last_layer_moves_nothing_else(part: str, engine: str) -> None:
    place = known_world("mlp")
    made = method_of(FineTune, place, part=part)
    params = start(place)
    with Engine(place.population, CHOICES[engine]) as running:
        running.open(ClientWork(made, place.split.train), params)
        server = made.init_server(params)
        shared = running.personal(server, 5, place.split.test.support, 0, key=1)
        last = running.personal(server, 5, place.split.test.support, len(made.candidates()) - 1, key=1)
    assert_close(shared, params, rtol=0, atol=0)  # epoch 0 is the shared model
    moved = {name for name, leaf in subtract(last, params).items() if leaf.abs().max() > 0}
    head = {"head.weight", "head.bias"}
    assert moved == (head if part == "last" else set(params))


def test_last_layer_in_every_world() -> None:
    for name in WORLDS:
        task = known_world(name).task
        named = [p for p in task.init(0) if p.startswith(task.last_layer)]
        assert sorted(n.split(".")[-1] for n in named) == ["bias", "weight"]


def test_epoch_0_scores_as_the_shared_model() -> None:
    """FineTune's first candidate is scored as FedAvg's only one, from the same parameters."""
    place = known_world("linear")
    with Engine(place.population, LOOP) as engine:
        plain = play(engine, place, method_of(FedAvg, place), rounds=())
    tuned = reference("linear", "finetune")
    for metric, values in plain.scores["query"].items():
        np.testing.assert_array_equal(tuned.scores["query"][metric][:, 0], values[:, 0])


def test_a_round_on_all_rows_needs_no_split() -> None:
    place = known_world("linear")
    with Engine(place.population, LOOP) as engine:
        found = play(engine, place, method_of(FedAvg, place), rounds=((0, 1),), train=everything(place.population))
    assert found.steps == [(2 * 2, 2 * sum(SIZES[:2]))]


def test_every_method_says_what_it_is() -> None:
    place = known_world("linear")
    for name, kind in METHODS.items():
        assert kind.card.name == name
        assert kind.card.paper
        assert kind.__doc__
        assert kind.card.after == "" or kind.card.after in METHODS
        assert {*kind.card.tunes, *kind.card.tunes_exact} <= set(kind.__dataclass_fields__)
        assert kind.trains == bool(kind(place.task).uplink)  # who trains sends something
