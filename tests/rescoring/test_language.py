"""Log-probabilities under a run's models, and which model serves whom."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bespoke as library
from bespoke.deploy.export import export_personal, load_personal
from bespoke.rescoring.language import RunLanguage
from bespoke.rescoring.nbest import Hypotheses
from bespoke.runs.folder import RunFolder
from bespoke.tensors import take
from command import bespoke, refused


@pytest.fixture(scope="module")
def language(run: Path) -> RunLanguage:
    return RunLanguage(run)


def spoken(language: RunLanguage, level: str, client: str, *texts: str, group: str | None = None) -> np.ndarray:
    return language.spoken(level, [Hypotheses("u", client, texts, (0.0,) * len(texts), group=group)])[0]


def test_a_log_probability_is_the_sum_of_task_scores_and_the_product_of_softmaxes(language: RunLanguage) -> None:
    """'cold  seas' is the row <bos> cold seas of the data, which predicts cold, seas and <eos>."""
    population, words = language.experiment.population, language.experiment.population.about["words"]
    names = ["<pad>", *words, "<unk>", "<bos>", "<eos>"]
    rows = [[names[token] for token in row if token] for row in population.columns["y"].tolist()]
    place = rows.index(["cold", "seas", "<eos>"])
    batch = {name: population.columns[name][place : place + 1] for name in ("x", "y")} | {"mask": torch.ones(1)}
    found = spoken(language, "personal", "Battle 1", " cold  seas", "cold ships sail over seas cold ships sail", "seas")
    personal, _ = language.models.personal(population.index("Battle 1"))
    scored = language.task.score(language.task.predict(personal, batch), batch)
    assert found[0] == pytest.approx(-float(scored["loss"]), abs=1e-5)
    assert float(scored["count"]) == 3
    chance = 1.0
    said = ["<bos>", "seas", "<eos>"]
    for at in (1, 2):  # one prefix at a time, in one row: what comes after a token cannot matter
        prefix = torch.tensor([[names.index(word) for word in said[:at]]])
        outputs = language.task.predict(personal, {"x": prefix})[0, -1]
        chance *= float(torch.softmax(outputs, -1)[names.index(said[at])])
    assert np.exp(found[2]) == pytest.approx(chance, rel=1e-4)
    assert found[1] < found[0]  # longer than any row of the data, and no error


def test_a_word_that_is_not_known_counts_as_unknown(language: RunLanguage) -> None:
    known, unknown, other = spoken(language, "global", "Film 1", "red apples", "red submarines", "red zeppelins")
    assert unknown == other < known


POSTS = "user,post\n" + "ann,red apples! apples fall.\nbob,red apples! apples fall.\n" * 4


@pytest.mark.parametrize(
    ("settings", "pieces"),
    [
        ({}, ["<bos>", "red", "apples", "!", "<unk>", "<eos>"]),
        ({"end": False, "lower": False}, ["<bos>", "<unk>", "apples", "!", "<unk>"]),
        ({"tokenizer": "characters"}, ["<bos>", *"red apples! ", "<unk>", "<unk>", "<eos>"]),
    ],
)
def test_texts_are_cut_as_the_data_of_the_run_are(tmp_path: Path, settings: dict[str, Any], pieces: list[str]) -> None:
    """Users' tables: as their settings say. In capitals 'RED' is known only where texts are lower-cased."""
    (tmp_path / "posts.csv").write_text(POSTS)
    data = {"table": str(tmp_path / "posts.csv"), "client": "user", "text": "post", **settings}
    library.run(
        {"data": data, "stage": [{"method": "fedavg", "rounds": 1}], "engine": {"workers": 0},
         "model": {"name": "lstm", "embedding": 2, "hidden": 2, "layers": 1}},
        tmp_path / "run",
    )  # fmt: skip
    language = RunLanguage(tmp_path / "run")
    words = language.experiment.population.about["words"]
    names = ["<pad>", *words, "<unk>", "<bos>", "<eos>"]
    assert [names[token] for token in language.tokens("RED  apples! Zz")] == pieces


