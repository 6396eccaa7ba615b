"""The generators of FedPC against torch's own attention, what they may look at, and whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bespoke import load_personal
from bespoke.api import run as run_experiment
from bespoke.deploy.export import export_personal
from bespoke.deploy.forget import forget_client
from bespoke.errors import UserError
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.choice import COPIES, TRAINED, choose
from bespoke.federation.engine import Choice
from bespoke.federation.work import ClientWork
from bespoke.methods import FedPCGenerated
from bespoke.methods.parts.generator import Reads, generated, generator_start, nothing_read, read
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.tensors import Params, Tree, add_scaled, count, flatten, norm, unflatten
from command import bespoke
from kills import assert_identical, contents
from small_language import WIDTH, prefix_world, tiny_model

READS: tuple[Reads, ...] = get_args(Reads)
HEADS, LENGTH = 4, 5


def block_of(seed: int = 0) -> Params:
    block = generator_start(WIDTH, WIDTH, HEADS, 2 * WIDTH, torch.Generator().manual_seed(seed))
    return {**block, "gain": torch.full((WIDTH,), 0.5), "prior": torch.tensor(0.3)}


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step_of_torch(block: Params, e: Tensor, words: Tensor) -> Tensor:
    """Appendix A by torch's modules: e (tokens, width), words (words, width)."""
    attention = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([block["query"], block["key"], block["value"]]))
        attention.out_proj.weight.copy_(block["out"])
        norm = nn.LayerNorm(WIDTH)
        attended = attention(norm(e)[None], words[None], words[None])[0][0]
        h = norm(norm(attended) + norm(e))
        inner = F.gelu(F.linear(h, block["inner"], block["inner_bias"]))
        return norm(F.linear(inner, block["outer"], block["outer_bias"]) + norm(e))


def carried_after(block: Params, first: Tensor, words: Tensor, counted: Tensor, reads: Reads, rows: Tensor) -> Tree:
    return read(block, first, nothing_read(first, HEADS, reads), words, counted, rows, HEADS, reads)[1]


