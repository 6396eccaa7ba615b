"""What runs of language models leave of texts: typical words and example sentences, on the page and forgotten."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from bespoke.data.population import Population
from bespoke.deploy.forget import forget_client
from bespoke.experiment.build import build, to_toml
from bespoke.experiment.checks import checked
from bespoke.experiment.config import ExperimentConfig
from bespoke.privacy.settings import PrivacyConfig
from bespoke.report.page import write_report
from bespoke.runs.excerpts import PRIOR, SHORTEST, keeps_texts, typical_words
from bespoke.runs.finished import personal_model
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run

HOSTILE, GROUP = "<i>ann</i>", "<b>tea</b>"
MODEL = {"name": "lstm", "embedding": 4, "hidden": 6, "layers": 1}


def test_typical_words_by_hand() -> None:
    """Group a says tea 3 times and the once; b says rain twice and the twice; the prior is spread as all eight are."""
    said = np.array([[1, 1], [1, 3], [2, 3], [2, 3]])
    about = {"words": ["tea", "rain", "the"]}
    made = Population.build({"y": said}, ["u", "u", "v", "v"], group=["a", "a", "b", "b"], about=about)
    train: Any = SimpleNamespace(clients=np.arange(2), of=lambda clients: (np.arange(4), np.array([2, 2])))
    found = typical_words(made, train)
    assert list(zip(found["group"], found["word"])) == [("a", "tea"), ("b", "rain"), ("b", "the")]
    assert found["count"] == [3, 2, 2]
    a = PRIOR * 3 / 8
    inside, others = 3 + a, 0 + a
    odds = math.log(inside / (4 + PRIOR - inside)) - math.log(others / (4 + PRIOR - others))
    assert found["score"][0] == pytest.approx(odds / math.sqrt(1 / inside + 1 / others))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExperimentConfig]:
    """A run of six users, of whom one and whose group have hostile names."""
    rng, rows = np.random.default_rng(2), []
    for place, user in enumerate([HOSTILE, "bob", "cy", "dan", "eve", "flo"]):
        own = ["tea", "cup", "milk"] if place < 3 else ["rain", "wind", "snow"]
        for _ in range(14):
            words = rng.choice([*own, "the", "and", "a"], rng.integers(4, 8)).tolist()
            rows.append((user, " ".join(words), GROUP if place < 3 else "weather"))
    folder = tmp_path_factory.mktemp("posts")
    pd.DataFrame(rows, columns=["user", "text", "topic"]).to_csv(folder / "posts.csv", index=False)
    data = {"table": str(folder / "posts.csv"), "client": "user", "text": "text", "group": "topic"}
    stages = [{"method": "fedavg", "rounds": 2, "lr": 1.0}, {"method": "finetune", "epochs": 2, "lrs": [0.5]}]
    how = {"kind": "looped", "workers": 0}
    config = checked({"seed": 1, "data": data, "model": MODEL, "stage": stages, "engine": how}, "here")
    Run(build(config), RunFolder.create(folder / "run", to_toml(config))).run()
    return folder / "run", config


def test_a_sentences_perplexity_is_that_of_its_owners_model(finished: tuple[Path, ExperimentConfig]) -> None:
    path, config = finished
    experiment = build(config)
    assert experiment.metric == "perplexity"
    found = pd.read_parquet(path / "examples.parquet")
    assert set(found["group"]) == {GROUP, "weather"}
    population = experiment.population
    for row in found.itertuples():
        params, _ = personal_model(RunFolder(path), experiment, population.index(row.client))
        x, y = (population.columns[name][row.row].long() for name in "xy")
        with torch.no_grad():
            chances = experiment.task.network(params, x[None])[0].log_softmax(-1)
        scored = [float(-chances[place, token]) for place, token in enumerate(y.tolist()) if token]
        assert row.tokens == len(scored) >= SHORTEST
        assert math.exp(row.loss / row.tokens) == pytest.approx(math.exp(sum(scored) / len(scored)), rel=1e-4)
        assert set(row.text.split()) <= {*population.about["words"], "<unk>"}
    typical = pd.read_parquet(path / "typical.parquet").groupby("group")["word"].agg(list)
    assert set(typical[GROUP][:3]) == {"tea", "cup", "milk"}
    assert set(typical["weather"][:3]) == {"rain", "wind", "snow"}


def test_nothing_is_kept_under_privacy(finished: tuple[Path, ExperimentConfig]) -> None:
    experiment = build(finished[1])
    assert keeps_texts(experiment)
    assert not keeps_texts(replace(experiment, privacy=PrivacyConfig(clip=1.0, noise=1.0)))


def test_the_page_shows_them_escaped_and_forgetting_takes_them_out(
    finished: tuple[Path, ExperimentConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")
    path, _ = finished
    page = write_report([path], path / "report.html").read_text(encoding="utf-8")
    table = pd.read_parquet(path / "examples.parquet")
    sentence = table[table["client"] == HOSTILE]["text"].iloc[0]
    assert "Words typical of each group" in page
    assert "private texts" in page
    assert f'<td class="left wrap">{sentence.replace("<unk>", "&lt;unk&gt;")}</td>' in page
    assert "&lt;i&gt;ann&lt;/i&gt;" in page
    assert HOSTILE not in page
    assert GROUP not in page
    receipt = forget_client(path, HOSTILE)
    assert {"examples.parquet", "typical.parquet"} <= set(receipt["deleted"])
    left = pd.read_parquet(path / "examples.parquet")
    assert HOSTILE not in set(left["client"])
    assert len(left) == len(table) - 1
    assert not (path / "typical.parquet").exists()
    assert f'<td class="left wrap">{sentence}</td>' not in (path / "report.html").read_text(encoding="utf-8")
