from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bespoke.data.partition import assign, by_column, client_names, dirichlet, power_law, shards
from bespoke.errors import UserError

labels_of = st.lists(st.integers(0, 4), min_size=20, max_size=200).map(np.array)
clients_of = st.integers(1, 10)


@settings(max_examples=60, deadline=None)
@given(labels_of, clients_of, st.floats(0.01, 100), st.integers(0, 2), st.integers(0, 9))
def test_dirichlet_gives_every_row_to_one_client_and_every_client_its_minimum(
    labels: Any, clients: Any, alpha: Any, minimum: Any, seed: Any
) -> None:
    owner = dirichlet(labels, clients, alpha, seed, minimum)
    sizes = np.bincount(owner, minlength=clients)
    assert owner.shape == labels.shape
    assert len(sizes) == clients
    assert sizes.min() >= minimum
    assert (owner == dirichlet(labels, clients, alpha, seed, minimum)).all()


def test_dirichlet_tops_up_from_the_largest_client_alone() -> None:
    """With one class and a tiny alpha one client has all 40 rows: the others take their three from it, it keeps 31."""
    before = dirichlet(np.zeros(40), 4, 1e-4, seed=5, minimum=0)
    rich = int(np.bincount(before, minlength=4).argmax())
    assert np.bincount(before, minlength=4)[rich] == 40
    after = dirichlet(np.zeros(40), 4, 1e-4, seed=5, minimum=3)
    assert sorted(np.bincount(after, minlength=4).tolist()) == [3, 3, 3, 31]
    assert (after[after != rich] != before[after != rich]).all()  # who moved came from the rich one


def test_dirichlet_takes_no_more_than_is_missing_and_never_from_the_short() -> None:
    """Rows move only to clients below the minimum, only up to it, and only from those that were the largest."""
    labels = np.repeat(np.arange(3), 40)
    for seed in range(20):
        before, after = (dirichlet(labels, 8, 0.2, seed, minimum) for minimum in (0, 6))
        old, new = (np.bincount(owner, minlength=8) for owner in (before, after))
        assert (new[old < 6] == 6).all()
        assert set(before[before != after]) <= set(np.flatnonzero(old > 6).tolist())
        # the largest gives, one row at a time: nobody who gave ends more than a row below anybody else who could have
        gave = new < old
        assert not gave.any() or new[gave].min() >= new[~gave & (old >= 6)].max(initial=0) - 1


def test_dirichlet_alpha_goes_from_alike_to_apart() -> None:
    labels = np.repeat(np.arange(4), 1000)

    def largest_share(alpha: float) -> float:
        owner = dirichlet(labels, 10, alpha, seed=1)
        table = np.array([[((owner == c) & (labels == k)).sum() for k in range(4)] for c in range(10)])
        return float((table.max(1) / table.sum(1)).mean())

    assert largest_share(1000.0) < 0.3  # four classes, nearly a quarter each
    assert largest_share(0.05) > 0.7


def test_dirichlet_depends_on_the_seed() -> None:
    labels = np.repeat(np.arange(4), 50)
    assert (dirichlet(labels, 5, 1.0, seed=0) != dirichlet(labels, 5, 1.0, seed=1)).any()


@settings(max_examples=60, deadline=None)
@given(labels_of, clients_of, st.integers(1, 2), st.integers(0, 9))
def test_shards_are_equal_and_cover_all_rows(labels: Any, clients: Any, per_client: Any, seed: Any) -> None:
    owner = shards(labels, clients, per_client, seed)
    sizes = np.bincount(owner, minlength=clients)
    assert sizes.sum() == len(labels)
    assert sizes.max() - sizes.min() <= per_client  # a shard is larger than another by one row at most


def test_shards_of_mcmahan() -> None:
    labels = np.tile(np.arange(10), 60)  # 600 rows, 20 shards of 30: each shard holds one class
    owner = shards(labels, clients=10, shards_per_client=2, seed=3)
    assert (np.bincount(owner) == 60).all()
    assert all(len(np.unique(labels[owner == c])) <= 2 for c in range(10))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 3), st.integers(0, 9), st.integers(1, 8))
def test_power_law_gives_each_client_its_classes(clients: Any, per_client: Any, seed: Any, minimum: Any) -> None:
    """FedProx's five rows of each, or more where more are asked for."""
    labels = np.tile(np.arange(5), 100)
    owner = assign(labels, "power_law", clients, 1.0, per_client, minimum, seed)
    for client in range(clients):
        held = labels[owner == client]
        assert set(held) == {(client + j) % 5 for j in range(per_client)}
        assert (np.bincount(held, minlength=5)[list(set(held))] >= max(minimum, 5)).all()
    used_classes = {(c + j) % 5 for c in range(clients) for j in range(per_client)}
    unused = (owner == -1) & np.isin(labels, list(used_classes))
    assert unused.sum() <= clients * per_client  # less than one row per rounding


def test_power_law_sizes_are_uneven() -> None:
    labels = np.repeat(np.arange(10), 700)
    owner = power_law(labels, 100, 2, seed=0)
    sizes = np.bincount(owner[owner >= 0])
    assert sizes.min() >= 10
    assert sizes.max() > 10 * np.median(sizes)


def test_by_column_and_names() -> None:
    assert by_column([3, 1, 3]).tolist() == ["3", "1", "3"]
    assert client_names(np.array([0, 10, 2])).tolist() == ["00", "10", "02"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda y: dirichlet(y, 30, 0.5, 0), "30 clients of at least 1 rows need more than the 20 rows"),
        (lambda y: dirichlet(y, 0, 0.5, 0), "clients is 0"),
        (lambda y: dirichlet(y, 2, -1.0, 0), "alpha is -1"),
        (lambda y: shards(y, 11, 2, 0), "22 shards need at least as many rows"),
        (lambda y: power_law(y, 2, 3, 0), "only 2 classes"),
        (lambda y: power_law(y, 10, 2, 0), "a class of 10 rows cannot give 5 rows to each of the 10 clients"),
        (lambda y: dirichlet(y[:0], 2, 0.5, 0), "no rows"),
    ],
)
def test_errors_say_what_is_wrong(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(np.repeat([0, 1], 10))
