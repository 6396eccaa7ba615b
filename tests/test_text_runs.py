"""Runs on a user's texts: what is in their folders, what is said of them, and what becomes of them afterwards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

import bespoke
from bespoke.data.tables.checks import check
from bespoke.deploy.export import export_personal
from bespoke.deploy.forget import forget_client
from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.experiment.loading import load_population
from bespoke.experiment.prepare import prepare
from bespoke.study.references import constant
from command import bespoke as command
from command import refused

SMALL = {"name": "lstm", "embedding": 3, "hidden": 4, "layers": 1}
STAGES = [{"method": "fedavg", "rounds": 2}, {"method": "finetune", "epochs": 1, "lrs": [0.1]}]


@pytest.fixture
def posts(tmp_path: Path) -> Path:
    """Ten posts of each of four users in two groups; the last of each, which is tested on, says zebra twice."""
    path = tmp_path / "posts.jsonl"
    lines = []
    for user in range(4):
        for post in range(10):
            own = f"word{user}" if post % 2 else "other"
            text = "zebra zebra" if post == 9 else f"the cat {own} the {'dog' if user < 2 else 'fish'} ."
            lines.append({"user": f"user {user}", "post": text, "club": f"club {user // 2}", "place": f"p{user}"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def experiment(posts: Path, **data: Any) -> dict[str, Any]:
    described = {"table": str(posts), "client": "user", "text": "post", **data}
    return {"data": described, "split": {"order": "stored"}, "model": SMALL, "engine": {"workers": 0}, "stage": STAGES}


def everything_written(folder: Path) -> bytes:
    found = []
    for path in (path for path in sorted(folder.rglob("*")) if path.is_file()):
        found.append(path.read_bytes())
        if path.suffix == ".parquet":
            found.append(str(pyarrow.parquet.read_table(path).to_pylist()).encode())
    return b"\n".join(found)


def test_a_word_of_test_rows_is_nowhere_in_a_comparison(posts: Path, tmp_path: Path) -> None:
    settings = {"split": {"order": "stored"}, "model": SMALL, "engine": {"workers": 0}}
    bespoke.compare(
        posts, out=tmp_path / "c", client="user", text="post", group="club", context="place", seeds=1, rounds=2,
        tune=False, methods=["fedavg", "finetune", "group-fl"], settings=settings,
    )  # fmt: skip
    export_personal(tmp_path / "c" / "runs" / "finetune-seed0", "user 1")
    written = everything_written(tmp_path / "c")
    assert b"word1" in written  # of training rows, so the search works
    assert b"zebra" not in written
    found = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert [one["text"] for one in found["checks"]] == [
        "Client and place coincide, one place for each client: their effects cannot be separated."
    ]
    page = (tmp_path / "c" / "report.html").read_text()
    assert "Client and place coincide" in page


@pytest.mark.parametrize(
    ("places", "words"),
    [(["a", "a", "b"], "Every client has one place"), (["a", "b", "c"], "coincide"), (["a", "", ""], None)],
)
def test_contexts_of_one_each(tmp_path: Path, places: list[str], words: str | None) -> None:
    path = tmp_path / "t.csv"
    rows = [f"u{u},some text {n},{place}" for u, place in enumerate(places) for n in range(6)]
    extra = ["u1,one more,c", "u1,another,a"] if words is None else []
    path.write_text("\n".join(["user,post,place", *rows, *extra]) + "\n")
    config = checked(experiment(path, context="place"), "test")
    made = prepare(config, load_population(config))
    found = check(made.plain, made.split)
    assert [words in one.text for one in found] == [True] if words else found == []


def test_every_context_of_one_client(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("user,post,place\n" + "".join(f"u{n % 2},text {n},p{n % 4}\n" for n in range(16)))
    config = checked(experiment(path, context="place"), "test")
    made = prepare(config, load_population(config))
    assert ["Every place belongs to one client" in one.text for one in check(made.plain, made.split)] == [True]


def test_the_constant_prediction_is_the_unigram_model(posts: Path) -> None:
    made = build(checked(experiment(posts), "test"))
    rows, _ = made.split.train.of(made.split.train.clients)
    tokens = made.population.columns["y"].numpy()[rows]
    tokens = tokens[tokens > 0]
    params = constant(made)
    assert not params["head.weight"].any()
    log = params["head.bias"].double().numpy()
    words, total = made.population.about["words"], len(tokens) + 0.5 * (made.population.about["vocabulary"] - 1)
    for word in ("the", "fish"):
        token = words.index(word) + 1
        assert log[token] == pytest.approx(math.log(((tokens == token).sum() + 0.5) / total), abs=1e-5)
    assert np.exp(log).sum() == pytest.approx(1.0, abs=1e-5)


def test_a_forgotten_client_does_not_change_what_tokens_mean(posts: Path, tmp_path: Path) -> None:
    """The words of a user stay in the vocabulary with which the model was begun; a run anew has them not."""
    config = experiment(posts)
    first = bespoke.run(config, tmp_path / "run")
    words = json.loads((tmp_path / "run" / "words.json").read_text())["words"]
    assert "word3" in words
    receipt = forget_client(tmp_path / "run", "user 3")
    assert any("vocabulary" in text for text in receipt["remains"])
    result = tmp_path / "run" / "result.json"
    result.unlink()  # as if it had been interrupted before its end
    again = bespoke.run(config, tmp_path / "run")
    assert again["clients"] == first["clients"] - 1
    assert json.loads((tmp_path / "run" / "words.json").read_text())["words"] == words
    others = posts.with_name("others.jsonl")
    others.write_text("".join(line + "\n" for line in posts.read_text().splitlines() if "user 3" not in line))
    anew = checked(experiment(others), "test")
    assert "word3" not in prepare(anew, load_population(anew)).population.about["words"]


def test_a_damaged_vocabulary_is_refused(posts: Path, tmp_path: Path) -> None:
    bespoke.run(experiment(posts), tmp_path / "run")
    path = tmp_path / "run" / "words.json"
    path.write_text(path.read_text().replace("the", "teh"))
    with pytest.raises(bespoke.UserError, match=r"words\.json is damaged"):
        export_personal(tmp_path / "run", "user 1")


def test_an_exported_model_says_the_next_word(posts: Path, tmp_path: Path) -> None:
    """Texts are tokenized as the data were; the answer is that of the parameters, computed here by torch's own LSTM."""
    import torch
    from safetensors.torch import load_file

    bespoke.run(experiment(posts), tmp_path / "run")
    written = export_personal(tmp_path / "run", "user 1")
    model = bespoke.load_personal(written["folder"])
    weights = load_file(Path(written["folder"]) / "model.safetensors")
    words = json.loads((Path(written["folder"]) / "model.json").read_text())["words"]
    names = ["<pad>", *words, "<unk>", "<bos>", "<eos>"]
    lstm = torch.nn.LSTM(3, 4, batch_first=True)
    body = {name.split("lstm.")[-1]: w for name, w in weights.items() if "_l0" in name}
    lstm.load_state_dict({name.split(".")[-1]: w for name, w in body.items()})
    tokens = [names.index("<bos>"), names.index("the"), names.index("cat"), names.index("<unk>")]
    embedding = next(w for name, w in weights.items() if "embedding" in name)
    state = lstm(embedding[tokens][None])[0][0, -1]
    expected = names[int((weights["head.weight"] @ state + weights["head.bias"]).argmax())]
    assert model.predict(["The  CAT unheard"]).tolist() == [expected]