def test_models_are_those_of_the_stages(train: Callable[[int], Path], run: Path, language: RunLanguage) -> None:
    """Trained alone, the first stage ends with the global model, the second with those of groups."""
    texts = ("red apples fall", "ships sail")
    first, second = RunLanguage(train(1)), RunLanguage(train(2))
    assert first.levels() == ["global"]
    assert second.levels() == ["global", "group"]
    assert language.levels() == ["global", "group", "personal"]
    fl = spoken(first, "personal", "Film 1", *texts)
    assert spoken(language, "global", "Film 1", *texts) == pytest.approx(fl)
    grouped = spoken(second, "personal", "Film 1", *texts)
    assert spoken(language, "group", "Film 1", *texts) == pytest.approx(grouped)
    checkpoint = RunFolder(run).beginning(2).server
    row = int(checkpoint["groups"][language.experiment.population.index("Film 1")])
    for name, leaf in take(checkpoint["params"], row).items():
        assert torch.equal(leaf, language.models.shared(row)[name])
    assert not np.allclose(fl, grouped)


def test_the_personal_model_is_the_exported_one(run: Path, language: RunLanguage, tmp_path: Path) -> None:
    export_personal(run, "Battle 2", tmp_path / "model")
    model = load_personal(tmp_path / "model")
    tokens = language.tokens("ships sail")
    logits = torch.log_softmax(model.outputs([tokens[:-1]])[0], -1)
    total = sum(float(logits[i, token]) for i, token in enumerate(tokens[1:]))
    assert spoken(language, "personal", "Battle 2", "ships sail")[0] == pytest.approx(total, abs=1e-5)


def test_clients_that_the_run_does_not_know(run: Path, language: RunLanguage) -> None:
    """They have the model of the group that their line names, or the global one, and it is said."""
    language.notes.clear()
    text = "red apples"
    assert spoken(language, "personal", "new", text, group="film") == spoken(language, "group", "Film 0", text)
    assert spoken(language, "personal", "new", text) == spoken(language, "global", "Film 0", text)
    assert spoken(language, "group", "new", text, group="music") == spoken(language, "global", "Film 0", text)
    assert "1 of 1 clients have no such model in the run (new); the group model is used" in language.notes[0]
    assert "the global model is used" in language.notes[1]


# -- the command -------------------------------------------------------------------------------------------------------
def line(**changes: object) -> str:
    hypotheses = [{"text": "read apples fall", "score": -1.0}, {"text": "red apples fall", "score": -1.1}]
    entry = {"id": "a", "client": "Film 1", "reference": "red apples fall", "hypotheses": hypotheses, **changes}
    return json.dumps({name: value for name, value in entry.items() if value is not None})


