"""The table of private state: lazily filled, growing, written in segments."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bespoke.errors import UserError
from bespoke.federation.private_state import PrivateTable
from bespoke.storage import open_arrays
from bespoke.tensors import Tree, flatten, stack

TEMPLATE: Tree = {
    "flag": torch.tensor([True, False, True]),
    "model": {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])},
    "big": torch.tensor(7.0, dtype=torch.float64),
    "count": torch.tensor(5, dtype=torch.int32),
}
WIDTH = 3 + 3 * 4 + 8 + 4


def state(value: int) -> Tree:
    """A client's state that tells whose it is."""
    return {
        "flag": torch.tensor([False, True, value % 2 == 0]),
        "model": {"w": torch.full((1, 2), float(value)), "b": torch.tensor([value + 0.5])},
        "big": torch.tensor(value * 1e-9, dtype=torch.float64),
        "count": torch.tensor(value, dtype=torch.int32),
    }


def same(found: Tree, expected: list[Tree]) -> None:
    for name, leaf in flatten(stack(expected)).items():
        mine = flatten(found)[name]
        assert mine.dtype == leaf.dtype
        assert torch.equal(mine, leaf), name


def test_untouched_clients_hold_the_initial_state_and_cost_nothing() -> None:
    table = PrivateTable(TEMPLATE)
    same(table.read([3, 10**12]), [TEMPLATE, TEMPLATE])
    assert (table.capacity, len(table.slots), table.width) == (0, 0, WIDTH)
    table.write([10**12], stack([state(1)]))
    assert len(table.slots) == 1
    assert table.rows.nbytes <= 64 * WIDTH  # whatever the client's number
    same(table.read([3, 10**12]), [TEMPLATE, state(1)])


def test_a_method_without_state_has_no_table() -> None:
    table = PrivateTable({})
    assert not table
    assert table.read([1, 2]) == {}
    table.write([1], {})
    assert table.slots == {}


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=80, unique=True), min_size=1, max_size=8))
def test_it_remembers_what_was_written_last(rounds: list[list[int]]) -> None:
    """Against a dict, over rounds of any cohorts, through growth."""
    table = PrivateTable(TEMPLATE)
    known: dict[int, Tree] = {}
    for number, cohort in enumerate(rounds):
        new = {client: state(1000 * number + client) for client in cohort}
        table.write(cohort, stack(list(new.values())))
        known |= new
    asked = [*known, 999]
    same(table.read(asked), [known.get(client, TEMPLATE) for client in asked])
    assert len(table.slots) == len(known)
    assert len(table.rows) >= len(known)


def test_growth_keeps_what_is_there() -> None:
    table = PrivateTable(TEMPLATE)
    for client in range(200):
        table.write([client], stack([state(client)]))
    same(table.read(range(200)), [state(client) for client in range(200)])
    assert table.capacity == 256  # 64, doubled twice


def test_what_is_read_is_a_copy() -> None:
    table = PrivateTable(TEMPLATE)
    for written in (False, True):
        if written:
            table.write([0], stack([state(4)]))
        table.read([0])["model"]["w"].zero_()
        same(table.read([0]), [state(4) if written else TEMPLATE])


def test_fields_are_known_by_name_not_by_order() -> None:
    """A template that was saved and loaded has its names in another order; so may what a method returns."""
    turned = {name: TEMPLATE[name] for name in reversed(TEMPLATE)}
    turned["model"] = {name: TEMPLATE["model"][name] for name in ("b", "w")}
    one, other = PrivateTable(TEMPLATE), PrivateTable(turned)
    given_back = {name: state(6)[name] for name in ("count", "big", "model", "flag")}
    one.write([2], stack([given_back]))
    other.write([2], stack([state(6)]))
    assert one.rows[0].tobytes() == other.rows[0].tobytes()
    same(other.read([2]), [state(6)])


@pytest.mark.parametrize(
    "wrong",
    [
        {**state(1), "count": torch.tensor(1.0)},  # as wide as an int32, but no int32
        {**state(1), "big": torch.tensor([1.0], dtype=torch.float64)},
        {name: leaf for name, leaf in state(1).items() if name != "flag"},
        {**state(1), "more": torch.tensor(1)},
    ],
)
def test_state_of_another_form_is_refused(wrong: Tree) -> None:
    with pytest.raises(TypeError, match="came back from a round"):
        PrivateTable(TEMPLATE).write([1], stack([wrong]))


