"""Keyed randomness: stable for ever, uniform, and made of permutations."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bespoke import randomness
from bespoke.data.population import Population
from bespoke.data.splits import everything
from bespoke.federation.batches import Orders
from bespoke.method import Batching
from bespoke.randomness import client_keys, generator, mix, permuted, shuffles, text_key, torch_seed, uniform


def test_frozen_values() -> None:
    """Should these ever change, no old run could be resumed or repeated."""
    assert text_key("client 1") == 11589218547463989625
    assert int(mix("round", 1, 2, 3)) == 3148365872134141428
    assert int(mix()) == 11400714819323198485
    assert float(uniform("dropout", 0, 1)) == 0.8808879994274615
    assert generator("cohort", 0, 1).integers(1000, size=4).tolist() == [755, 739, 478, 975]
    assert torch_seed("init", 7) == 7364350564069115766
    clients = np.array([1, 2], dtype=np.uint64)
    assert shuffles("rows", clients, np.array([4, 3])).tolist() == [1, 0, 2, 3, 2, 0, 1]
    assert permuted(np.arange(7), 7, "lap", 0).tolist() == [5, 0, 2, 1, 3, 6, 4]


def test_keys_are_of_the_text_alone() -> None:
    expected = int.from_bytes(hashlib.blake2b("Zoë".encode(), digest_size=8).digest(), "little")
    assert text_key("Zoë") == int(client_keys(["Zoë"])[0]) == expected
    assert mix("a text") == mix(text_key("a text"))


def test_words_matter_and_so_does_their_order() -> None:
    seen = {int(mix(*words)) for words in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), ("0",), (-1,), (2**64,), (2**63,)]}
    assert len(seen) == 9  # words are taken modulo 2^64: only 2^64 is the same as 0
    assert mix(-1) == mix(2**64 - 1)


def test_arrays_are_the_same_as_one_by_one() -> None:
    clients = np.arange(5, dtype=np.uint64)
    assert mix("k", clients).tolist() == [int(mix("k", int(c))) for c in clients]
    grid = mix("k", clients[:, None], np.arange(3, dtype=np.uint64))
    assert grid.shape == (5, 3)
    assert int(grid[4, 2]) == int(mix("k", 4, 2))


@pytest.mark.parametrize("words", [("u",), ("u", 3), ("u", 7 << 40)])
def test_uniform_is_uniform(words: tuple[int | str, ...]) -> None:
    """Consecutive keys are the hard case: 100,000 of them in 100 cells, and their lag-1 correlation."""
    values = uniform(*words, np.arange(100_000, dtype=np.uint64))
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.chisquare(np.histogram(values, 100, (0, 1))[0]).pvalue > 1e-3
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


def test_mix_avalanches() -> None:
    """One bit of the key flips half of the result's bits."""
    keys = np.arange(2000, dtype=np.uint64)
    for bit in (0, 17, 63):
        flipped = mix("a", keys) ^ mix("a", keys ^ np.uint64(1 << bit))
        ones = np.unpackbits(flipped.view(np.uint8)).sum() / len(keys)
        assert ones == pytest.approx(32, abs=0.5)


def test_generator_and_torch_seed() -> None:
    assert generator("g", 1).random() == generator("g", 1).random() != generator("g", 2).random()
    assert all(0 <= torch_seed("t", i) < 2**63 for i in range(100))


sizes = st.lists(st.integers(0, 30), min_size=0, max_size=20)


def _split(flat: np.ndarray, sizes: list[int]) -> list[list[int]]:
    ends = np.cumsum(sizes)
    return [flat[end - size : end].tolist() for end, size in zip(ends, sizes)]


@given(sizes=sizes, key=st.integers(0, 2**64 - 1))
def test_shuffles_are_permutations_and_each_clients_own(sizes: list[int], key: int) -> None:
    clients = mix("c", np.arange(len(sizes), dtype=np.uint64))
    found = _split(shuffles(key, clients, np.array(sizes, dtype=np.int64)), sizes)
    assert [sorted(order) for order in found] == [list(range(size)) for size in sizes]
    for place, size in enumerate(sizes):  # the others of the chunk do not matter
        alone = shuffles(key, clients[place : place + 1], np.array([size], dtype=np.int64))
        assert alone.tolist() == found[place] or size == 0