def test_the_command(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "nbest.jsonl"
    path.write_text("\n".join([line(split="validation", client=None), "", line(id=7, split="test")]))
    out = tmp_path / "out"
    done = bespoke("rescore", path, "--run", run, "--client", "Film 2", "--weight", "0.5", "--out", out, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert [system["name"] for system in told["systems"]] == [
        "no LM", "no LM, word bonus", "global", "group", "personal", "oracle",
    ]  # fmt: skip
    rates = [system["wer"] for system in told["systems"]]
    assert rates[0] == pytest.approx(1 / 3)
    assert rates[2:] == [0, 0, 0, 0]
    assert told["utterances"]["test_words"] == 3
    assert json.loads((out / "rescore.json").read_text())["systems"] == told["systems"]
    first, second = map(json.loads, (out / "chosen.jsonl").read_text().splitlines())
    assert (first["client"], second["client"], second["id"]) == ("Film 2", "Film 1", "7")
    assert second["chosen"]["personal"] == {"text": "red apples fall", "errors": 0}
    assert second["chosen"]["no LM"] == {"text": "read apples fall", "errors": 1}
    shown = bespoke("rescore", path, "--run", run, "--client", "x", "--model", "global", "--out", tmp_path / "more")
    assert shown.code == 0
    assert "33.3" in shown.out
    again = bespoke("rescore", path, "--run", run, "--client", "x", "--out", out)
    refused(again, "exists already")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["line 2", "no JSON"]),
        ("[1]", ["line 2", "not a JSON object", "hypotheses"]),
        (line(id=None), ["line 2", "'id' is missing"]),
        (line(client=None), ["line 2", "'client' is missing", "--client"]),
        (line(hypotheses=None), ["line 2", "'hypotheses' is missing"]),
        (line(hypotheses=[]), ["line 2", "one or more"]),
        (line(hypotheses=[{"score": 1}]), ["line 2, hypothesis 1", '"text"']),
        (line(hypotheses=[{"text": "a", "score": "high"}]), ["line 2, hypothesis 1", "finite number", '"high"']),
        (line(hypotheses=[{"text": "a"}]), ["hypothesis 1", "score = null"]),
        (line(hypotheses=[{"text": "a", "score": float("nan")}]), ["hypothesis 1", "NaN"]),
        (line(split="train"), ["line 2", "unknown split 'train'", "validation"]),
        (line(refrence="a"), ["line 2", "unknown field 'refrence'", "Did you mean 'reference'"]),
        (line(reference=3), ["line 2", "reference = 3", "a text"]),
        (line(id="first"), ["line 2", "'first'", "ids must differ"]),
    ],
)
def test_lines_that_are_refused(run: Path, tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "nbest.jsonl"
    path.write_text(f"{line(id='first')}\n{text}\n")
    refused(bespoke("rescore", path, "--run", run, "--out", tmp_path / "out"), str(path), *words)
    assert not (tmp_path / "out").exists()


def test_other_mistakes(run: Path, train: Callable[[int], Path], tmp_path: Path) -> None:
    path = tmp_path / "nbest.jsonl"
    refused(bespoke("rescore", path, "--run", run), "there is no file", str(path))
    path.write_text("\n")
    refused(bespoke("rescore", path, "--run", run), "holds no utterance")
    path.write_bytes(b"\xff")
    refused(bespoke("rescore", path, "--run", run), "not UTF-8")
    path.write_text(line(reference=None))
    out = ("--out", tmp_path / "out")
    refused(bespoke("rescore", path, "--run", run, "--weight", "tune", *out), "--weight tune", "reference")
    refused(bespoke("rescore", path, "--run", run, "--weight", "heavy", *out), "--weight heavy", "a number")
    refused(bespoke("rescore", path, "--run", run, "--weight", "-1", *out), "zero or more")
    refused(bespoke("rescore", path, "--run", run, "--model", "mine", *out), "unknown model 'mine'", "personal")
    refused(bespoke("rescore", path, "--run", train(1), "--model", "group", *out), "--model group", "it has global")
    refused(bespoke("rescore", path, "--run", tmp_path / "none", *out), "none")


def test_a_run_without_a_language_model(tmp_path: Path) -> None:
    stages, engine = [{"method": "fedavg", "rounds": 1}], {"workers": 0, "kind": "looped"}
    library.run({"data": {"source": "exam"}, "stage": stages, "engine": engine}, tmp_path / "run")
    (tmp_path / "nbest.jsonl").write_text(line())
    done = bespoke("rescore", tmp_path / "nbest.jsonl", "--run", tmp_path / "run", "--out", tmp_path / "out")
    refused(done, "no language model", "regression")


def test_without_jiwer_the_extra_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jiwer", None)
    (tmp_path / "nbest.jsonl").write_text(line())
    done = bespoke("rescore", tmp_path / "nbest.jsonl", "--run", run, "--out", tmp_path / "out")
    refused(done, "jiwer", "bespoke-fl[speech]")
