"""Fine-tuning's candidates by hand: models on the way to the tuned one, and the last layer before the others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.methods import FineTune
from bespoke.models.networks import MLP
from bespoke.models.task import Regression
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from by_hand import TASK, batches_of, numbers


def test_blends_by_hand() -> None:
    """One row x = 1, y = 1: steps of lr 1/4 lead u to 1/4 and 3/8 from 0, and half of the way is half of each."""
    made = FineTune(TASK, lrs=(0.25,), epochs=2, blend=(0.5, 1.0))
    models = made.personalize({"params": TASK.init(0)}, {}, batches_of([1.0], [1.0], made, support=True))
    found = dict(zip(made.candidates(), [numbers(model) for model in models], strict=True))
    assert {name: weight for name, (weight, _) in found.items()} == pytest.approx(
        {
            "epoch 0": 0.0,
            "lr 0.25, epoch 1, blend 0.5": 0.125, "lr 0.25, epoch 1, blend 1": 0.25,
            "lr 0.25, epoch 2, blend 0.5": 0.1875, "lr 0.25, epoch 2, blend 1": 0.375,
        }
    )  # fmt: skip
    assert all(weight == pytest.approx(bias) for weight, bias in found.values())


def test_the_last_layer_first_and_then_all() -> None:
    """Of five epochs two leave the first layer as it is; what comes after them is fine-tuning of all from there."""
    task = Regression(MLP(1, 1, (3,)))
    made = FineTune(task, lrs=(0.1,), epochs=5, part="last-then-all")
    rows = batches_of([1.0, 2.0, -1.0], [1.0, 0.0, 3.0], made, support=True)
    start = task.init(1)
    models = list(made.personalize({"params": start}, {}, rows))
    head = {"head.weight", "head.bias"}
    for epoch, model in enumerate(models):
        same = {name for name, leaf in model.items() if torch.equal(leaf, start[name])}
        assert same == (set(start) if epoch == 0 else set(start) - head if epoch <= 2 else set())
    last = list(FineTune(task, lrs=(0.1,), epochs=5, part="last").personalize({"params": start}, {}, rows))
    torch.testing.assert_close(models[2], last[2])


@pytest.mark.parametrize("protocol", ["cross-silo", "cross-device"])
def test_clients_of_a_size_have_one_setting(tmp_path: Path, protocol: str) -> None:
    """Forty clients of 5 to 44 rows: whoever is tested has the candidate of all others of its part by size."""
    random = np.random.default_rng(0)
    who = np.repeat([f"c{i:02d}" for i in range(40)], np.arange(5, 45))
    x = random.standard_normal(len(who))
    slope = np.repeat(random.standard_normal(40), np.arange(5, 45))
    pd.DataFrame({"who": who, "x": x, "y": slope * x}).to_csv(tmp_path / "t.csv", index=False)
    tuned = {"method": "finetune", "lrs": [0.01, 0.1], "epochs": 4, "choose": "size"}
    raw = {
        "data": {"table": str(tmp_path / "t.csv"), "client": "who", "target": "y"},
        "split": {"protocol": protocol, "held_out": [0.5, 0.4]},
        "stage": [{"method": "fedavg", "rounds": 2}, tuned],
    }
    Run(build(checked(raw, "test")), RunFolder.create(tmp_path / "run", "")).run()
    table = pd.read_parquet(tmp_path / "run" / "clients.parquet").sort_values("support_examples")
    changes = (table["candidate"] != table["candidate"].shift()).sum()
    parts = 4 if protocol == "cross-silo" else 2  # 40 clients to choose on, or 20
    assert 1 <= changes <= parts
    assert json.loads((tmp_path / "run" / "result.json").read_text())["chosen"]["by_client"]
