"""benchmarks/doors: models that are no part of bespoke, on real data where they are at hand; and their chapter."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.doors import resnet_cifar10, tv_questions

import bespoke
import results_doors
from bespoke.deploy.export import export_personal
from bespoke.tensors import BUFFERS


def test_the_network_is_resnet_18() -> None:
    """11,173,962 parameters, as the literature counts it for ten classes of images of 32 x 32."""
    with torch.device("meta"):
        whole = resnet_cifar10.ResNet18()
    assert sum(p.numel() for p in whole.parameters()) == 11_173_962
    small = resnet_cifar10.ResNet18(width=2).eval()
    assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    convolutions = [
        part for part in small.modules() if isinstance(part, torch.nn.Conv2d) and part.kernel_size == (3, 3)
    ]
    assert len(convolutions) + 1 == 18  # and the dense layer


def test_some_of_the_photographs_are_dealt_out() -> None:
    labels = np.arange(5000) % 10
    owner = resnet_cifar10.some(labels, 4, 0, 0.3)
    sizes = np.bincount(owner[owner >= 0], minlength=4)
    assert sizes.sum() == 1200
    assert (owner == -1).sum() == 3800
    assert sizes.min() >= 50
    assert (owner == resnet_cifar10.some(labels, 4, 0, 0.3)).all()


@pytest.mark.parametrize("rule", ["averaged", "private"])
def test_fedavg_ditto_and_finetune_take_it(rule: str, tmp_path: Path) -> None:
    """What is exported of two clients: the same statistics where they are averaged, each client's where private."""
    draw = np.random.default_rng(0)
    rows = {
        name: ((draw.random((20, 3, 32, 32)) * (1 + place)).astype(np.float32), np.arange(20) % 10)
        for place, name in enumerate(("anna", "bob"))
    }
    settings: dict[str, Any] = {"model": {"width": 2}, "engine": {"workers": 0}}
    bespoke.compare(
        bespoke.population(rows, task="classification"), model=f"benchmarks.doors.resnet_cifar10:{rule}",
        methods=["fedavg", "ditto", "finetune"], seeds=1, rounds=1, tune=False, out=tmp_path / "out", settings=settings,
    )  # fmt: skip
    said = json.loads((tmp_path / "out/compare.json").read_text())
    parts = resnet_cifar10.ResNet18(width=2)
    everything = sum(p.numel() for p in parts.parameters())
    norms = [part for part in parts.modules() if isinstance(part, torch.nn.BatchNorm2d)]
    held = sum(p.numel() for part in norms for p in part.parameters())
    statistics = sum(buffer.numel() for buffer in parts.buffers())
    assert said["model"]["parameters"] == (everything + statistics if rule == "averaged" else everything - held)
    found = []
    for client in rows:
        export_personal(tmp_path / "out/runs/fedavg-seed0", client, tmp_path / client)
        found.append(bespoke.load_personal(tmp_path / client).params[f"{BUFFERS}bn.running_mean"])
    assert torch.equal(*found) == (rule == "averaged")


def test_what_is_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of one sentence, of four words or more, of the six main characters."""
    said = [
        ("Joey Tribbiani", "How you doin', Phoebe?"),
        ("Joey Tribbiani", "Joey doesn't share food!"),
        ("Joey Tribbiani", "It is a moo point."),
        ("Joey Tribbiani", "Why? It is a moo point."),
        ("Joey Tribbiani", "Is it?"),
        ("Gunther", "Do you want any coffee?"),
        ("Ross Geller", '"We were on a break."'),
        ("Ross Geller", "Were we on a break?"),
    ]
    (tmp_path / "tv").mkdir()
    lines = [f"{json.dumps(speaker)},{chr(34)}{text.replace(chr(34), chr(34) * 2)}{chr(34)}" for speaker, text in said]
    with gzip.open(tmp_path / "tv" / "friends.csv.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(["speaker,text", *lines]))
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path))
    found = tv_questions.lines_of(10)
    assert found["Joey Tribbiani"] == [("how you doin' phoebe", True), ("it is a moo point", False)]
    assert found["Ross Geller"] == [("were we on a break", True)]
    assert not found["Monica Geller"]
    assert len(tv_questions.lines_of(1)["Joey Tribbiani"]) == 1


def test_the_chapter_says_what_the_folders_hold(tmp_path: Path) -> None:
    assert results_doors.chapter(tmp_path) == ""
    draw = np.random.default_rng(0)
    rows = {f"c{place}": (draw.standard_normal((30, 4)), np.arange(30) % 2) for place in range(4)}
    bespoke.compare(
        bespoke.population(rows, task="classification"), model="linear", methods=["fedavg", "local"], seeds=1, rounds=2,
        tune=False, out=tmp_path / "doors-resnet-private",
    )  # fmt: skip
    text = results_doors.chapter(tmp_path)
    means = {m.title: m for m in bespoke.Result.read(tmp_path / "doors-resnet-private").methods}
    assert f"| FedAvg | {means['FedAvg'].mean.value:.3f} (" in text
    difference = means["Local"].mean.value - means["FedAvg"].mean.value
    assert f" | {difference:+.3f} (".replace("-", "−") in text
    assert "4 clients, 120 photographs, 2 rounds, 1 seed." in text
    assert "TV series" not in text