def test_shuffles_where_packing_has_too_few_bits() -> None:
    """With 2^22 clients (23 bits) and 2^18 rows (19 bits) 22 random bits are left: it sorts by whole words instead."""
    many = np.zeros(2**22 + 1, dtype=np.int64)  # 23 bits of segment
    many[[0, 5, 2**22]] = [4, 3, 2**18 + 1]  # 19 bits of row: 64 - 42 = 22 random bits
    clients = np.arange(len(many), dtype=np.uint64)
    found = shuffles("k", clients, many)
    ends = np.cumsum(many[many > 0])
    orders = np.split(found, ends[:-1])
    assert [np.array_equal(np.sort(order), np.arange(len(order))) for order in orders] == [True] * 3
    assert orders[2][:10].tolist() != list(range(10))
    # it sorts by the same random words: short clients, which cannot tie, come out as in the other branch
    assert orders[0].tolist() == shuffles("k", clients[:1], np.array([4])).tolist()


def test_shuffles_are_fair() -> None:
    """All 6 orders of 3 rows, equally often, over 12,000 clients; and over keys for one client."""
    for flat in (
        shuffles("k", np.arange(12_000, dtype=np.uint64), np.full(12_000, 3)),
        np.concatenate([shuffles(k, np.array([5], dtype=np.uint64), np.array([3])) for k in range(3000)]),
    ):
        orders, counts = np.unique(flat.reshape(-1, 3), axis=0, return_counts=True)
        assert len(orders) == 6
        assert stats.chisquare(counts).pvalue > 1e-3


@given(size=st.integers(1, 600), seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_permuted_is_a_bijection(size: int, seed: int) -> None:
    found = permuted(np.arange(size), size, "p", seed)
    assert np.array_equal(np.sort(found), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1 << 10, (1 << 10) + 1])
def test_permuted_at_powers_of_two(size: int) -> None:
    assert np.array_equal(np.sort(permuted(np.arange(size), size, "edge")), np.arange(size))


def test_permuted_mixes_and_needs_no_table() -> None:
    """Where the first of 10 goes is uniform over keys; and one position of 10^12 costs no more than one of ten."""
    places = np.array([int(permuted(np.array([0]), 10, "q", k)[0]) for k in range(5000)])
    assert stats.chisquare(np.bincount(places, minlength=10)).pvalue > 1e-3
    calls = 0

    def counted(*words: randomness.Word) -> np.ndarray:
        nonlocal calls
        calls += max(np.size(word) for word in words if isinstance(word, np.ndarray))
        return mix(*words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(randomness, "mix", counted)
        found = permuted(np.arange(100), 10**12, "big")
    assert len(set(found.tolist())) == 100
    assert found.max() < 10**12
    assert calls < 100 * 6 * 10  # six layers, and a walk of at most a few cycles


# -- a client's own chances ------------------------------------------------------------------------------------------
def drawn(clients: int, key: int = 3, count: int = 20, purpose: str = "embedding") -> torch.Tensor:
    """(clients, count): everyone's numbers, one client at a time."""
    names = np.char.add("c", np.arange(clients).astype(str))
    columns: dict[str, Any] = {"x": torch.zeros(clients, 1), "y": torch.zeros(clients)}
    population = Population.build(columns, names)
    orders = Orders.draw(everything(population), np.arange(clients), Batching(), key)
    return torch.stack([orders.sliced(c).chances(count, purpose) for c in range(clients)])


def test_clients_draw_numbers_of_their_own() -> None:
    values = drawn(2000).double().numpy()
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.chisquare(np.histogram(values, 100, (0, 1))[0]).pvalue > 1e-3
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.02  # of neighbours
    assert abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.02  # one after the other
    assert len(np.unique(values[:, 0])) > 1990


def test_chances_depend_on_round_and_purpose_alone() -> None:
    assert torch.equal(drawn(5), drawn(9)[:5])
    assert torch.equal(drawn(5, count=4), drawn(5)[:, :4])
    assert not torch.equal(drawn(5), drawn(5, key=4))
    assert not torch.equal(drawn(5), drawn(5, purpose="negatives"))


def test_chances_are_the_same_under_vmap() -> None:
    columns: dict[str, Any] = {"x": torch.zeros(6, 1), "y": torch.zeros(6)}
    population = Population.build(columns, np.array([f"c{i}" for i in range(6)]))
    stacked = Orders.draw(everything(population), np.arange(6), Batching(), 3).stacked(np.arange(6))
    found = torch.func.vmap(lambda mine: stacked.of_client(mine).chances(20, "embedding"))(stacked.mapped())
    assert torch.equal(found, drawn(6))
