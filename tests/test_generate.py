"""Texts written by users in contexts: against the library's own decoding, in batches, by name, and of any method."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import bespoke as library
from bespoke import pretrained
from bespoke.deploy.export import export_personal
from bespoke.deploy.forget import forget_client
from bespoke.errors import UserError
from bespoke.experiment.build import to_toml
from bespoke.experiment.checks import checked
from bespoke.generation.generate import Drawing, Line, finished, write
from bespoke.generation.voices import Voice, Voices
from bespoke.runs.folder import RunFolder
from command import bespoke, refused
from small_language import WIDTH, tiny_model
from test_fedpc import settings

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of fedpc in which anna speaks in x, bert and dora in y, carl in both."""
    place = tmp_path_factory.mktemp("generate")
    library.run(settings(place), place / "run")
    return place / "run"


@pytest.fixture(scope="module")
def voices(folder: Path) -> Voices:
    return Voices(folder)


def of_method(folder: Path, method: str, **knobs: Any) -> Path:
    """A run of another method on the same texts."""
    path = folder.parent / method
    if not path.exists():
        stage = {"method": method, "rounds": 1, **knobs}
        library.run({**settings(folder.parent), "stage": [stage]}, path)
    return path


def test_without_chance_it_is_the_librarys_greedy_search(voices: Voices) -> None:
    """transformers' own generate, given the user's embedding from the exported file, writes the same tokens."""
    written = export_personal(voices.path, "carl")
    table = library.load_personal(written["folder"]).params["prefix"]
    prompt = voices.tokens("w2 w6 w1")
    assert prompt == [1, 5, 9, 4]
    model = pretrained.language_model(tiny_model())
    words = model.get_input_embeddings().weight[torch.tensor([prompt])]
    for place, context in enumerate(("x", "y")):
        embeds = torch.cat([table[place : place + 1], words], 1)
        mask = torch.ones(embeds.shape[:2], dtype=torch.long)
        theirs = model.generate(
            inputs_embeds=embeds, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0,
            eos_token_id=[1, 2],
        )[0].tolist()  # fmt: skip
        theirs = theirs[:-1] if theirs[-1] in (1, 2) else theirs
        line = Line(voices.of_user("carl", context), "w2 w6 w1")
        [record] = finished([line], write(voices, [line], Drawing(0), 9, 0))
        expected = pretrained.tokenizer(tiny_model()).decode(theirs)
        assert record["text"].split() == expected.split()
        assert record["tokens"] == len(theirs)


def test_a_text_depends_neither_on_its_neighbours_nor_on_the_cache(voices: Voices) -> None:
    """Side by side, alone, and read anew for every token by the method itself: the same letters."""
    some = [voices.of_user("anna", "x"), voices.of_user("anna", "y"), voices.anybody("x"), voices.plain()]
    lines = [Line(voice, prompt, number) for voice in some for prompt in ("w1", "w2 w3 w4") for number in (0, 1)]
    how = Drawing(1.5, top_k=20, top_p=0.9)
    together = finished(lines, write(voices, lines, how, 8, 7))
    assert [finished([line], write(voices, [line], how, 8, 7))[0] for line in lines] == together

    class Slow(Voice):
        prefix = None

    slow = [Line(Slow(**vars(line.voice)), line.prompt, line.number) for line in lines]
    assert finished(slow, write(voices, slow, how, 8, 7)) == together
    assert len({record["text"] for record in together}) > len(together) // 2
    other = finished(lines, write(voices, lines, how, 8, 8))
    assert [r["text"] for r in other] != [r["text"] for r in together]


