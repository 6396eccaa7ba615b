"""Compression: by hand, without bias, with nothing lost for good, and in bytes that are really sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.engine import Choice
from bespoke.messages.compress import Compress
from bespoke.messages.transform import Outgoing
from bespoke.runs.events import Interrupted
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from small_methods import SmallDitto
from small_worlds import world

KEYS = np.array([3, 4], dtype=np.uint64)


def sent(rows: Any, memory: Any = None, key: int = 0) -> Outgoing:
    up = {"delta": {"w": torch.as_tensor(rows, dtype=torch.float32)}, "weight": torch.ones(2)}
    return Outgoing(up, 4 * (up["delta"]["w"].numel() + 2), KEYS, key, memory=memory or {})  # type: ignore[index]


def test_the_largest_entries_travel_and_the_rest_waits() -> None:
    ours = Compress(keep=0.5, least=1)
    rows = [[1.0, -5.0, 3.0, 0.5], [0.0, 0.0, -2.0, 1.0]]
    memory = {"error": {"delta": {"w": torch.zeros(2, 4)}}}
    first = ours.client(sent(rows, memory))
    assert first.up["delta"]["w"].tolist() == [[0.0, -5.0, 3.0, 0.0], [0.0, 0.0, -2.0, 1.0]]
    assert first.memory["error"]["delta"]["w"].tolist() == [[1.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]]
    again = ours.client(sent(torch.zeros(2, 4), first.memory))
    assert again.up["delta"]["w"][0].tolist() == [1.0, 0.0, 0.0, 0.5]
    assert not again.memory["error"]["delta"]["w"].any()


def test_error_feedback_sends_everything_in_time() -> None:
    """What was sent and what is still kept add up to what was to be sent, in every round."""
    ours, random = Compress(keep=0.1, rounding="stochastic", least=1), torch.Generator().manual_seed(1)
    memory: Any = {"error": {"delta": {"w": torch.zeros(2, 50)}}}
    wanted, gone = torch.zeros(2, 50), torch.zeros(2, 50)
    for key in range(40):
        rows = torch.randn(2, 50, generator=random)
        found = ours.client(sent(rows, memory, key))
        wanted, gone, memory = wanted + rows, gone + found.up["delta"]["w"], found.memory
        torch.testing.assert_close(gone + memory["error"]["delta"]["w"], wanted, rtol=1e-4, atol=1e-4)


def test_eight_bits() -> None:
    """Units of the largest over 127; the nearest is at most half a unit off, a random one less than a whole unit."""
    rows = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
    unit = rows.abs().amax(1, keepdim=True) / 127
    nearest = Compress(rounding="nearest", least=1).client(sent(rows)).up["delta"]["w"]
    assert bool(((nearest - rows).abs() <= unit / 2 * (1 + 1e-4)).all())
    drawn = torch.stack(
        [Compress(rounding="stochastic", least=1).client(sent(rows, key=k)).up["delta"]["w"] for k in range(400)]
    )
    assert bool(((drawn - rows).abs() <= unit * (1 + 1e-4)).all())
    # without bias: the mean of 400 draws, each off by at most a unit (deviation at most half of one)
    assert bool(((drawn.mean(0) - rows).abs() <= 5.5 * 0.5 * unit / 20).all())
    assert float((nearest - rows).abs().mean()) > 0
    zeros = Compress(rounding="stochastic", least=1).client(sent(torch.zeros(2, 400)))
    assert not zeros.up["delta"]["w"].any()


@pytest.mark.parametrize(
    ("knobs", "bytes_each"),
    [
        ({"keep": 0.1}, 40 * 4 + 40 * 2),  # values, and places of two bytes
        ({"rounding": "nearest"}, 400 + 4),  # one byte each, and the unit
        ({"keep": 0.1, "rounding": "nearest"}, 40 + 40 * 2 + 4),
        ({"keep": 1.0}, 400 * 6),  # to keep all is no compression, and is not said to be one
    ],
)
def test_bytes_by_hand(knobs: dict[str, Any], bytes_each: int) -> None:
    rows = torch.randn(2, 400)
    assert Compress(**knobs).client(sent(rows)).nbytes == 2 * (bytes_each + 4)  # and a weight, which stays as it is


def test_places_beyond_sixteen_bits() -> None:
    for width in (40_000, 65_536, 65_537):
        rows = torch.zeros(2, width)
        rows[:, width - 1] = 2.0
        found = Compress(keep=1 / width).client(sent(rows))
        assert torch.equal(found.up["delta"]["w"], rows)
        assert found.nbytes == 2 * (4 + (2 if width <= 65_536 else 4) + 4)


def run(folder: Path, stop_after: int | None = None) -> dict[str, Any]:
    place = world("linear")
    made = SmallDitto(place.task, lr=0.1, batch_size=4)
    experiment = Experiment(
        "small", place.population, place.split, place.task, (Stage(made, 5),), "mse", cohort=4,
        transforms=(Compress(0.5, "stochastic", least=1),),
    )  # fmt: skip
    stops = iter([False] * ((stop_after or 99) - 1) + [True] * 9)
    path = RunFolder.create(folder, "")
    try:
        return Run(experiment, path, how=Choice(False, 1, 0, 1, "autograd", ""), stop=lambda: next(stops, False)).run()
    except Interrupted:
        return run(folder)


def test_a_run_counts_compressed_bytes_and_keeps_its_memory_over_an_interruption(tmp_path: Path) -> None:
    """Regression 3 -> 1: of the weights two of three travel, of the bias one: 3 bytes, 3 places, 2 units; a weight."""
    whole, broken = run(tmp_path / "whole"), run(tmp_path / "broken", stop_after=3)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "ledger.jsonl").read_text().splitlines()]
    assert [line["bytes_up"] for line in lines if line["round"]] == [4 * (3 * 1 + 3 * 2 + 2 * 4 + 4)] * 5
    assert whole == broken
    for name in ("rounds.jsonl", "ledger.jsonl", "clients.parquet"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "broken" / name).read_bytes()
