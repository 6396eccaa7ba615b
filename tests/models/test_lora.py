"""Low-rank adapters of a frozen language model: against weights that have them added, and in ordinary methods."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional as F

from bespoke import load_personal, pretrained
from bespoke.api import run as run_experiment
from bespoke.deploy.export import export_personal
from bespoke.errors import UserError
from bespoke.models import build_task, lora
from bespoke.models.lora import AdapterLM, LoraLM
from bespoke.tensors import Params
from small_language import WIDTH, prefix_world, tiny_model
from test_fedpc import settings

pytest.importorskip("peft")
RANK, ALPHA = 2, 6.0


def task_of() -> AdapterLM:
    return AdapterLM(LoraLM(tiny_model(), RANK, ALPHA), given=1)


def adapters(seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(p.shape, generator=generator) for name, p in task_of().init(0).items()}


def rows_of(many: int = 40) -> Params:
    columns = prefix_world().population.columns
    return {**{name: column[:many] for name, column in columns.items()}, "mask": torch.ones(many)}


def added(params: Params) -> Any:
    """The library's model with alpha / rank B A added to its weights, by hand."""
    model = copy.deepcopy(pretrained.language_model(tiny_model()))
    weights = dict(model.base_model.named_parameters())
    for name, a in params.items():
        if name.endswith("lora_A"):
            layer = name.removesuffix(".lora_A")
            weights[f"{layer}.weight"].data += ALPHA / RANK * params[f"{layer}.lora_B"] @ a
    return model


def test_adapters_are_a_change_of_the_weights() -> None:
    """Scores are those of the changed model; what peft adapts in a Llama are queries and values."""
    task, params, rows = task_of(), adapters(), rows_of()
    assert {tuple(name.split(".")[-2:]) for name in params} == {
        (layer, part) for layer in ("q_proj", "v_proj") for part in ("lora_A", "lora_B")
    }
    logits = added(params)(rows["x"].long()).logits
    torch.testing.assert_close(task.predict(params, rows), logits, rtol=1e-4, atol=1e-5)
    y = torch.where(torch.arange(rows["y"].shape[1]) < 1, -1, rows["y"]).long()
    total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum")
    for scores in (task.scored(params, rows), task.score(task.predict(params, rows), rows)):
        torch.testing.assert_close(scores["loss"], total, rtol=1e-5, atol=1e-4)


def test_the_gradient_is_that_of_differences() -> None:
    task, params, rows = task_of(), adapters(), rows_of(9)
    slope = task.gradient(params, rows)
    direction = {name: torch.sign(leaf) for name, leaf in slope.items()}
    for name in (next(iter(slope)), list(slope)[-1]):
        ends = [
            float(task.loss({**params, name: params[name] + step * direction[name]}, rows)) for step in (1e-3, -1e-3)
        ]
        assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(float(slope[name].abs().sum()), rel=0.02)


def test_it_begins_as_it_was_pretrained_and_the_plain_model_stays() -> None:
    rows, model = rows_of(), pretrained.language_model(tiny_model())
    before = {name: leaf.clone() for name, leaf in model.named_parameters()}
    said = model(rows["x"].long()).logits
    first, second = (task_of().init(seed) for seed in (1, 2))
    assert any(not torch.equal(first[name], second[name]) for name in first)
    for params in (first, {}):
        torch.testing.assert_close(task_of().predict(params, rows), said, rtol=1e-4, atol=1e-5)
    task_of().gradient(adapters(), rows)
    assert before.keys() == dict(model.named_parameters()).keys()  # nothing was put into it
    assert all(torch.equal(leaf, before[name]) for name, leaf in model.named_parameters())
    frozen = {leaf.data_ptr() for leaf in model.parameters()}
    twin = lora._adapted(tiny_model(), RANK, ALPHA, "cpu").named_parameters()
    assert all(leaf.data_ptr() in frozen for name, leaf in twin if "lora" not in name)  # one copy in memory


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"adapt": "heads"}, "adapt = 'heads': it has to be 'prefix'"),
        ({"adapt": "lora", "rank": 0}, "rank = 0"),
        ({"adapt": "lora", "alpha": -1}, "alpha = -1"),
        ({"rank": 4}, "unknown key 'rank'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    about = {"task": "language", "input": "tokens", "features": ["token 0"], "pretrained": tiny_model()}
    with pytest.raises(UserError, match=said):
        build_task(about, "frozen", pretrained=tiny_model(), **options)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"needs the package peft: pip install 'bespoke-fl\[lora\]'"):
        replace(task_of().network, rank=3).init(0)


def test_one_shared_lora_and_one_per_user(tmp_path: Path) -> None:
    """FedAvg then fine-tuning: what travels are the adapters, and a user's own are what is exported."""
    config = settings(tmp_path)
    config["model"] |= {"adapt": "lora", "rank": RANK}
    config["stage"] = [
        {"method": "fedavg", "rounds": 2, "lr": 1.0, "batch_size": 4},
        {"method": "finetune", "lrs": [0.5], "epochs": 2, "keep_shared": False},
    ]
    run_experiment(config, tmp_path / "run")
    sizes = [leaf.numel() for leaf in task_of().init(0).values()]
    assert sum(sizes) == 2 * 2 * 2 * RANK * WIDTH  # two layers, queries and values, A and B
    ledger = pd.read_json(tmp_path / "run" / "ledger.jsonl", lines=True)
    assert 4 * sum(sizes) <= ledger["bytes_down"].max() / 4 <= 4 * sum(sizes) + 64  # four clients
    assert np.isfinite(pd.read_parquet(tmp_path / "run" / "clients.parquet")["query_perplexity"]).all()
    written = export_personal(tmp_path / "run", "carl")
    model = load_personal(written["folder"])
    assert written["parameters"] == sum(sizes)
    x = torch.tensor([[1, 5, 9]])
    scaled = {name: p * (16.0 / RANK / (ALPHA / RANK) if name.endswith("B") else 1) for name, p in model.params.items()}
    torch.testing.assert_close(model.outputs(x), added(scaled)(x).logits, rtol=1e-4, atol=1e-5)
    assert any(leaf.any() for name, leaf in model.params.items() if name.endswith("lora_B"))
