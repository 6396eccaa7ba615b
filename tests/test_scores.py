"""The tables that personal models' scores are put in, chunk by chunk."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bespoke.federation.examine import ROWS, ScoreTables, fill


def orders(sizes: list[int]) -> Any:
    """Clients with so many scored rows."""
    each = np.array(sizes)
    return SimpleNamespace(sizes=each, layout=SimpleNamespace(begins=np.cumsum(each) - each))


def test_chunks_are_put_in_the_order_of_the_clients() -> None:
    tables = ScoreTables(4, {"query": orders([2, 1, 3, 0])})
    loss, rows = torch.tensor([[5.0, 6.0]]), torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]])
    tables.put(np.array([2]), {"query": {"loss": loss, "count": torch.full((1, 2), 3.0), ROWS: rows}})
    rows = torch.tensor([[[7.0, 0.0], [8.0, 0.0]], [[1.0, 2.0], [3.0, 4.0]]])  # of client 1 the second is padding
    loss, counts = torch.tensor([[3.0, 4.0], [1.0, 2.0]]), torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    tables.put(np.array([1, 0]), {"query": {"loss": loss, "count": counts, ROWS: rows}})
    found = tables.tables["query"]
    np.testing.assert_array_equal(found["loss"], [[1, 2], [3, 4], [5, 6], [np.nan] * 2])
    np.testing.assert_array_equal(found["count"], [[2], [1], [3], [np.nan]])  # the same for both candidates
    np.testing.assert_array_equal(found[ROWS], [[1, 3], [2, 4], [7, 8], [1, 4], [2, 5], [3, 6]])
    assert {table.dtype for table in found.values()} == {np.dtype(np.float32)}


def test_a_sum_that_differs_in_a_later_chunk_has_a_column_for_each_candidate() -> None:
    tables = ScoreTables(3, {"query": orders([1, 1, 1])})
    tables.put(np.array([0, 1]), {"query": {"f1_count": torch.tensor([[1.0, 1.0], [2.0, 2.0]])}})
    assert tables.tables["query"]["f1_count"].shape == (3, 1)
    tables.put(np.array([2]), {"query": {"f1_count": torch.tensor([[1.0, 2.0]])}})
    np.testing.assert_array_equal(tables.tables["query"]["f1_count"], [[1, 1], [2, 2], [1, 2]])


def test_what_hosts_say_is_joined_whoever_of_them_has_one_column() -> None:
    for narrow_first in (True, False):
        table: dict[str, Any] = {}
        said = [(np.array([0, 2]), np.array([[1.0], [3.0]])), (np.array([1]), np.array([[4.0, 5.0]]))]
        for places, values in said if narrow_first else said[::-1]:
            fill(table, "f1_count", 3, places, values)
        np.testing.assert_array_equal(table["f1_count"], [[1, 1], [4, 5], [3, 3]])