def test_draws_have_the_shares_of_the_softmax() -> None:
    """Logits are logs of 1, 2, 3, 4: at temperature 1/2 shares are 1, 4, 9, 16 of 30; 2 likeliest: 9 and 16 of 25."""
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0]).log().expand(3000, -1)
    chances = [torch.Generator().manual_seed(i) for i in range(len(logits))]
    for how, expected in (
        (Drawing(0.5), [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        (Drawing(0.5, top_k=2), [0, 0, 9 / 25, 16 / 25]),
        (Drawing(1.0, top_p=0.6), [0, 0, 3 / 7, 4 / 7]),
        (Drawing(0), [0, 0, 0, 1]),
    ):
        shares = how.draw(logits, chances).bincount(minlength=4) / len(logits)
        torch.testing.assert_close(shares, torch.tensor(expected, dtype=torch.float32), atol=0.035, rtol=0)


def test_the_perplexity_of_a_sentence_is_that_of_its_tokens(voices: Voices) -> None:
    """By transformers' own loss, without a prefix."""
    tokens = voices.tokens("w5 w6 w7 w8")
    ids = torch.tensor([tokens])
    loss = pretrained.language_model(tiny_model())(input_ids=ids, labels=ids).loss
    assert voices.plain().perplexity(tokens) == pytest.approx(math.exp(float(loss)), rel=1e-4)
    assert voices.of_user("anna", "x").perplexity(tokens) != pytest.approx(math.exp(float(loss)), rel=1e-6)


def test_the_command_writes_side_by_side(folder: Path) -> None:
    common = ["generate", folder, "--user", "ANN", "--user", "bert", "--context", "X", "w1 w2", "w3", "--length", 5]
    told = bespoke(*common, "--number", 2)
    assert told.code == 0, told.err
    assert told.out.count("anna, x") == told.out.count("bert, x") == 2
    assert told.out.count("\n    w1 w2") == 4
    found = json.loads(bespoke(*common, "--number", 2, "--plain", "--json").out)
    assert [(t["user"], t["voice"], t["prompt"]) for t in found["texts"][:6:2]] == [
        ("anna", "user", "w1 w2"), ("bert", "user", "w1 w2"), (None, "plain", "w1 w2")
    ]  # fmt: skip
    assert all(f"    {t['prompt']}{t['text']}".rstrip() in told.out for t in found["texts"] if t["voice"] == "user")
    records = library.generate(folder, ["w1 w2"], users=["anna"], contexts=["x"], length=5)
    assert records == [found["texts"][0]]


def test_without_a_context_a_user_speaks_in_its_own(folder: Path) -> None:
    records = library.generate(folder, ["w1"], users=["anna", "bert", "dora"], length=2)
    assert [record["context"] for record in records] == ["x", "y", "y"]
    assert library.generate(folder, length=2)[0]["voice"] == "anybody"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--user", "ana"], ["unknown user 'ana'", "Did you mean 'anna'?", "bert"]),
        (["--user", "a"], ["'anna', 'carl', 'dora'", "write more of the name"]),
        (["--context", "z"], ["unknown context 'z'", "x, y"]),
        (["--temperature", "-1"], ["temperature = -1.0"]),
        (["--top-p", "0"], ["top-p = 0.0"]),
        (["--top-k", "-2"], ["top-k = -2"]),
        (["--length", "90"], ["90 more are to be written", "64 positions"]),
        (["--method", "fedpc"], ["--method fedpc", "leave --method out"]),
    ],
)
def test_bad_input_is_told_in_words(folder: Path, arguments: list[str], words: list[str]) -> None:
    refused(bespoke("generate", folder, "w1", *arguments), *words)


def test_only_runs_of_language_models_write(tmp_path: Path) -> None:
    experiment = {"data": {"source": "synthetic"}, "stage": [{"method": "fedavg", "rounds": 1}]}
    RunFolder.create(tmp_path / "run", to_toml(checked(experiment, "test")))
    refused(bespoke("generate", tmp_path / "run", "Hello"), "has no pretrained language model", "frozen")
    refused(bespoke("generate", tmp_path / "none", "Hello"), "there is no run folder")


@pytest.mark.parametrize(
    ("method", "knobs"),
    [("fedpc-frozen", {"steps": 2}), ("shared-prefix", {"steps": 2}), ("fedavg", {"lr": 0.1}), ("ditto", {"lr": 0.1})],
)
def test_any_method_on_the_prefix_writes(folder: Path, method: str, knobs: dict[str, Any]) -> None:
    path = of_method(folder, method, **knobs)
    opened = Voices(path)
    voice = opened.of_user("carl")
    assert voice.prefix is not None
    assert voice.prefix.shape == (1, WIDTH)
    told = bespoke("generate", path, "w1", "--user", "carl", "--context", "y", "--length", 3)
    assert told.code == 0
    assert ("one prefix for all contexts" in told.err) == (method != "fedpc-frozen")


