"""Models of the user's own in runs: interrupted and resumed, in worker processes, exported, and from transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bespoke
import own_models
from bespoke.data.population import Population
from bespoke.deploy.export import export_personal
from bespoke.errors import UserError
from bespoke.experiment.build import build, to_toml
from bespoke.experiment.checks import checked
from bespoke.models.own import build as kept
from bespoke.models.own import model as known
from bespoke.models.own.model import local_name
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.tensors import BUFFERS


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real images of 8 x 8 by client, on disk."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = (found.images / 16).astype(np.float32), found.target
    rows = {f"c{i}": (images[40 * i : 40 * i + 40], labels[40 * i : 40 * i + 40]) for i in range(4)}
    folder = tmp_path_factory.mktemp("own") / "digits"
    bespoke.population(rows, task="classification").save(folder)
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(0)
    rows = {}
    for client in range(3):
        x = draw.standard_normal((40, 6))
        rows[f"c{client}"] = x, (x[:, 0] > 0).astype(int) + (x[:, 1] > 1)
    folder = tmp_path_factory.mktemp("own") / "table"
    bespoke.population(rows, task="classification").save(folder)
    return folder


def described(data: Path, model: Any, *stages: dict[str, Any], **engine: Any) -> dict[str, Any]:
    return {
        "data": {"population": str(data)}, "model": {"name": local_name(model, "model")}, "stage": list(stages),
        "engine": {"kind": "looped", "workers": 0, **engine},
    }  # fmt: skip


FEDAVG = {"method": "fedavg", "rounds": 3, "lr": 0.1, "batch_size": 8}
FINETUNE = {"method": "finetune", "epochs": 2, "lrs": [0.05], "batch_size": 8}
DITTO = {"method": "ditto", "rounds": 3, "lr": 0.1, "batch_size": 8, "adapt_epochs": 1}


def run(experiment: dict[str, Any], out: Path, die_after: tuple[int, int] | None = None) -> dict[str, Any]:
    config = checked(experiment, "test")
    folder = RunFolder.create(out, to_toml(config))

    def killed(stage: int, number: int) -> None:
        if (stage, number) == die_after:
            raise KeyboardInterrupt

    with folder.locked():
        made = Run(build(config, folder=out), folder, checkpoint_seconds=0.0, after_round=killed)
        if die_after is None:
            return made.run()
        with pytest.raises(KeyboardInterrupt):
            made.run()
    return {}


def bytes_of(folder: Path) -> dict[str, bytes]:
    """What a run leaves, but for the clock."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in ("timing.jsonl", "lock")]
    kept = [p for p in files if p.suffix in (".json", ".jsonl", ".parquet", ".toml")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in kept}


