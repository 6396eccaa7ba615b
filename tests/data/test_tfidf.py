"""Texts as features of a target: TF-IDF against scikit-learn, from training rows alone, also after export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import Ridge

from bespoke import load_personal
from bespoke.data.population import Population
from bespoke.data.splits import cross_silo
from bespoke.data.tables.schema import Schema
from bespoke.data.texts.tokenizers import tokenizer_of
from bespoke.deploy.export import export_personal
from bespoke.errors import UserError
from bespoke.experiment.build import build, to_toml
from bespoke.experiment.checks import checked
from bespoke.experiment.loading import load_population
from bespoke.experiment.prepare import prepare
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.study.defaults import settle
from bespoke.study.references import reference

WORDS = ["good", "bad", "tea", "rain", "sun", "dog", "cat", "the", "a", "and", "slow", "fast"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten users whose stars follow their words; each has a word of its own, which only its last rows have."""
    rng, rows = np.random.default_rng(5), []
    for user in range(10):
        for number in range(30):
            said = rng.choice(WORDS, rng.integers(0, 9)).tolist() + ([f"only{user}"] if number == 29 else [])
            stars = 3 + said.count("good") - 1.5 * said.count("bad") + 0.1 * user + rng.normal(0, 0.2)
            rows.append((f"u{user}", " ".join(said).capitalize() + "!" * (number % 2), round(stars, 3), number % 7))
    path = tmp_path_factory.mktemp("posts") / "posts.csv"
    pd.DataFrame(rows, columns=["user", "text", "stars", "hour"]).to_csv(path, index=False)
    return path


def described(table: Path, **more: object) -> dict[str, object]:
    return {"table": str(table), "client": "user", "target": "stars", "text": "text", **more}


def config(table: Path, **more: object) -> Any:
    stage = [{"method": "shared", "rounds": "auto"}]
    return checked({"seed": 3, "data": described(table, **more), "stage": stage}, "here")


def cut(text: str) -> list[str]:
    return [word for word, _ in tokenizer_of("words").pieces(text)]


def test_the_features_are_scikit_learns_by_training_rows_alone(table: Path) -> None:
    raw = load_population(config(table))
    prepared = prepare(config(table), raw)
    population, split = prepared.population, prepared.split
    rows, _ = split.train.of(split.train.clients)
    surface = np.array(["", *raw.about["pieces"]], dtype=object)
    said = [" ".join(words[words != ""]) for words in surface[raw.columns["pieces"].numpy()]]
    oracle = TfidfVectorizer(tokenizer=cut, token_pattern=None, sublinear_tf=True, min_df=2)
    oracle.fit([said[row] for row in rows])
    about = population.about
    mine = [place for place, name in enumerate(about["features"]) if name.startswith("text: ")]
    assert about["features"][0] == "hour"
    order = [oracle.vocabulary_[about["features"][place].removeprefix("text: ")] for place in mine]
    assert sorted(order) == list(range(len(oracle.vocabulary_)))  # the same words, no "only3" among them
    found = population.columns["x"].numpy()[:, mine]
    assert found == pytest.approx(oracle.transform(said).toarray()[:, order], abs=1e-6)
    assert not any(about["numeric"][place] for place in mine)  # norms of rows stay one
    fewer = prepare(config(table, vocabulary=4), load_population(config(table, vocabulary=4))).population
    assert sum(name.startswith("text: ") for name in fewer.about["features"]) == 4


def test_the_pooled_reference_is_about_scikit_learns_ridge(table: Path) -> None:
    experiment = build(config(table))
    x, y = (experiment.population.columns[name].numpy() for name in "xy")
    split = experiment.split
    train, test = (part.of(part.clients)[0] for part in (split.train, split.test.query))
    params = reference("pooled", experiment)
    outputs = experiment.task.predict(params, {"x": torch.from_numpy(x[test])})[:, 0].numpy()
    ridge = [Ridge(alpha).fit(x[train], y[train]).predict(x[test]) for alpha in (0.1, 1.0, 10.0)]
    error, best = np.mean((outputs - y[test]) ** 2), min(np.mean((found - y[test]) ** 2) for found in ridge)
    assert best * 0.95 < error < best * 1.1
    assert error < 0.5 * y[test].var()


def test_an_exported_model_reads_texts_as_training_did(table: Path, tmp_path: Path) -> None:
    stages = [{"method": "shared", "rounds": "auto"}, {"method": "finetune", "solver": "exact"}]
    made = checked({"seed": 3, "data": described(table), "stage": stages}, "here")
    experiment = build(made)
    Run(experiment, RunFolder.create(tmp_path / "run", to_toml(made))).run()
    population, frame = experiment.population, pd.read_csv(table)
    export_personal(tmp_path / "run", "u3", tmp_path / "model")
    model = load_personal(tmp_path / "model")
    mine = frame[frame["user"] == "u3"]
    begin, end = population.offsets[3], population.offsets[4]
    x = population.columns["x"][begin:end]
    centre, unit = population.about["centre"], population.about["unit"]
    wanted = model.method.predict(model.params, {"x": x})[..., 0].numpy() * unit + centre
    found = model.predict(mine[["hour"]].to_numpy(), mine["text"].tolist())
    assert found == pytest.approx(wanted, abs=1e-4)
    assert json.loads((tmp_path / "model" / "model.json").read_text())["tfidf"]["column"] == "text"
    with pytest.raises(UserError, match="hour"):
        model.predict(None, ["good tea"])


def test_many_words_have_fewer_pulls_to_try() -> None:
    about = {"task": "classification", "classes": ["a", "b", "c"], "features": [f"text: {i}" for i in range(300)]}
    x, y = np.zeros((40, 300), np.float32), np.arange(40) % 3
    made = Population.build({"x": x, "y": y}, np.repeat(["u", "v"], 20), about={**about, "name": "posts"})
    wide = settle({}, (), made, cross_silo(made)).knobs["local"]
    assert len(wide["pulls"]) * len(wide["intercepts"]) == 12
    few = replace(made, columns={"x": made.columns["x"][:, :3], "y": made.columns["y"]},
                  about={**made.about, "features": ["a", "b", "c"]})  # fmt: skip
    assert len(settle({}, (), few, cross_silo(few)).knobs["local"]["pulls"]) == 6
    assert settle({}, (), few, cross_silo(few)).knobs["local"]["intercepts"] == [0.1, 1.0, 10.0, 100.0]


def test_words_may_be_declared(table: Path, tmp_path: Path) -> None:
    declared = {"columns": {"text": {"kind": "text", "words": {"good": 2.0, "bad": 1.0}}}, "target": {"name": "stars"}}
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(declared))
    made = prepare(config(table, schema=str(path)), load_population(config(table, schema=str(path)))).population
    assert made.about["features"] == ["text: good", "text: bad"]
    x = made.columns["x"].numpy()
    assert np.unique(np.linalg.norm(x, axis=1).round(5)).tolist() == [0.0, 1.0]
    assert Schema.of(Schema.of(declared, "here").to_json(), "here") == Schema.of(declared, "here")
    for words in ({}, {"good": 0}, {"good": "x"}):
        declared["columns"]["text"]["words"] = words  # type: ignore[index]
        with pytest.raises(UserError, match="words"):
            Schema.of(declared, "here")


def test_bad_input(table: Path) -> None:
    with pytest.raises(UserError, match="shortest are for predicting the next word"):
        config(table, shortest=3)
    with pytest.raises(UserError, match=r"'hour'.*no texts"):
        load_population(config(table, text="hour"))
    with pytest.raises(UserError, match="cannot be client, target"):
        load_population(config(table, text="user"))