def owners(path: Path) -> list[int]:
    return open_arrays(path)[0]["clients"].tolist()


def test_segments_hold_what_changed_since_the_last(tmp_path: Path) -> None:
    table = PrivateTable(TEMPLATE)
    table.write(range(10), stack([state(i) for i in range(10)]))
    assert table.save(tmp_path / "1.safetensors") == ["1.safetensors"]
    table.write([9, 2], stack([state(90), state(20)]))
    assert table.save(tmp_path / "2.safetensors") == ["1.safetensors", "2.safetensors"]
    assert table.save(tmp_path / "3.safetensors") == ["1.safetensors", "2.safetensors"]
    assert not (tmp_path / "3.safetensors").exists()
    assert owners(tmp_path / "2.safetensors") == [2, 9]  # by client: the same bytes always
    table.write([5], stack([state(50)]))
    assert table.save(tmp_path / "4.safetensors") == ["1.safetensors", "4.safetensors"]
    assert owners(tmp_path / "4.safetensors") == [2, 5, 9]  # two rows are not more than twice one: taken over
    assert table.save(tmp_path / "all.safetensors", only_dirty=False) == ["all.safetensors"]

    for names in (["1", "2", "4"], ["1", "4"], ["all"]):
        again = PrivateTable(TEMPLATE)
        for name in names:
            again.load(tmp_path / f"{name}.safetensors")
        same(again.read([2, 5, 9, 1, 77]), [state(20), state(50), state(90), state(1), TEMPLATE])
        assert again.dirty == set()  # what was loaded lies on disk already
    part = PrivateTable(TEMPLATE)
    part.load(tmp_path / "all.safetensors", only={2, 9})
    same(part.read([2, 5, 9]), [state(20), TEMPLATE, state(90)])
    part.write([2, 9], stack([state(0), state(0)]))
    assert part.save(tmp_path / "5.safetensors") == ["all.safetensors", "5.safetensors"]  # others' rows lie there too


@pytest.mark.parametrize("cohort", [1, 3, 40])
def test_segments_stay_few_and_small(tmp_path: Path, cohort: int) -> None:
    """After every checkpoint: at most twice the live rows, in at most log2(clients) + 1 files; also when resumed."""
    draw, table, names = random.Random(cohort), PrivateTable(TEMPLATE), []
    newest: dict[int, Any] = {}
    for number in range(150):
        clients = draw.sample(range(64), cohort)
        newest |= dict.fromkeys(clients, number)
        table.write(clients, stack([state(number)] * cohort))
        names = table.save(tmp_path / f"{number}.safetensors")
        sizes = [len(owners(tmp_path / name)) for name in names]
        assert sum(sizes) <= 2 * len(newest)
        assert len(names) <= math.log2(len(newest)) + 1
        if number % 40 == 17:
            table = PrivateTable(TEMPLATE)
            for name in names:
                table.load(tmp_path / name)
    again = PrivateTable(TEMPLATE)
    for name in names:
        again.load(tmp_path / name)
    same(again.read(list(newest)), [state(number) for number in newest.values()])


def test_a_segment_of_another_method_is_refused(tmp_path: Path) -> None:
    other = PrivateTable({"w": torch.zeros(3)})
    other.write([1], {"w": torch.ones(1, 3)})
    other.save(tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="does not hold this method's private state"):
        PrivateTable(TEMPLATE).load(tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="missing"):
        PrivateTable(TEMPLATE).load(tmp_path / "nowhere.safetensors")


def test_rows_are_mapped_from_a_file_without_a_name() -> None:
    table = PrivateTable({"w": torch.zeros(1000)})
    table.write(range(100), {"w": torch.arange(100.0)[:, None].expand(100, 1000)})
    found = Path("/proc/self/maps").read_text().splitlines()
    assert any("(deleted)" in line for line in found)  # gone with the process, however it ends
