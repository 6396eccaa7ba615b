"""Samples of rows: nested, deterministic, and never one's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bespoke.data.population import Population
from bespoke.data.samples import Fewer, Others
from bespoke.data.splits import Query, Support
from bespoke.federation.batches import WHOLE, Orders
from small_worlds import SIZES, world


def rows_by_client(rows: Support | Query, clients: np.ndarray) -> list[set[int]]:
    found, sizes = rows.of(clients)
    assert sizes.tolist() == rows.sizes(clients).tolist()
    return [set(part.tolist()) for part in np.split(found, np.cumsum(sizes)[:-1])]


def test_fewer_rows_are_nested_and_the_same_every_time() -> None:
    support = world("linear").split.test.support
    clients = support.clients
    whole = rows_by_client(support, clients)
    before = whole
    for fraction in (1.0, 0.75, 0.5, 0.25, 0.01):
        part = Fewer.sample(support, fraction, seed=3)
        now = rows_by_client(part, clients)
        assert [len(n) for n in now] == [max(int(np.ceil(fraction * len(w))), 1) for w in whole]
        assert all(n <= b for n, b in zip(now, before))
        assert now == rows_by_client(Fewer.sample(support, fraction, seed=3), clients)
        assert now[1:3] == rows_by_client(part, clients[1:3])  # whoever else is asked
        before = now
    other = rows_by_client(Fewer.sample(support, 0.5, seed=4), clients)
    assert other != rows_by_client(Fewer.sample(support, 0.5, seed=3), clients)


def test_all_of_the_rows_are_the_rows_themselves() -> None:
    support = world("linear").split.test.support
    for ours, theirs in zip(Fewer.sample(support, 1.0, 0).of(support.clients), support.of(support.clients)):
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("by_group", [False, True])
def test_others_are_others(by_group: bool) -> None:
    small = world("linear")
    groups = np.array([0, 0, 0, 1, 1, 2, 2])
    population = replace(small.population, group=groups, groups=["a", "b", "c"])
    query = replace(small.split.test.query, population=population)
    assert isinstance(query, Query)
    drawn = Others.sample(query, 8, seed=1, by_group=by_group)
    assert isinstance(drawn, Query)  # so that nothing can be chosen on them
    assert len(drawn.rows) == 8
    everyone = rows_by_client(query, query.clients)
    assert set(drawn.rows.tolist()) <= set.union(*everyone)
    kin = groups if by_group else np.arange(len(SIZES))
    for client, rows in zip(query.clients, rows_by_client(drawn, query.clients)):
        allowed = set.union(set(), *(r for c, r in zip(query.clients, everyone) if kin[c] != kin[client]))
        assert rows == set(drawn.rows.tolist()) & allowed
    assert Others.sample(query, 8, seed=1).rows.tolist() == drawn.rows.tolist()
    assert len(Others.sample(query, 10_000, seed=1).rows) == sum(map(len, everyone))


def test_others_of_a_population_on_disk(tmp_path: Path) -> None:
    """A population on disk reads the rows of those it is asked for; others' rows are found all the same."""
    small = world("linear")
    small.population.save(tmp_path)
    mapped = Population.open(tmp_path)
    assert mapped.reader is not None
    query = small.split.test.query
    clients = query.clients[1:4]
    batches = []
    for population in (small.population, mapped):
        drawn = Others.sample(replace(query, population=population), 9, seed=2)
        batches.append(Orders.draw(drawn, clients, WHOLE, None).sliced(1).rows())
    assert all((batches[0][name] == batches[1][name]).all() for name in batches[0])
