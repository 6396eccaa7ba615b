"""TV scripts under a frozen language model: its own tokens, known and withheld characters, 1, 5 and all lines."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import bespoke as library
from bespoke.analysis.analyze import Analyses, Wanted
from bespoke.data.sources.tv import MAIN
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.experiment.loading import load_population
from bespoke.statistics.analyses import in_words, read_analyses
from command import bespoke

pytest.importorskip("transformers")


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every character has sixteen lines of four or five tokens that the tiny model knows, w0 to w60."""
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path))
    (tmp_path / "tv").mkdir()
    lines = [[f"w{place} w{n} w3 w4" + " w5" * (n % 2), str(1 + n % 2)] for place in range(19) for n in range(16)]
    names = [*MAIN, *(f"{letter} stark" for letter in "abcdefghijklm")]
    tables = {"friends": [["text", "speaker", "season"]], "game_of_thrones": [["Sentence", "Name", "Season"]]}
    for row, (text, season) in enumerate(lines):
        show = "friends" if row // 16 < len(MAIN) else "game_of_thrones"
        tables[show].append([text, names[row // 16], season])
    for show, table in tables.items():
        with gzip.open(tmp_path / "tv" / f"{show}.csv.gz", "wt", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(table)
    return tmp_path


def experiment(options: dict[str, Any] | None = None, **split: Any) -> dict[str, Any]:
    from small_language import tiny_model

    return {
        "data": {"source": "tv", "options": options or {}}, "split": split, "metric": "perplexity",
        "model": {"name": "frozen", "pretrained": tiny_model()},
        "stage": [{"method": "fedpc", "rounds": 1, "lr": 0.01, "steps": 2, "tune_steps": 2, "batch_size": 4}],
    }  # fmt: skip


def test_a_pretrained_model_reads_its_own_tokens(scripts: Path) -> None:
    config = checked(experiment({"contexts": "season"}), "test")
    built = build(config)
    population = built.population
    row = int(population.offsets[population.index("Ross Geller")])  # w1 w0 w3 w4: wi is the token i + 3, <s> is 1
    assert population.columns["x"][row].tolist() == [1, 4, 3, 6, 7]
    assert population.columns["y"][row].tolist() == [4, 3, 6, 7, -1]
    assert population.columns["y"][row + 1].tolist() == [4, 4, 6, 7, 8]  # no end, unless it is asked for
    assert built.task.contexts == len(population.about["contexts"]) == 4
    ended = build(checked(experiment({"end": True}), "test")).population
    assert ended.columns["y"][row].tolist() == [4, 3, 6, 7, 2, -1]
    with pytest.raises(UserError, match=r"texts of tv are cut into words, and the model .* reads tokens of its own"):
        build(checked(experiment({"tokenizer": "words"}), "test"))


def test_a_source_without_texts_is_loaded_as_ever(scripts: Path) -> None:
    config = {**experiment(), "data": {"source": "synthetic", "options": {"clients": 3}}}
    assert len(load_population(checked(config, "test"))) == 3


@pytest.mark.parametrize("frozen", [False, True])
def test_contexts_of_a_table_arrive(tmp_path: Path, frozen: bool) -> None:
    """A table with user, context and text: every training row keeps its context, whichever model reads it."""
    rows = [[f"u{n % 4}", ("home", "work", "away")[n % 3], f"w{n % 3} w{n % 4} w{n}"] for n in range(48)]
    with open(tmp_path / "posts.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["who", "where", "post"], *rows])
    table = {"table": str(tmp_path / "posts.csv"), "client": "who", "text": "post", "context": "where"}
    model = experiment()["model"] if frozen else {"name": "lstm", "embedding": 2, "hidden": 2, "layers": 1}
    built = build(checked({**experiment(), "data": table, "model": model}, "test"))
    names, population = built.population.about["contexts"], built.population
    assert names == ["away", "home", "work"]
    assert built.task.contexts == (3 if frozen else 1)
    owners = [population.ids[c] for c in range(4) for _ in range(int(population.sizes()[c]))]
    found = sorted(zip(owners, (names[code] for code in population.columns["context"].tolist())))
    assert found == sorted((user, place) for user, place, _ in rows)
    assert "context" in built.split.train.fetch(built.split.train.clients, ["context"])[0]


@pytest.mark.parametrize(("protocol", "tested", "support"), [("cross-silo", 19, 9), ("cross-device", 3, 8)])
def test_so_many_lines_to_adapt_on(scripts: Path, protocol: str, tested: int, support: int) -> None:
    """Of sixteen lines 60 % are nine to train on, and adapt on; withheld characters adapt on half of theirs."""
    path = scripts / "run"
    library.run(experiment(protocol=protocol), path)
    done = bespoke("analyze", path, "--examples", "1,5,all", "--json")
    assert done.code == 0, done.err
    [record] = json.loads(done.out)["analyses"]
    assert record["clients"] == tested
    assert [point["examples"] for point in record["points"]] == [1, 5, support]
    means = [point["mean"] for point in record["points"]]
    assert means[2] == pytest.approx(json.loads((path / "result.json").read_text())["query"], rel=1e-5)
    assert len(set(means)) == 3


def test_own_models_are_held_against_others(scripts: Path) -> None:
    """Perplexities by the library's own model: prefix, begin token and line, of which the first three are given."""
    import numpy as np
    import pandas as pd
    import torch
    from transformers import AutoModelForCausalLM

    from bespoke.runs.finished import Models, open_run

    path = scripts / "run"
    library.run(experiment({"contexts": "season"}), path)
    [record] = Analyses.of([path], Wanted(crossed=True)).run()
    table = pd.read_parquet(path / "analysis" / "crossed.parquet").set_index("client")
    assert list(record["columns"]) == list(table) == ["own", "other", "stranger", "anybody", "wrong", "foreign", "none"]
    recorded = pd.read_parquet(path / "clients.parquet").set_index("client")["query_perplexity"]
    assert table["own"].to_numpy() == pytest.approx(recorded[table.index].to_numpy(), rel=1e-5)

    folder, config = open_run(path)
    built = build(config, folder=path)
    models, population = Models(folder, built), built.population
    network = AutoModelForCausalLM.from_pretrained(config.model.pretrained)
    words = network.get_input_embeddings()

    def perplexity(client: str, prefix: Any) -> float:
        losses = []
        for row in built.split.test.query.of(np.array([population.index(client)]))[0]:
            x, y, context = (population.columns[name][int(row)].long() for name in ("x", "y", "context"))
            with torch.no_grad():
                before = prefix(int(context))
                logits = network(inputs_embeds=torch.cat([before, words(x)])[None]).logits[0, len(before) :]
            scored = [place for place in range(3, len(y)) if y[place] >= 0]
            losses += torch.nn.functional.cross_entropy(logits[scored], y[scored], reduction="none").tolist()
        return float(np.exp(np.mean(losses)))

    own = {name: models.personal(population.index(name))[0]["prefix"] for name in population.ids}
    one, friends = "Joey Tribbiani", [name for name in population.ids if name in MAIN]
    assert table.loc[one, "none"] == pytest.approx(perplexity(one, lambda c: torch.zeros(0, words.weight.shape[1])))
    assert table.loc[one, "wrong"] == pytest.approx(perplexity(one, lambda c: own[one][1 - c]), rel=1e-5)
    foreign = [perplexity(one, lambda c, other=other: own[one][other]) for other in (2, 3)]
    assert table.loc[one, "foreign"] == pytest.approx(np.mean(foreign), rel=1e-5)
    after = friends[friends.index(one) + 1 :] + friends[: friends.index(one)]
    others = [perplexity(one, lambda c, who=who: own[who][c]) for who in (after[0], after[2], after[4])]
    assert table.loc[one, "other"] == pytest.approx(np.mean(others), rel=1e-5)
    difference = (table["other"] - table["own"]).mean()
    assert record["columns"]["other"]["difference"] == pytest.approx(difference, rel=1e-5)
    assert record["columns"]["other"]["low"] < difference < record["columns"]["other"]["high"]
    assert "Under no prefix: " in " ".join(in_words(read_analyses([path])[0]))
