"""Gradients and descents in their several forms, padding and clipping: properties on generated shapes and sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bespoke.data.population import Population
from bespoke.data.splits import everything
from bespoke.federation.batches import Orders, SlicedBatches, StackedBatches, buckets, steps_of
from bespoke.messages.clip import Clip
from bespoke.messages.transform import Outgoing
from bespoke.method import Batching
from bespoke.methods.parts.client_optimizer import ClientOptimizer
from bespoke.methods.parts.descend import descend
from bespoke.models.language import LanguageModel
from bespoke.models.networks import LSTM, MLP, Linear
from bespoke.models.task import BaseTask, Classification, Regression
from bespoke.models.transformer import Transformer
from bespoke.tensors import Params, Tree, add, norm, subtract, take, tree_map
from small_worlds import owners

KINDS = ("squares", "softmax", "softmax of bytes", "hinge")


def task_of(kind: str, inputs: int, l2: float) -> BaseTask:
    if kind == "squares":
        return Regression(Linear(inputs, 1, random_init=True), l2=l2)
    if kind == "hinge":
        return Classification(Linear(inputs, 1, random_init=True), l2=l2, hinge=True)
    return Classification(Linear(inputs, 3, random_init=True), l2=l2)


def rows_of(kind: str, rows: int, inputs: int, seed: int) -> Params:
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, inputs)).astype(np.float32)
    if kind == "softmax of bytes":
        x = random.integers(0, 256, (rows, inputs)).astype(np.uint8)
    y = random.standard_normal(rows).astype(np.float32)
    if kind != "squares":
        y = random.integers(0, 2 if kind == "hinge" else 3, rows)  # type: ignore[assignment]
    return {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}


def close(found: Params, expected: Params, tolerance: float = 1e-5) -> None:
    for name, leaf in expected.items():
        torch.testing.assert_close(found[name], leaf, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


shapes = st.fixed_dictionaries(
    {"rows": st.integers(1, 12), "inputs": st.integers(1, 6), "seed": st.integers(0, 2**16)},
)
decays = st.sampled_from([0.0, 0.01, 0.5])


@given(kind=st.sampled_from(KINDS), shape=shapes, l2=decays, data=st.data())
@settings(max_examples=80)
def test_gradients_agree(kind: str, shape: dict[str, int], l2: float, data: st.DataObject) -> None:
    """Closed form = torch.func = autograd, with a mask and an l2 term."""
    task = task_of(kind, shape["inputs"], l2)
    mask = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=shape["rows"], max_size=shape["rows"]))
    batch = {**rows_of(kind, **shape), "mask": torch.tensor(mask)}
    params = task.init(shape["seed"])
    expected = task.differentiated("autograd").gradient(params, batch)
    close(task.differentiated("closed-form").gradient(params, batch), expected)
    close(task.differentiated("func").gradient(params, batch), expected)


def test_gradient_by_hand() -> None:
    """Half squares of errors 1 and 3 on x = 1, 2: slopes mean(error x) = (1 + 6) / 2 and 2; plus l2 times w."""
    task = Regression(Linear(1), l2=0.1)
    params = {"weight": torch.tensor([[2.0]]), "bias": torch.tensor([1.0])}
    batch = {"x": torch.tensor([[1.0], [2.0]]), "y": torch.tensor([2.0, 2.0]), "mask": torch.ones(2)}
    for how in ("autograd", "func", "closed-form"):
        found = task.differentiated(how).gradient(params, batch)
        assert found["weight"].item() == pytest.approx(3.5 + 0.2)
        assert found["bias"].item() == pytest.approx(2 + 0.1)


MODULES: dict[str, BaseTask] = {
    "mlp": Classification(MLP(3, 3, (4,)), l2=0.1),
    "lstm": LanguageModel(LSTM(7, 3, 4, 1), l2=0.1),
    "transformer": LanguageModel(Transformer(7, 4, 4, 5, 2), l2=0.1),
}


@pytest.mark.parametrize("kind", [*KINDS, *MODULES])
@given(rows=st.integers(1, 5), padding=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_padding_rows_change_nothing(kind: str, rows: int, padding: int, seed: int) -> None:
    """Neither loss, nor gradient, nor score: whatever stands in the rows that the mask leaves out."""
    task = MODULES.get(kind) or task_of(kind, 3, 0.1)
    full = rows_of("softmax" if kind == "mlp" else kind, rows + padding, 3, seed)
    if kind in ("lstm", "transformer"):
        tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, 7, (rows + padding, 5)))
        full = {"x": tokens[:, :4], "y": tokens[:, 1:]}
    short = {name: column[:rows] for name, column in full.items()}
    params = task.init(seed)
    batch, padded = {**short, "mask": torch.ones(rows)}, {**full, "mask": (torch.arange(rows + padding) < rows).float()}
    torch.testing.assert_close(task.loss(params, padded), task.loss(params, batch))
    close(task.gradient(params, padded), task.gradient(params, batch))
    scores = [task.score(task.predict(params, b), b) for b in (padded, batch)]
    close(scores[0], scores[1], 1e-4)


def test_l2_is_added_by_every_task() -> None:
    for task in (*MODULES.values(), task_of("squares", 3, 0.1)):
        plain = type(task)(task.network)
        params = task.init(1)
        x = torch.zeros(2, 3, dtype=torch.int64 if isinstance(task, LanguageModel) else torch.float32)
        y = torch.ones(2, 3, dtype=torch.int64) if isinstance(task, LanguageModel) else torch.zeros(2)
        batch = {"x": x, "y": y, "mask": torch.ones(2)}
        expected = 0.05 * sum(float((p * p).sum()) for p in params.values())
        assert float(task.loss(params, batch) - plain.loss(params, batch)) == pytest.approx(expected, rel=1e-3)


# -- whole descents ----------------------------------------------------------------------------------------------------
batchings = st.builds(
    Batching, size=st.integers(1, 7), epochs=st.integers(1, 3), reshuffle=st.booleans(), drop_last=st.booleans()
)
sizes = st.lists(st.integers(1, 12), min_size=1, max_size=5).map(tuple)


def population_for(kind: str, sizes: tuple[int, ...], inputs: int, seed: int) -> Population:
    columns = rows_of(kind, sum(sizes), inputs, seed)
    return Population.build(dict(columns), owners(sizes))


def one_by_one(task: BaseTask, orders: Orders, start: Params, **terms: object) -> list[Params]:
    return [
        descend(task, start, orders.sliced(i), **terms)  # type: ignore[arg-type]
        for i in range(len(orders.sizes))
    ]


def at_once(task: BaseTask, orders: Orders, start: Params, **terms: object) -> Params:
    """All clients in one vmap, padded to the longest."""
    stacked = orders.stacked(np.arange(len(orders.sizes)))
    run = torch.func.vmap(lambda mine: descend(task, start, stacked.of_client(mine), **terms))  # type: ignore[arg-type]
    return run(stacked.mapped())


def share_of(stacked: StackedBatches, client: int) -> StackedBatches:
    """What vmap shows to this client."""
    begin, used, examples, key = (leaf[client] for leaf in stacked.mapped())
    return stacked.of_client((begin, used, examples, key))


@given(
    kind=st.sampled_from(KINDS), sizes=sizes, inputs=st.integers(1, 5), seed=st.integers(0, 2**16),
    batching=batchings, l2=decays, decay=decays, pull=st.sampled_from([None, 0.3]),
    drifts=st.booleans(), name=st.sampled_from(["sgd", "sgd", "momentum", "nesterov", "adam", "adamw"]),
)  # fmt: skip
@settings(max_examples=100)
def test_descents_agree(
    kind: str, sizes: tuple[int, ...], inputs: int, seed: int, batching: Batching, l2: float, decay: float,
    pull: float | None, drifts: bool, name: Any,
) -> None:  # fmt: skip
    """A loop of autograd steps = vectorized closed form = compiled descent: masks, decay, pull, drift, steps."""
    population = population_for(kind, sizes, inputs, seed)
    orders = Orders.draw(everything(population), np.arange(len(sizes)), batching, key=seed)
    task = task_of(kind, inputs, l2)
    start = task.init(seed)
    anchor = None if pull is None else task.init(seed + 1)
    drift = task.init(seed + 2) if drifts else None
    rough = {"eps": 0.1} if name.startswith("adam") else {}  # steps that are not made of rounding
    optimizer = ClientOptimizer(name, weight_decay=decay, **rough)
    terms = {
        "lr": 0.05, "optimizer": optimizer, "anchor": anchor, "pull": pull or 0.0, "drift": drift,
    }  # fmt: skip
    expected = one_by_one(task.differentiated("autograd"), orders, start, **terms)
    for how in ("closed-form", "fused"):
        found = at_once(task.differentiated(how), orders, start, **terms)
        for place, model in enumerate(expected):
            close({name: leaf[place] for name, leaf in found.items()}, model, 2e-5)


def test_drift_by_hand() -> None:
    """One row x = 1, y = 1 from zero: slopes -1 and -1; with drifts 0.5 and -2 and lr 0.1: 0.1 * 0.5 and 0.1 * 3."""
    columns = {"x": torch.ones(1, 1), "y": torch.ones(1)}
    orders = Orders.draw(everything(Population.build(columns, np.array(["a"]))), np.array([0]), Batching(), key=1)
    task = Regression(Linear(1))
    drift = {"weight": torch.tensor([[0.5]]), "bias": torch.tensor([-2.0])}
    for how, batches in (("autograd", orders.sliced(0)), ("fused", share_of(orders.stacked(np.array([0])), 0))):
        found = descend(task.differentiated(how), task.init(0), batches, lr=0.1, drift=drift)
        assert found["weight"].item() == pytest.approx(0.05)
        assert found["bias"].item() == pytest.approx(0.3)


def test_fused_without_vmap() -> None:
    """One client outside vmap takes the same kernel."""
    population = population_for("squares", (5, 3), 2, 1)
    orders = Orders.draw(everything(population), np.array([0, 1]), Batching(2, 2), key=1)
    task = task_of("squares", 2, 0.1)
    single = share_of(orders.stacked(np.array([0, 1])), 1)
    found = descend(task.differentiated("fused"), task.init(1), single, lr=0.1)
    close(found, descend(task, task.init(1), orders.sliced(1), lr=0.1))


@given(sizes=sizes, batching=batchings, key=st.integers(0, 999))
@settings(max_examples=60)
def test_both_forms_of_batches_hold_the_same_rows(sizes: tuple[int, ...], batching: Batching, key: int) -> None:
    """Step by step, padding aside; and an epoch without drop_last uses every row exactly once."""
    total = sum(sizes)
    population = Population.build({"x": torch.arange(total), "y": torch.arange(total)}, owners(sizes))
    clients = np.arange(len(sizes))
    orders = Orders.draw(everything(population), clients, batching, key)
    stacked = orders.stacked(clients)
    assert (orders.steps == steps_of(np.array(sizes), batching)).all()
    for client in clients:
        sliced: SlicedBatches = orders.sliced(client)
        mine = share_of(stacked, int(client))
        exact = [sliced[step]["x"].tolist() for step in range(len(sliced))]
        padded = []
        for step in range(len(mine)):
            batch = mine[step]
            kept = batch["x"][batch["mask"] > 0].tolist()
            assert bool(kept) == bool(mine.live(step))
            padded += [kept] if kept else []
        assert padded == exact
        own = set(range(int(population.offsets[client]), int(population.offsets[client + 1])))
        for epoch in sliced.epochs():
            rows = [row for step in range(len(epoch)) for row in epoch[step]["x"].tolist()]
            assert len(rows) == len(set(rows))
            assert set(rows) <= own
            assert set(rows) == own or batching.drop_last
        if sizes[client] < batching.size:  # dropping its only batch would silence the client
            assert len(exact[0]) == sizes[client]
        assert float(sliced.examples) == float(mine.examples) == sizes[client]


def test_reshuffle_changes_the_order_of_epochs_and_only_that() -> None:
    population = Population.build({"x": torch.arange(40), "y": torch.arange(40)}, owners((40,)))
    for reshuffle in (True, False):
        orders = Orders.draw(everything(population), np.array([0]), Batching(40, 2, reshuffle=reshuffle), key=1)
        first, second = (e.rows()["x"].tolist() for e in orders.sliced(0).epochs())
        assert (first != second) == reshuffle
        assert sorted(first) == sorted(second) == list(range(40))


def test_stretches_of_epochs_are_the_epochs_in_order() -> None:
    population = Population.build({"x": torch.arange(10), "y": torch.arange(10)}, owners((10,)))
    for reshuffle in (True, False):
        orders = Orders.draw(everything(population), np.array([0]), Batching(4, 6, reshuffle=reshuffle), key=1)
        for batches in (orders.sliced(0), share_of(orders.stacked(np.array([0])), 0)):
            whole = [batches[step]["x"].tolist() for step in range(18)]
            stretches = list(batches.epochs(3))
            assert [len(stretch) for stretch in stretches] == [9, 9]
            assert [stretch[step]["x"].tolist() for stretch in stretches for step in range(9)] == whole  # type: ignore[index]


@given(
    steps=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    chunk=st.integers(1, 10),
    cost=st.sampled_from([0.0, 12.0, 1e9]),
)
def test_buckets_hold_everyone_once(steps: list[int], chunk: int, cost: float) -> None:
    found = buckets(np.array(steps), chunk, cost)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(steps)))
    assert max(len(bucket) for bucket in found) <= chunk


def test_buckets_put_like_with_like() -> None:
    """Three clients of 1 step and three of 100: together they would cost 600 steps, apart 303."""
    found = buckets(np.array([1, 100, 1, 100, 1, 100]), 10, 12.0)
    assert [sorted(bucket.tolist()) for bucket in found] == [[1, 3, 5], [0, 2, 4]]
    assert len(buckets(np.array([1, 100, 1, 100, 1, 100]), 10, 1e9)) == 1  # where launching is all, one bucket


# -- clipping ----------------------------------------------------------------------------------------------------------
numbers = st.floats(-1e6, 1e6, width=32)
vectors = st.lists(numbers, min_size=1, max_size=8)


@given(first=vectors, second=vectors, bound=st.floats(1e-3, 1e3))
def test_clip_bounds_the_norm(first: list[float], second: list[float], bound: float) -> None:
    """Of all named fields together; direction and other fields stay."""
    up: Tree = {"delta": {"w": torch.tensor(first), "b": torch.tensor(second)}, "weight": torch.tensor(3.0)}
    clipped = clip(Clip(bound), up)
    assert float(norm(clipped["delta"])) <= bound * (1 + 1e-5)
    assert float(clipped["weight"]) == 3.0
    before = float(norm(up["delta"]))
    if before <= bound * (1 - 1e-5):  # short vectors are left alone, to the bit
        assert all(torch.equal(clipped["delta"][n], up["delta"][n]) for n in ("w", "b"))
    elif before > bound:
        factor = bound / before
        torch.testing.assert_close(clipped["delta"]["w"], up["delta"]["w"] * factor, rtol=1e-4, atol=1e-6)


def clip(transform: Clip, up: Tree) -> Tree:
    """What a client sends after it, alone."""
    alone = Outgoing(tree_map(lambda leaf: leaf[None], up), 0, np.zeros(1, dtype=np.uint64), 0)
    return take(transform.client(alone).up, 0)


def test_clip_by_hand() -> None:
    up = {"delta": {"w": torch.tensor([3.0, 4.0])}, "other": torch.tensor([12.0]), "weight": torch.tensor(1.0)}
    assert clip(Clip(1.0), up)["delta"]["w"].tolist() == pytest.approx([0.6, 0.8])
    both = clip(Clip(6.5, fields=("delta", "other")), up)  # together their norm is 13
    assert both["delta"]["w"].tolist() == pytest.approx([1.5, 2.0])
    assert both["other"].item() == pytest.approx(6.0)


def test_only_restricts_what_moves() -> None:
    population = population_for("softmax", (6,), 3, 2)
    orders = Orders.draw(everything(population), np.array([0]), Batching(2), key=1)
    task = Classification(MLP(3, 3, (4,)))
    start = task.init(1)
    batches = orders.sliced(0)
    moved = subtract(
        descend(task, start, batches, lr=0.1, only=("head.",), optimizer=ClientOptimizer("momentum")), start
    )
    assert {name for name, leaf in moved.items() if leaf.abs().max() > 0} == {"head.weight", "head.bias"}
    everything_moved = subtract(descend(task, start, batches, lr=0.1), start)
    assert add(everything_moved, moved).keys() == start.keys()
    assert all(leaf.abs().max() > 0 for leaf in everything_moved.values())