CASES = {
    "dropout": (own_models.dropped, "table", (FEDAVG, FINETUNE)),
    "averaged": (own_models.averaged, "digits", (FEDAVG, FINETUNE)),
    "private": (own_models.private, "digits", (FEDAVG, FINETUNE)),
    "private ditto": (own_models.private, "digits", (DITTO,)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_ends_with_the_same_bytes(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model, data, stages = CASES[case]
    experiment = described(request.getfixturevalue(data), model, *stages)
    whole = run(experiment, tmp_path / "whole")
    run(experiment, tmp_path / "killed", die_after=(0, 2))
    assert run(experiment, tmp_path / "killed") == whole
    assert bytes_of(tmp_path / "killed") == bytes_of(tmp_path / "whole")
    assert "own_models:" in (tmp_path / "whole/config.toml").read_text()


def test_tuning_goes_on_from_each_clients_own_layers(digits: Path, tmp_path: Path) -> None:
    """The last stage has no rounds; its candidate of no epochs is what FedAvg with private layers ended with."""
    alone = run(described(digits, own_models.private, FEDAVG), tmp_path / "alone")
    tuned = run(described(digits, own_models.private, FEDAVG, FINETUNE), tmp_path / "tuned")
    assert tuned["candidates"]["epoch 0"] == pytest.approx(alone["validation"])
    export_personal(tmp_path / "alone", "c1", tmp_path / "exported")
    model = bespoke.load_personal(tmp_path / "exported")
    other = tmp_path / "other"
    export_personal(tmp_path / "alone", "c2", other)
    name = f"{BUFFERS}bn.running_mean"
    assert not torch.equal(model.params[name], bespoke.load_personal(other).params[name])
    said = json.loads((tmp_path / "exported/model.json").read_text())
    assert said["network"]["model"] == "own_models:private"
    people = Population.open(digits)
    module = own_models.ResNet()
    state = {n.removeprefix(BUFFERS): p for n, p in model.params.items()}
    state |= {n: p.round().long() for n, p in state.items() if n.endswith("num_batches_tracked")}
    module.load_state_dict(state)
    x = people.columns["x"][40:60]
    torch.testing.assert_close(model.outputs(x), module.eval()(x.reshape(-1, 1, 8, 8)).detach(), rtol=1e-4, atol=1e-5)


def test_worker_processes_make_the_model_by_its_name(digits: Path, tmp_path: Path) -> None:
    alone = run(described(digits, own_models.private, FEDAVG), tmp_path / "alone")
    spread = run(described(digits, own_models.private, FEDAVG, workers=2), tmp_path / "spread")
    assert spread["query"] == pytest.approx(alone["query"])
    logs = [(tmp_path / name / "rounds.jsonl").read_text().splitlines()[-1] for name in ("alone", "spread")]
    losses = [json.loads(line)["validation"]["loss"] for line in logs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


SCRIPT = """
import sys
import bespoke

print("once")
stage = {"method": "fedavg", "rounds": 1}
said = {"data": {"population": sys.argv[1]}, "engine": {"workers": 2}, "model": {"name": "linear"}, "stage": [stage]}
print(bespoke.run(said, sys.argv[2])["clients"])
"""


def test_worker_processes_leave_a_script_alone(table: Path, tmp_path: Path) -> None:
    """One without `if __name__ == "__main__"`, which Python's own processes would run again."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    words = [sys.executable, "script.py", str(table), str(tmp_path / "out")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["once", "3"]


def test_an_object_stays_in_its_process(table: Path, tmp_path: Path) -> None:
    net = bespoke.model(lambda: own_models.Dropped(), head="fc")
    with pytest.raises(UserError, match="put it into a module"):
        run(described(table, net, FEDAVG, workers=2), tmp_path / "spread")
    result = run(described(table, net, FEDAVG), tmp_path / "run")
    assert result["query"] > 0.4
    config = checked(described(table, net, FEDAVG), "test")
    known._here.clear()  # as in another process
    kept._made.clear()
    with pytest.raises(UserError, match="was given as an object"):
        build(config)


def test_features_serve_fedrep_and_memories(table: Path, tmp_path: Path) -> None:
    fedrep = {"method": "fedrep", "rounds": 2, "lr": 0.1, "head_epochs": 2, "adapt_epochs": 2, "batch_size": 8}
    assert run(described(table, own_models.normed, fedrep), tmp_path / "fedrep")["query"] > 0.4
    memory = {"method": "knn-per", "mix": [0.0, 0.5]}
    found = run(described(table, own_models.normed, FEDAVG, memory), tmp_path / "knn")
    assert set(found["candidates"]) == {"mix 0", "mix 0.5"}


def test_compare_takes_a_model(table: Path, tmp_path: Path) -> None:
    summary = bespoke.compare(
        Population.open(table, resident=True), model=own_models.measured, out=tmp_path / "out",
        methods=["fedavg", "finetune"], seeds=1, rounds=2, tune=False,
        settings={"metric": "balanced", "engine": {"kind": "looped", "workers": 0}},
    )  # fmt: skip
    assert summary.answer
    about = json.loads((tmp_path / "out/compare.json").read_text())
    assert about["model"]["name"] == "own_models:measured"
    assert about["metric"] == "balanced"
    assert not about["lower_is_better"]
    assert "own_models:measured" in (tmp_path / "out/report.html").read_text()
    bespoke.compare(  # the same again finds all of it finished
        Population.open(table, resident=True), model="own_models:measured", out=tmp_path / "out",
        methods=["fedavg", "finetune"], seeds=1, rounds=2, tune=False,
        settings={"metric": "balanced", "engine": {"kind": "looped", "workers": 0}},
    )  # fmt: skip


def text_classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, num_labels=2, initializer_range=0.2,
    )  # fmt: skip
    return BertForSequenceClassification(config)


classifier = bespoke.model(
    text_classifier, head="classifier", inputs=("input_ids", "attention_mask"), outputs=lambda o: o.logits
)

LIKED, DISLIKED = ("fine", "moving", "witty"), ("dull", "empty", "noisy")


def texts_of(client: int) -> list[tuple[str, int]]:
    """What a client writes of films: one says what it thinks first, the other last."""
    things = ("the plot", "the cast", "the music", "what an end", "this film", "all of it", "the story")
    words = [(word, int(word in LIKED)) for word in (*LIKED, *DISLIKED)]
    return [(f"{word} {thing}" if client else f"{thing} was so {word}", y) for thing in things for word, y in words]


def reviews() -> Population:
    """Words as numbers, padded, with a mask of those that are there."""
    written = {name: texts_of(client) for client, name in enumerate(("anna", "bob"))}
    known = sorted({word for texts in written.values() for text, _ in texts for word in text.split()})
    rows = {}
    for name, texts in written.items():
        ids, mask = np.zeros((len(texts), 8), np.int64), np.zeros((len(texts), 8), np.int64)
        for place, (text, _) in enumerate(texts):
            words = [1 + known.index(word) for word in text.split()]
            ids[place, : len(words)], mask[place, : len(words)] = words, 1
        rows[name] = {"input_ids": ids, "attention_mask": mask}, np.array([y for _, y in texts])
    return bespoke.population(rows, task="classification")


def test_a_classifier_from_transformers_learns_texts_by_client(tmp_path: Path) -> None:
    people = reviews()
    name = local_name(classifier, "model")
    assert name == "test_own_models:classifier"
    stage = {"method": "fedavg", "rounds": 12, "lr": 0.2, "batch_size": 5}
    experiment = {
        "data": {"population": "here"}, "model": {"name": name}, "engine": {"kind": "looped", "workers": 0},
        "stage": [stage], "split": {"fractions": [0.6, 0.2, 0.2]}, "evaluate_every": 12,
    }  # fmt: skip
    made = build(checked(experiment, "test"), people)
    params, rows = made.task.init(0), people.columns
    module = made.task.network.model.made({}, 0).eval()
    said = module(input_ids=rows["x"], attention_mask=rows["attention_mask"]).logits
    torch.testing.assert_close(made.task.predict(params, dict(rows)), said)  # the mask arrives: padding is not read
    blind = made.task.predict(params, {**rows, "attention_mask": torch.ones_like(rows["attention_mask"])})
    assert not torch.allclose(said, blind)
    folder = RunFolder.create(tmp_path / "run", to_toml(checked(experiment, "test")))
    with folder.locked():
        result = Run(made, folder).run()
    assert result["query"] > 0.8  # a constant has a half