@pytest.mark.parametrize(
    ("method", "knobs"), [("fedpc-split", {"steps": 2}), ("fedpc-meta", {"steps": 2}), ("knn-per", {"k": 2})]
)
def test_models_that_are_more_than_a_prefix_write_too(folder: Path, method: str, knobs: dict[str, Any]) -> None:
    path = folder.parent / method
    stage = {"method": method, **({} if method == "knn-per" else {"rounds": 1}), **knobs}
    before = [{"method": "fedavg", "rounds": 1, "lr": 0.1}] if method == "knn-per" else []
    library.run({**settings(folder.parent), "stage": [*before, stage]}, path)
    opened = Voices(path)
    voice = opened.of_user("carl", "y")
    assert voice.prefix is None
    lines = [Line(one, "w1 w2") for one in (voice, opened.anybody("y"), opened.plain())]
    own, _, plain = finished(lines, write(opened, lines, Drawing(0), 5, 0))
    likeliest = int(opened.models.method.predict(voice.personal, {
        "x": torch.tensor([[1, 4, 5]]), "context": torch.tensor([1]), "mask": torch.ones(1)
    })[0, -1].argmax())  # fmt: skip
    assert own["text"].split()[:1] == pretrained.tokenizer(tiny_model()).decode([likeliest]).split()
    ids = torch.tensor([[1, 4, 5]])
    theirs = pretrained.language_model(tiny_model()).generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert pretrained.tokenizer(tiny_model()).decode(theirs[0, 3:].tolist()).split()[:5] == plain["text"].split()


def test_who_was_forgotten_does_not_speak(folder: Path) -> None:
    path = of_method(folder, "fedpc", steps=2, tune_steps=1)
    forget_client(path, "dora")
    message = refused(bespoke("generate", path, "w1", "--user", "dora"), "unknown user 'dora'")
    assert "anna" in message
    with pytest.raises(UserError, match="unknown user"):
        library.generate(path, ["w1"], users=["dora"])


def test_a_comparison_folder_names_its_methods(folder: Path, tmp_path: Path) -> None:
    base = {name: value for name, value in settings(tmp_path).items() if name != "stage"}
    from bespoke.study.comparison import Comparison

    Comparison(base, tmp_path / "compared", ("fedpc-frozen", "shared-prefix"), (0,), 1, False, jobs=1).run()
    refused(bespoke("generate", tmp_path / "compared", "w1"), "choose with --method", "fedpc-frozen")
    refused(bespoke("generate", tmp_path / "compared", "w1", "--method", "fedpc"), "Did you mean 'fedpc-frozen'?")
    told = bespoke("generate", tmp_path / "compared", "w1", "--method", "shared-prefix", "--length", 2, "--json")
    assert json.loads(told.out)["method"] == "shared-prefix"


def test_under_privacy_no_user_is_named(folder: Path, tmp_path: Path) -> None:
    private = {**settings(tmp_path), "privacy": {"epsilon": 8.0, "delta": 0.01, "public_schema": True}}
    library.run(private, tmp_path / "run")
    names = set(pd.read_csv(tmp_path / "lines.csv")["who"])
    message = refused(bespoke("generate", tmp_path / "run", "w1", "--user", "ann"), "no user 'ann'", "--name-clients")
    assert not any(name in message for name in names)
    assert bespoke("generate", tmp_path / "run", "w1", "--user", "anna", "--length", 2).code == 0
    assert bespoke("generate", tmp_path / "run", "w1", "--user", "ann", "--length", 2, "--name-clients").code == 0


def test_table_4_is_a_page_of_all_texts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two users in two contexts and the frozen model, twice each, for two prompts: ten rows of three cells."""
    from benchmarks.fedpc import examples

    page, prompts = tmp_path / "page.md", ["--prompt", "w1 w2", "--prompt", "w3 | <b>"]
    users = ["--user", "anna", "--user", "bert", "--number", "2", "--length", "4"]
    monkeypatch.setattr(sys, "argv", ["examples", str(folder), *users, *prompts, "--output", str(page)])
    examples.main()
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 10
    assert {row.count("|") for row in rows} == {4}
    assert "<b>" not in page.read_text()
    how = {"length": 4, "top_p": 0.95}
    [record] = library.generate(folder, ["w1 w2"], users=["bert"], contexts=["x"], **how)
    shown = " ".join(record["text"].replace("<", "&lt;").replace(">", "&gt;").split())
    assert [row.split(" | ")[1] for row in rows if row.startswith("| bert, x")] == [shown]
