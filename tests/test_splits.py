"""Splits: disjoint, exhaustive, keyed by client id, never mixed up."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import train_test_split

from bespoke.data import splits
from bespoke.data.population import Population
from bespoke.data.splits import Part, Split, cross_device, cross_silo, everything

sizes = st.lists(st.integers(1, 25), min_size=1, max_size=8)
seeds = st.integers(0, 2**32)
thirds = st.tuples(*[st.floats(0.05, 1.0)] * 3).map(lambda parts: tuple(p / sum(parts) for p in parts))
orders = st.sampled_from(["random", "time", "stored"])


def population(sizes: list[int], prefix: str = "c") -> Population:
    names = [f"{prefix}{i:03d}" for i in range(len(sizes))]
    total = sum(sizes)
    time = np.random.default_rng(total).permutation(total)
    return Population.build(
        {"x": np.arange(total), "y": np.zeros(total), "time": time}, np.repeat(names, sizes)
    )  # fmt: skip


def silo_parts(split: Split) -> list[Any]:
    return [split.train, split.test.validation, split.test.query]


def rows_of(part: Any, client: int) -> list[int]:
    return part.part.rows(part.population, np.array([client]))[0].tolist()


@given(sizes=sizes, seed=seeds, fractions=thirds, order=orders)
@settings(max_examples=100)
def test_cross_silo_is_disjoint_and_exhaustive(sizes: list[int], seed: int, fractions: Any, order: Any) -> None:
    """Each client's rows lie in exactly one part; a small client gets a row to train on, then one to be tested on."""
    found = population(sizes)
    split = cross_silo(found, fractions, seed, order)
    for client, size in enumerate(sizes):
        parts = [rows_of(part, client) for part in silo_parts(split)]
        own = range(int(found.offsets[client]), int(found.offsets[client + 1]))
        assert sorted(chain(*parts)) == list(own)
        train, validation, query = (len(part) for part in parts)
        assert train >= 1
        assert query >= 1 or size < 2
        assert validation >= 1 or size < 3
        for part, count, fraction in zip(silo_parts(split), (train, validation, query), fractions):
            assert part.sizes(np.array([client])).tolist() == [count]
            assert abs(count - fraction * size) < 2.01  # rounding, and a row given to a part that had none


@given(sizes=sizes, seed=seeds, order=orders)
def test_rows_come_the_same_one_by_one_and_together(sizes: list[int], seed: int, order: Any) -> None:
    """With the split remembered for all clients, or (beyond REMEMBERED rows) computed for each cohort anew."""
    found = population(sizes)
    everyone = np.arange(len(sizes))
    for part in silo_parts(cross_silo(found, (0.5, 0.25, 0.25), seed, order)):
        together, counts = part.of(everyone)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(splits, "REMEMBERED", 0)
            anew, again = part.of(everyone)
        assert np.array_equal(together, anew)
        assert np.array_equal(counts, again)
        backwards, turned = part.of(everyone[::-1])
        assert turned.tolist() == counts.tolist()[::-1]
        separate = [part.of(np.array([client]))[0].tolist() for client in everyone]
        assert together.tolist() == list(chain(*separate))
        assert backwards.tolist() == list(chain(*separate[::-1]))


def test_one_row_clients_train_and_are_not_tested() -> None:
    split = cross_silo(population([1, 2, 3, 10]), (0.6, 0.2, 0.2))
    assert split.train.clients.tolist() == [0, 1, 2, 3]
    assert split.train.sizes().tolist() == [1, 1, 1, 6]
    assert split.test.query.clients.tolist() == [1, 2, 3]
    assert split.test.query.sizes().tolist() == [1, 1, 2]
    assert split.selection.validation.clients.tolist() == [2, 3]
    assert rows_of(split.test.support, 3) == rows_of(split.train, 3)  # it adapts on what it trained on


def test_order_of_time_trains_on_the_past() -> None:
    found = population([20, 11])
    split = cross_silo(found, (0.6, 0.2, 0.2), order="time")
    stamps = found.columns["time"].numpy()
    for client in (0, 1):
        past, present, future = (stamps[rows_of(part, client)] for part in silo_parts(split))
        assert past.max() < present.min()
        assert present.max() < future.min()
        assert (np.diff(past) > 0).all()


def test_stored_order_by_hand() -> None:
    split = cross_silo(population([10]), (0.6, 0.2, 0.2), order="stored")
    assert [rows_of(part, 0) for part in silo_parts(split)] == [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9]]


def test_seeds_give_other_splits() -> None:
    found = population([30])
    drawn = {tuple(sorted(rows_of(cross_silo(found, seed=seed).train, 0))) for seed in range(5)}
    assert len(drawn) == 5