@pytest.mark.parametrize("reads", READS)
def test_the_block_is_that_of_torch(reads: Reads) -> None:
    """Three texts of 5, 2 and 4 words; the second is of another context."""
    block, first, words = block_of(), drawn(2, 3, WIDTH), drawn(3, LENGTH, WIDTH, seed=2)
    counted = (torch.arange(LENGTH) < torch.tensor([[5], [2], [4]])).float()
    carried = carried_after(block, first, words, counted, reads, torch.tensor([0, 1, 0]))
    for row, texts in ((0, [words[0], words[2, :4]]), (1, [words[1, :2]])):
        e = first[row]
        if reads == "history":
            e = step_of_torch(block, e, torch.cat(texts)) * len(texts) / (len(texts) + 1.349858808)  # exp(0.3)
        for text in texts if reads != "history" else ():
            for length in range(1, len(text) + 1) if reads == "token" else [len(text)]:
                e = step_of_torch(block, e, text[:length])
        torch.testing.assert_close(generated(block, first, carried)[row], 0.5 * e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reads", READS)
def test_texts_may_come_in_parts_and_padding_is_nothing(reads: Reads) -> None:
    block, first, words = block_of(), drawn(2, 1, WIDTH), drawn(6, LENGTH, WIDTH, seed=3)
    counted = (torch.arange(LENGTH) < torch.tensor([[5], [1], [3], [0], [4], [2]])).float()
    rows = torch.tensor([0, 1, 0, 0, 1, 1])
    whole = carried_after(block, first, words, counted, reads, rows)
    parts = nothing_read(first, HEADS, reads)
    for some in (slice(0, 2), slice(2, 3), slice(4, 6)):  # the fourth has no words: it only pads
        noise = words[some] + 9 * (1 - counted[some])[..., None]
        parts = read(block, first, parts, noise, counted[some], rows[some], HEADS, reads)[1]
    torch.testing.assert_close(generated(block, first, parts), generated(block, first, whole), rtol=1e-5, atol=1e-6)
    assert parts["texts"].tolist() == [2, 3]


def rows_of(many: int = 9) -> Params:
    columns = prefix_world().population.columns
    return {**{name: column[-many:] for name, column in columns.items()}, "mask": torch.ones(many)}


def held_of(method: FedPCGenerated) -> Tree:
    """What clients hold when the generators have learned something."""
    held = method.init_server(prefix_world().task.init(0))["params"]
    for part in ("user.gain", "context.gain"):
        held["generators"][part] = drawn(WIDTH, seed=5) * 0.1
    return held


@pytest.mark.parametrize("reads", READS)
def test_a_text_is_no_part_of_its_own_embedding(reads: Reads) -> None:
    """What text k says changes the embeddings of later texts alone; in context c those of the same context too."""
    method, batch = FedPCGenerated(prefix_world().task, reads=reads), rows_of()
    held = held_of(method)
    other = batch["y"].clone()
    other[4, :2] = (other[4, :2] + 7) % 60 + 3
    before = method.embedded(held, batch)["prefix"]
    after = method.embedded(held, {**batch, "y": other})["prefix"]
    assert torch.equal(before[:5], after[:5])
    assert ((before[5:] - after[5:]).abs().amax((1, 2)) > 1e-6).all()
    start = held["anybody"]["prefix"] * held["contexts"]["prefix"][batch["context"].long()]
    assert torch.equal(before[0], start[0])  # nothing was said before


@pytest.mark.parametrize("reads", READS)
def test_generators_have_the_slope_of_the_loss(reads: Reads) -> None:
    """Against finite differences, of everything that is shared."""
    task, batch = prefix_world().task, rows_of()
    method = FedPCGenerated(task, reads=reads)
    held = flatten(held_of(method))

    def loss(p: Params) -> Tensor:
        return task.loss_of_rows(method.embedded(unflatten(p), batch), batch)

    slope = method.slope(loss, held)
    for part in ("anybody/", "contexts/", "generators/user", "generators/context", "generators/first"):
        names = [name for name in held if name.startswith(part)]
        way = {name: drawn(held[name].numel(), seed=7).reshape(held[name].shape) for name in names}
        h = 1e-2 / float(norm(way))
        there, back = (float(loss({**held, **add_scaled({n: held[n] for n in names}, way, s * h)})) for s in (1, -1))
        expected = sum(float((slope[name] * way[name]).sum()) for name in names)
        assert (there - back) / (2 * h) == pytest.approx(expected, rel=0.05, abs=0.002 / h * 1e-2), part


def test_rows_with_parameters_of_their_own_have_the_mean_loss() -> None:
    from small_worlds import world

    for place in (world("mlp"), prefix_world()):
        rows = {name: column[:4] for name, column in place.population.columns.items()}
        batch = {**rows, "mask": torch.tensor([1.0, 1, 0, 1])}
        params = [place.task.fresh(seed) for seed in range(4)]
        each = {name: torch.stack([p[name] for p in params]) for name in params[0]}
        if place.name == "prefix":
            each["prefix"] = each["prefix"][:, 0]
        alone = [
            float(place.task.loss(p, {name: column[i : i + 1] for name, column in batch.items()})) * weight
            for i, (p, weight) in enumerate(zip(params, _weights(place.name, batch).tolist()))
        ]
        assert float(place.task.loss_of_rows(each, batch)) == pytest.approx(sum(alone), rel=1e-5)


def _weights(name: str, batch: Params) -> Tensor:
    """A row's share of a mean over rows, or over tokens."""
    many = batch["mask"] if name != "prefix" else batch["mask"] * (batch["y"] >= 0).sum(1)
    return many / many.sum()


def test_more_texts_make_a_steadier_embedding() -> None:
    """Of 64 users who say the same kind of things, embeddings from 32 texts differ less than those from 2.

    A mean over more words varies less; what the last text leaves does not.
    """
    block, first = block_of(), drawn(1, 1, WIDTH)
    spread: dict[tuple[Reads, int], float] = {}
    for reads in ("history", "utterance"):
        for texts in (2, 32):
            found = [
                generated(block, first, carried_after(
                    block, first, 1 + drawn(texts, LENGTH, WIDTH, seed=seed), torch.ones(texts, LENGTH), reads,
                    torch.zeros(texts),
                )) * (1 if reads == "utterance" else (texts + 1.349858808) / texts)
                for seed in range(64)
            ]  # fmt: skip
            spread[reads, texts] = float(torch.stack(found).var(0).mean())
    assert spread["history", 32] < spread["history", 2] / 4
    assert spread["utterance", 32] > spread["utterance", 2] / 2


def test_a_chunk_has_room_for_what_is_trained() -> None:
    place = prefix_world()
    many = FedPCGenerated(place.task, expand=3000)
    shared = count(many.init_server(place.task.init(0))["params"])
    chosen = choose(place.population, ClientWork(many, place.split.train), place.task.init(0), 7)
    assert chosen.chunk == TRAINED // (4 * COPIES * shared) == 5


# -- whole runs --------------------------------------------------------------------------------------------------------
def settings(folder: Path, **knobs: Any) -> dict[str, Any]:
    random = np.random.default_rng(1)
    rows = [
        {"who": who, "show": show, "line": " ".join(f"w{i}" for i in random.integers(0, 60, random.integers(4, 9)))}
        for who, show in (("anna", "x"), ("bert", "y"), ("carl", "x"), ("carl", "y"), ("dora", "y")) for _ in range(12)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(folder / "lines.csv", index=False)
    return {
        "data": {"table": str(folder / "lines.csv"), "client": "who", "text": "line", "context": "show", "length": 6},
        "model": {"name": "frozen", "pretrained": tiny_model(), "given": 1},
        "stage": [{"method": "fedpc-generated", "rounds": 1, "steps": 2, "batch_size": 4, "lr": 0.01, **knobs}],
        "engine": {"workers": 0},
    }


@pytest.mark.parametrize("reads", ["utterance", "history"])
def test_a_run_is_analyzed_exported_and_forgotten(tmp_path: Path, reads: Reads) -> None:
    path = tmp_path / "run"
    run_experiment(settings(tmp_path, reads=reads), path)
    told = bespoke("analyze", path, "--examples", "1,3,all", "--json")
    assert told.code == 0, told.err
    [record] = json.loads(told.out)["analyses"]
    means = [point["mean"] for point in record["points"]]
    assert len(set(means)) == 3
    assert means[-1] == pytest.approx(json.loads((path / "result.json").read_text())["query"], rel=1e-5)
    if reads != "history":
        return
    written = export_personal(path, "carl")
    assert written["parameters"] == 2 * WIDTH  # an embedding for each context; no generator
    assert load_personal(written["folder"]).outputs(np.array([[1, 5, 9]])).shape == (1, 3, 64)
    assert not list((path / "private").glob("*"))  # the texts apart, nothing is kept of a client
    assert forget_client(path, "carl")["traces_left"] == 0


def test_users_that_never_trained_read_their_own_texts(tmp_path: Path) -> None:
    config = settings(tmp_path, reads="history") | {"split": {"protocol": "cross-device", "held_out": [0.25, 0.25]}}
    run_experiment(config, tmp_path / "run")
    table = pd.read_parquet(tmp_path / "run" / "clients.parquet")
    assert len(table) == 1
    assert np.isfinite(table["query_perplexity"]).all()


def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    place = prefix_world()
    stage = Stage(FedPCGenerated(place.task, steps=2, batch_size=4, reads="history"), 3)
    experiment = Experiment("small", place.population, place.split, place.task, (stage,), "perplexity", cohort=5)

    def run(name: str, stop_after: int) -> Path:
        def after_round(stage: int, number: int) -> None:
            if number == stop_after:
                raise KeyboardInterrupt

        path = tmp_path / name
        folder = RunFolder.existing(path) if path.exists() else RunFolder.create(path, "")
        how = Choice(True, 64, 0, 1, "func", "")
        Run(experiment, folder, how=how, checkpoint_seconds=0.0, after_round=after_round).run()
        return path

    whole = run("whole", 0)
    with pytest.raises(KeyboardInterrupt):
        run("stopped", 2)
    assert not (tmp_path / "stopped" / "result.json").exists()
    assert_identical(contents(run("stopped", 0)), contents(whole), "stopped after round 2")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"name": "lstm", "embedding": 2, "hidden": 2, "layers": 1}, "LSTM has neither here; use .* 'frozen'"),
        ({"name": "lstm", "embedding": 90, "hidden": 90, "layers": 1}, "reads the words of a frozen language model"),
    ],
)
def test_a_model_without_words_is_refused(tmp_path: Path, model: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        run_experiment(settings(tmp_path) | {"model": model}, tmp_path / "run")


def test_a_model_that_is_too_large_to_be_generated_is_refused(tmp_path: Path) -> None:
    pd.DataFrame(
        {"who": list("abc") * 20, "x": [i * i % 17 / 7 for i in range(60)], "y": [i % 7 / 3 for i in range(60)]}
    ).to_csv(tmp_path / "t.csv", index=False)
    config = {
        "data": {"table": str(tmp_path / "t.csv"), "client": "who", "target": "y"},
        "model": {"name": "mlp", "hidden": [40, 60]},
        "stage": [{"method": "fedpc-generated", "rounds": 1}],
    }
    with pytest.raises(UserError, match=r"stage 0: fedpc-generated generates all 2,601 parameters .* at most 2,048"):
        run_experiment(config, tmp_path / "run")
