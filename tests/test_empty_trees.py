"""Empty trees are kept: in the form on disk, in private state, and in what transforms make of a message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bespoke
from bespoke.deploy.export import export_personal
from bespoke.federation.private_state import PrivateTable
from bespoke.privacy.noise import with_noise
from bespoke.storage import open_arrays, write_arrays
from bespoke.tensors import flatten, unflatten

TREE: dict[str, Any] = {"a": {}, "b": {"c": {}, "d": torch.ones(2)}, "e": torch.zeros(())}


def test_a_tree_comes_back_from_disk_with_its_empty_trees(tmp_path: Path) -> None:
    write_arrays(tmp_path / "tree", flatten(TREE))
    found = unflatten(open_arrays(tmp_path / "tree")[0])
    assert set(found) == {"a", "b", "e"}
    assert found["a"] == {}
    assert found["b"]["c"] == {}
    assert found["b"]["d"].tolist() == [1.0, 1.0]


def test_a_tree_that_holds_one_array_twice_is_written(tmp_path: Path) -> None:
    twice = torch.arange(3.0)
    write_arrays(tmp_path / "tree", {"a": twice, "b": twice, "c": twice[1:]})
    found = open_arrays(tmp_path / "tree")[0]
    assert [found[name].tolist() for name in "abc"] == [[0, 1, 2], [0, 1, 2], [1, 2]]


def test_private_state_and_noise_keep_them() -> None:
    table = PrivateTable(TREE)
    table.write([4], {"e": torch.ones(1), "b": {"d": torch.full((1, 2), 3.0), "c": {}}, "a": {}})
    found = table.read([4, 5])
    assert found["a"] == found["b"]["c"] == {}
    assert found["b"]["d"].tolist() == [[3.0, 3.0], [1.0, 1.0]]
    assert PrivateTable({"memory": {}}).read([1, 2]) == {"memory": {}}
    assert with_noise(TREE, 0.0, ("key",))["b"]["c"] == {}


@pytest.mark.parametrize(
    ("method", "transform", "floats"),
    [
        ("fedavg", {"top_k": 0.5}, 6 + 1 + 1),  # six features, a constant and a weight: too few to be compressed
        ("ditto", {"top_k": 0.5, "quantize": "nearest"}, 6 + 1 + 1),
        ("fedrep", {"quantize": "stochastic"}, 1),  # a linear model has no body: the weight alone travels
        ("pfedkm", {"quantize": "nearest"}, 6 + 1 + 1),
    ],
)
def test_small_messages_are_sent_as_they_are(
    method: str, transform: dict[str, Any], floats: int, tmp_path: Path
) -> None:
    experiment = {
        "data": {"source": "exam"}, "transform": transform, "cohort": {"size": 3},
        "stage": [{"method": method, "rounds": 2}],
    }  # fmt: skip
    bespoke.run(experiment, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert [line["bytes_up"] for line in lines if line["round"]] == [3 * 4 * floats] * 2
    export_personal(tmp_path / "run", "51", tmp_path / "model")  # made from the checkpoint on disk
    assert (tmp_path / "model" / "model.safetensors").is_file()
