"""Sentiment140 by user: small files of the published layout, made here, and other layouts; vectors that stay put."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bespoke.api import run
from bespoke.data.sources.formats.vectors import frozen
from bespoke.data.sources.registry import load_source
from bespoke.deploy.export import export_personal, load_personal
from bespoke.errors import UserError
from bespoke.models import build_task
from bespoke.models.word_vectors import SentimentLSTM
from bespoke.study.comparison import Comparison


def tweet(user: str, text: str, polarity: str = "4", date: str = "Mon Apr 06 22:19:45 PDT 2009") -> str:
    return f'"{polarity}","1467810369","{date}","NO_QUERY","{user}","{text}"'


TWEETS = [
    tweet("bob", "I love it!", date="Tue Apr 07 00:00:01 PDT 2009"),
    tweet("ann", "@bob Don't go, caf\u00e9 is  sad", "0"),
    tweet("ann", "love LOVE love"),
    tweet("bob", "so sad...", "0"),
    tweet("eve", "love", "0"),
]
VECTORS = ["the 9 9", "love 1 0.5", "sad -1 0", "! 0 2", "don't 0 3", "caf\u00e9 4 4", "sad 7 7"]


def write_sent140(folder: Path, tweets: Any = TWEETS, vectors: Any = VECTORS) -> None:
    (folder / "sent140").mkdir(exist_ok=True)
    name = folder / "sent140" / "training.1600000.processed.noemoticon.csv"
    name.write_text("\n".join(tweets) + "\n" * bool(tweets), encoding="latin-1")
    (folder / "sent140" / "small.txt").write_text("\n".join(vectors) + "\n", encoding="utf-8")


def test_sent140(folder: Path) -> None:
    write_sent140(folder)
    population = load_source("sent140", least=2, share=1.0, length=5, vectors="small.txt")
    assert list(population.ids) == ["ann", "bob"]  # eve has said too little
    # love is said four times within the first five words, the others once; words without a vector are 0
    assert population.about["words"] == ["love", "!", "caf\u00e9", "don't", "sad"]
    assert population.columns["x"].tolist() == [
        [0, 4, 0, 0, 3],  # bob don't go , caf\u00e9
        [1, 1, 1, 0, 0],
        [0, 1, 0, 2, 0],
        [0, 5, 0, 0, 0],
    ]
    assert population.columns["y"].tolist() == [0, 1, 1, 0]
    assert (population.columns["time"][2] - population.columns["time"][0]).item() == 1 * 3600 + 40 * 60 + 16
    kept = frozen(population.about["vectors"])
    assert kept.tolist() == [[0, 0], [1, 0.5], [0, 2], [4, 4], [0, 3], [-1, 0]]  # the first line of a word counts
    task = build_task(population.about)
    assert task.network == SentimentLSTM(2, population.about["vectors"], 2)
    again = load_source("sent140", least=2, share=1.0, length=5, vectors="small.txt")
    assert again.about["vectors"] == population.about["vectors"]


def test_sent140_keeps_a_share_of_users(folder: Path) -> None:
    users = [f"user{number:03d}" for number in range(200)]
    write_sent140(folder, [tweet(user, "love it") for user in users])
    few = load_source("sent140", least=1, share=0.3, vectors="small.txt")
    more = load_source("sent140", least=1, share=0.6, vectors="small.txt")
    assert 40 < len(few) < 80
    assert set(few.ids) < set(more.ids)


def test_frozen_vectors_do_not_travel(folder: Path) -> None:
    """Parameters are the LSTM's and the last layer's: 4 * 3 * (2 + 3 + 2), 4 * 3 * (3 + 3 + 2), 2 * 4."""
    write_sent140(folder)
    population = load_source("sent140", least=2, share=1.0, length=5, vectors="small.txt")
    task = build_task(population.about, hidden=3)
    params = task.init(0)
    assert sum(p.numel() for p in params.values()) == 84 + 96 + 8
    batch = {"x": population.columns["x"], "y": population.columns["y"], "mask": torch.ones(4)}
    assert task.predict(params, batch).shape == (4, 2)
    assert all(part.abs().max() > 0 for part in task.gradient(params, batch).values())
    # two tweets of the same vectors are the same
    outputs = task.predict(params, {"x": torch.tensor([[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0]])})
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert task.network.features(params, batch["x"]).shape == (4, 3)


def test_a_run_sends_the_lstm_alone_and_exports_it(folder: Path, tmp_path: Path) -> None:
    users = [tweet(user, text, polarity) for user in ("ann", "bob", "eve") for text, polarity in
             (("love it", "4"), ("so sad", "0"), ("love love !", "4"), ("don't", "0"), ("sad sad", "0"))]  # fmt: skip
    write_sent140(folder, users)
    options = {"least": 2, "share": 1.0, "length": 5, "vectors": "small.txt"}
    experiment = {
        "data": {"source": "sent140", "options": options}, "model": {"hidden": 3},
        "stage": [{"method": "fedavg", "rounds": 2, "batch_size": 2}],
    }  # fmt: skip
    result = run(experiment, tmp_path / "run")
    numbers = 84 + 96 + 8
    assert result["parameters"] == numbers
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if line.get("round")]
    assert [line["bytes_down"] for line in rounds] == [3 * 4 * numbers] * 2
    assert [line["bytes_up"] for line in rounds] == [3 * 4 * (numbers + 1)] * 2  # and what the client weighs
    written = export_personal(tmp_path / "run", "ann")
    assert written["parameters"] == numbers
    model = load_personal(written["folder"])
    assert set(model.predict(np.array([[1, 0, 0, 0, 0]]))) <= {"negative", "positive"}
    assert model.about["words"] == ["love", "sad", "!", "don't"]


def test_vectors_that_are_not_here(folder: Path) -> None:
    network = SentimentLSTM(2, "sent140-0123456789abcdef", 2)
    with pytest.raises(UserError, match=r"vectors 'sent140-0123456789abcdef' are not in .*load the source 'sent140'"):
        network.prepare(torch.zeros(1, 5, dtype=torch.int16))
    with pytest.raises(UserError, match="'linear' takes numbers, and these are tokens; use 'sentiment-lstm'"):
        build_task({"task": "classification", "input": "tokens", "classes": ["a", "b"]}, "linear")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"tweets": [tweet("ann", "hm", "2")]}, {}, "in line 1, expected polarity .0 or 4., id, date, query, user"),
        ({"tweets": [*TWEETS, "4,1,love it"]}, {}, "'4,1,love it' in line 6"),
        ({"tweets": []}, {}, "found no rows"),
        ({"tweets": [tweet("ann", "love", date="2009-04-06")]}, {"least": 1}, "the date '2009-04-06', expected dates"),
        ({"vectors": ["the 9 9", "love 1"]}, {}, "'love 1.n' in line 2, expected a word and 2 numbers in every line"),
        ({"vectors": ["the 9 9", "love 1 x"]}, {}, "could not convert .* in line 2, expected a word and 2 numbers"),
        ({"vectors": ["the 9 9"]}, {}, "none of the words of the tweets"),
        ({}, {"least": 3}, "0 users have 3 tweets or more.*the largest number of tweets of any user is 2"),
        ({}, {"share": 0.0}, "'share' .* is 0.0; it has to be above 0 and at most 1"),
        ({}, {"vectors": "glove.6B.300d.txt"}, "needs the file sent140/glove.6B.300d.txt.*nlp.stanford.edu"),
    ],
)
def test_sent140_of_another_layout(folder: Path, change: Any, options: Any, message: str) -> None:
    write_sent140(folder, **change)
    with pytest.raises(UserError, match=message):
        load_source("sent140", **{"least": 2, "share": 1.0, "vectors": "small.txt", **options})


def test_the_setting_of_the_paper_is_an_experiment(tmp_path: Path) -> None:
    """Appendix G.3: 200 rounds of FedAvg, then 400 of each method, 77 clients a round; nothing is loaded for it."""
    path = Path(__file__).parents[2] / "benchmarks" / "self_fl" / "sent140.toml"
    comparison = Comparison.read(path, tmp_path)
    comparison.plan.check()
    assert comparison.base["cohort"] == {"size": 77}
    for name in comparison.methods:
        warm, own = comparison.plan.stages(name, {})
        assert (warm["method"], warm["rounds"], own["rounds"]) == ("fedavg", 200, 400)
        assert (warm["lr"], warm["batch_size"], warm["epochs"]) == (0.3, 10, 2)
        assert (own["lr"], own["batch_size"]) == (0.3, 10)