@given(sizes=sizes, extra=st.integers(1, 5), seed=seeds)
def test_adding_clients_moves_nobody(sizes: list[int], extra: int, seed: int) -> None:
    """Splits of rows and of clients are keyed by id: newcomers that sort before everyone change nothing."""
    few = population(sizes)
    newcomers = population([7] * extra, prefix="a")
    columns: dict[str, Any] = {n: torch.cat([newcomers.columns[n], few.columns[n]]) for n in few.columns}
    names = [name for p in (newcomers, few) for c, name in enumerate(p.ids) for _ in range(int(p.sizes()[c]))]
    many = Population.build(columns, names)
    shift = 7 * extra
    for before, after in zip(*(silo_parts(cross_silo(p, seed=seed)) for p in (few, many))):
        for client in range(len(sizes)):
            assert [row + shift for row in rows_of(before, client)] == rows_of(after, client + extra)
    devices = [cross_device(p, seed=seed) for p in (few, many)]
    for part in ("train", "query"):
        mine, theirs = (d.train.clients if part == "train" else d.test.query.clients for d in devices)
        assert [few.ids[c] for c in mine] == [many.ids[c] for c in theirs if not many.ids[c].startswith("a")]


@pytest.mark.parametrize("fractions", [(0.6, 0.2, 0.2), (0.7, 0.15, 0.15), (0.75, 0.07, 0.18)])
def test_motley_order_is_sklearn_twice(fractions: tuple[float, float, float]) -> None:
    """train_test_split for the test rows, then for the validation rows of what is left, both with one random_state."""
    _, validation, test = fractions
    for size in [*range(5, 60), 100, 139, 251]:
        rest, tested = train_test_split(np.arange(size), test_size=test, random_state=4)
        trained, chosen = train_test_split(rest, test_size=validation / (1 - test), random_state=4)
        split = cross_silo(population([size]), fractions, seed=4, order="motley")
        assert [rows_of(part, 0) for part in silo_parts(split)] == [trained.tolist(), chosen.tolist(), tested.tolist()]


def test_motley_order_of_nobody() -> None:
    """A worker may get an empty share of the cohort."""
    part = Part(0, (0.6, 0.2, 0.2), "motley")
    rows, counts = part.rows(population([5]), np.array([], dtype=np.int64))
    assert len(rows) == len(counts) == 0


# -- cross-device ------------------------------------------------------------------------------------------------------
@given(sizes=sizes, seed=seeds, adapt=st.floats(0.1, 0.9), own=st.sampled_from([0.0, 0.05, 0.2]), order=orders)
@settings(max_examples=100)
def test_cross_device_clients_are_apart(sizes: list[int], seed: int, adapt: float, own: float, order: Any) -> None:
    """Nobody who is tested trains; a tested client adapts on some rows and is scored on others."""
    own = own if own < adapt else 0.0
    found = population(sizes)
    split = cross_device(found, (0.3, 0.3), adapt, seed, order, own)
    training, choosing, testing = (
        set(clients.tolist())
        for clients in (split.train.clients, split.selection.validation.clients, split.test.query.clients)
    )
    assert not training & choosing
    assert not training & testing
    assert not choosing & testing
    left_out = set(range(len(sizes))) - training - choosing - testing
    assert all(sizes[client] == 1 for client in left_out)  # held out, and too small to be scored
    for client in choosing:
        support, scored = rows_of(split.selection.support, client), rows_of(split.selection.validation, client)
        assert sorted(support + scored) == list(range(int(found.offsets[client]), int(found.offsets[client + 1])))
        assert support
        assert scored
    for client in testing:
        parts = [rows_of(p, client) for p in (split.test.support, split.test.validation, split.test.query)]
        assert sorted(chain(*parts)) == list(range(int(found.offsets[client]), int(found.offsets[client + 1])))
        assert parts[0]  # without support rows there is no personal model
        assert parts[2]
        assert bool(parts[1]) == (own > 0) or sizes[client] < 3


def test_own_validation_comes_out_of_what_a_client_adapts_on() -> None:
    """Of ten rows five are for adapting, and two of these five for the client's own choices: none of the query's."""
    found = population([10, 10])
    roles = np.array([0, 2])
    plain = cross_device(found, adapt=0.5, order="stored", role=roles).test
    assert [rows_of(part, 1) for part in (plain.support, plain.validation, plain.query)] == [
        [10, 11, 12, 13, 14], [], [15, 16, 17, 18, 19],
    ]  # fmt: skip
    own = cross_device(found, adapt=0.5, order="stored", own_validation=0.2, role=roles).test
    assert [rows_of(part, 1) for part in (own.support, own.validation, own.query)] == [
        [10, 11, 12], [13, 14], [15, 16, 17, 18, 19],
    ]  # fmt: skip


def test_roles_as_published() -> None:
    split = cross_device(population([4, 4, 4, 1]), role=np.array([0, 1, 2, 2]))
    assert split.train.clients.tolist() == [0]
    assert split.selection.validation.clients.tolist() == [1]
    assert split.test.query.clients.tolist() == [2]
    assert split.train.sizes().tolist() == [4]


def test_fractions_of_clients_hold_out() -> None:
    found = population([2] * 2000)
    split = cross_device(found, (0.1, 0.25), seed=1)
    assert len(split.test.query.clients) == pytest.approx(500, abs=80)  # four standard deviations
    assert len(split.selection.validation.clients) == pytest.approx(200, abs=55)


def test_everything_is_everything() -> None:
    found = population([3, 1])
    rows, counts = everything(found).of(np.array([1, 0]))
    assert rows.tolist() == [3, 0, 1, 2]
    assert counts.tolist() == [1, 3]
