"""Language models in numbers: perplexity of all sentences together and over clients, bits per character."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from math import exp, log2
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from bespoke.data.population import Population
from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.models import build_task
from bespoke.models.language import LanguageModel
from bespoke.models.networks import LSTM
from bespoke.models.scores import finished
from bespoke.report.group_gain import by_group
from bespoke.report.page import write_report
from bespoke.report.report import read, summarize, summarize_study
from bespoke.report.terminal import print_summary
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run

LOSSES = {"fedavg": [[1.0, 3.0, 2.0]], "finetune": [[1.0, 2.0, 2.0]]}
TOKENS, CHARACTERS, BITS = [3, 1, 6], [10, 5, 5], {"fedavg": [2.0, 8.0, 4.0], "finetune": [2.0, 5.0, 4.0]}
TINY = LanguageModel(LSTM(6, embedding=3, hidden=4, layers=1))


@pytest.fixture
def folder(tmp_path: Path, write_comparison: Callable[..., Path]) -> Path:
    """Three clients of two groups; "b" has one client."""
    made = write_comparison(
        tmp_path / "words", LOSSES, ["ann", "bob", "cy"], metric="loss", groups=["a", "a", "<b>"], query=[2, 1, 3],
        metrics=["loss", "perplexity", "bits_per_character"],
    )  # fmt: skip
    for path in (made / "runs").iterdir():
        found = pd.read_parquet(path / "clients.parquet")
        more = {"query_perplexity": np.exp(found["query_loss"]), "baseline_perplexity": np.exp(found["query_loss"]),
                "query_tokens": TOKENS, "query_characters": CHARACTERS,
                "query_bits_per_character": BITS[path.name.split("-")[0]]}  # fmt: skip
        found.assign(**more).to_parquet(path / "clients.parquet")
        result = json.loads((path / "result.json").read_text())
        (path / "result.json").write_text(json.dumps(result | {"metric": "perplexity"}))
    return made


def test_sentences_together_the_mean_over_clients_and_by_group(folder: Path) -> None:
    every, first, second = summarize([folder]).language
    one, two = every.values["fedavg"], every.values["finetune"]
    assert one.perplexity.value == pytest.approx(exp((3 * 1 + 1 * 3 + 6 * 2) / 10))
    assert two.perplexity.value == pytest.approx(exp((3 * 1 + 1 * 2 + 6 * 2) / 10))
    assert one.mean_perplexity.value == pytest.approx((exp(1) + exp(3) + exp(2)) / 3)
    assert one.bits_per_character.value == pytest.approx((10 * 2 + 5 * 8 + 5 * 4) / 20)
    assert (every.clients, every.tokens, first.group, first.clients, first.tokens) == (3, 10, "a", 2, 4)
    assert first.values["fedavg"].perplexity.value == pytest.approx(exp((3 * 1 + 1 * 3) / 4))
    assert first.values["finetune"].bits_per_character.value == pytest.approx((10 * 2 + 5 * 5) / 15)
    assert second.values["fedavg"].perplexity.value == pytest.approx(exp(2))
    study, table = read([folder])
    rows = by_group(study, table, summarize_study(study, table))  # Table 3's form weights by tokens too
    assert rows[0].values["fedavg"].value == pytest.approx(exp(6 / 4))


def test_terminal_json_and_page_show_them(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")
    summary, out = summarize([folder]), StringIO()
    print_summary(summary, Console(width=120, file=out))
    shown = out.getvalue()
    for wanted in ("all sentences together", "mean over clients", "bits per character", f"{exp(1.8):.3f}", "4.000"):
        assert wanted in shown
    kept = json.loads(summary.to_json())["language"]
    assert kept[0]["values"]["fedavg"]["perplexity"]["value"] == pytest.approx(exp(1.8), rel=1e-5)
    page = write_report([folder], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Perplexity of texts" in page
    assert f"{exp(1.8):.3f}" in page
    assert '<td class="id">&lt;b&gt;</td>' in page


def test_bits_per_character_by_hand() -> None:
    """Uniform over 4 tokens: 2 bits each, 3 tokens; one row's unknown word costs 5 bits more; the third is padding."""
    batch = {"y": torch.tensor([[1, 2], [3, 0], [1, 1]]), "mask": torch.tensor([1.0, 1.0, 0.0]),
             "characters": torch.tensor([7, 4, 9]), "spelling": torch.tensor([0.0, 5.0, 8.0])}  # fmt: skip
    sums = TINY.score(torch.zeros(3, 2, 4), batch)
    assert float(finished("bits_per_character", sums)) == pytest.approx((3 * log2(4) + 5) / 11)
    assert "bits_per_character" not in TINY.score(torch.zeros(3, 2, 4), {name: batch[name] for name in ("y", "mask")})
    about = {"task": "language", "input": "tokens", "vocabulary": 6, "characters": True}
    assert "bits_per_character" in build_task(about, "lstm").metrics
    assert "bits_per_character" not in build_task({**about, "characters": False}, "lstm").metrics


def sentences() -> Population:
    """Four clients with rows of up to five tokens out of four words."""
    rng, sizes = np.random.default_rng(0), [12, 30, 7, 21]
    tokens = rng.integers(1, 5, (sum(sizes), 6))
    for row, length in zip(tokens, rng.integers(2, 7, len(tokens))):
        row[length:] = 0
    lengths = (tokens[:, 1:] > 0).sum(1)
    columns = {"x": tokens[:, :-1], "y": tokens[:, 1:], "characters": (4 * lengths).astype(np.int32),
               "spelling": np.zeros(len(tokens), np.float32)}  # fmt: skip
    about = {"name": "words", "task": "language", "input": "tokens", "vocabulary": 6, "characters": True,
             "metric": "perplexity", "model": {"name": "lstm", "embedding": 3, "hidden": 4, "layers": 1}}  # fmt: skip
    owner = np.repeat([f"c{i}" for i in range(len(sizes))], sizes)
    return Population.build(columns, owner, group=np.where(owner < "c2", "a", "b"), about=about)


def test_a_run_leaves_what_sentences_are_pooled_by(tmp_path: Path) -> None:
    """Tokens counted in the data; each client's loss is the mean of what its rows have in rows.parquet."""
    population = sentences()
    stages = [{"method": "fedavg", "rounds": 1, "lr": 0.5}, {"method": "finetune", "epochs": 2, "lrs": [0.1, 0.5]}]
    experiment = build(checked({"seed": 1, "data": {"source": "shakespeare"}, "stage": stages}, "here"), population)
    assert experiment.metric == "perplexity"
    Run(experiment, RunFolder.create(tmp_path / "run", "")).run()
    clients = pd.read_parquet(tmp_path / "run" / "clients.parquet").set_index("client")
    rows = pd.read_parquet(tmp_path / "run" / "rows.parquet")
    y = population.columns["y"].numpy()
    tokens = rows.assign(tokens=(y[rows["row"]] > 0).sum(1)).groupby("client")["tokens"].sum()
    assert clients["query_tokens"].to_dict() == tokens.to_dict()
    assert clients["query_characters"].to_dict() == (4 * tokens).to_dict()
    assert rows.groupby("client")["value"].mean().to_numpy() == pytest.approx(clients["query_loss"].to_numpy())
    assert clients["query_bits_per_character"].to_numpy() == pytest.approx(
        clients["query_loss"].to_numpy() / np.log(2) / 4
    )