BAD = [
    ("--client user", "or --text COLUMN to model texts"),
    ("--client user --text pots", "unknown column 'pots'"),
    ("--client user --text post --features club", "need a target"),
    ("--client user --target club --tokenizer words", "name their column as text"),
    ("--client user --text post --tokenizer nowhere", "or the folder of a Hugging Face tokenizer"),
    ("--client post --text post", "cannot be client"),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_bad_options(posts: Path, tmp_path: Path, options: str, words: str) -> None:
    refused(command("compare", posts, *options.split(), "--out", tmp_path / "out"), words)


def test_defaults_of_a_language_model(posts: Path) -> None:
    """Small model, few rounds, perplexity; groups are trained where they are named, and what was said is kept."""
    from bespoke.study.defaults import settle

    config = checked(experiment(posts, group="club"), "test")
    made = prepare(config, load_population(config))
    found = settle({"data": {"group": "club"}}, (), made.plain, made.split)
    assert found.methods == ("fedavg", "local", "finetune", "group-fl", "group-perfl")
    assert found.base["metric"] == "perplexity"
    assert found.base["model"]["name"] == "lstm"
    assert found.rounds == 30
    said = settle({"data": {}, "metric": "accuracy", "model": SMALL}, ("fedavg",), made.plain, made.split)
    assert (said.base["metric"], said.base["model"], said.methods) == ("accuracy", SMALL, ("fedavg",))


def test_a_client_without_validation_rows(tmp_path: Path) -> None:
    """A user of two posts trains on one and is tested on the other."""
    path = tmp_path / "t.csv"
    path.write_text("user,post\n" + "".join(f"u{n % 2},text {n % 3}\n" for n in range(16)) + "u2,text 1\nu2,text 2\n")
    assert bespoke.run({**experiment(path), "metric": "perplexity"}, tmp_path / "run")["clients"] == 3
