"""benchmarks/rescoring.py: which segments are spoken, what is kept of them, Whisper's features, and the page."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespoke.experiment.build import build
from bespoke.experiment.loading import load_population
from bespoke.rescoring.interpolation import Plan
from bespoke.rescoring.nbest import Hypotheses
from bespoke.rescoring.rescore import write
from bespoke.runs.finished import open_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module("rescoring")
    for name in set(sys.modules) - before:
        if name in ("rescoring", "whisper", "results_rescoring"):
            del sys.modules[name]


def test_no_segment_was_trained_on(benchmark: Any, run: Path) -> None:
    _, config = open_run(run)
    raw = load_population(config)
    experiment = build(config, raw, folder=run)
    found = list(benchmark.segments(experiment, raw, 12))
    assert {split for _, _, split, _ in found} == {"validation", "test"}
    parts = {"validation": experiment.split.test.validation, "test": experiment.split.test.query}
    for name, client, split, text in found:
        row = int(name.rpartition("#")[2])
        one = np.array([client])
        assert row in parts[split].of(one)[0]
        assert row not in experiment.split.train.of(one)[0]
        pieces = raw.columns["pieces"][row]
        assert text == " ".join(raw.about["pieces"][piece - 1] for piece in pieces[pieces > 0].tolist())
    assert len({name for name, *_ in found}) == len(found)
    assert found[:5] == list(benchmark.segments(experiment, raw, 12))[:5]


def test_a_list_that_was_cut_off_is_recognised_again(benchmark: Any, tmp_path: Path) -> None:
    path = tmp_path / "nbest.jsonl"
    lines = [json.dumps(Hypotheses(name, "me", ("a",), (0.0,)).to_json()) for name in ("a", "b")]
    assert benchmark._kept(path) == set()
    path.write_text(f"{lines[0]}\n{lines[1][:9]}")
    assert benchmark._kept(path) == {"a"}
    assert path.read_text() == f"{lines[0]}\n"


def test_features_are_whispers(benchmark: Any) -> None:
    """Silence is (-10 + 4) / 4. A sine of 1,000 Hz has the power (200 / 2)^2 in bin 25, a quarter of it beside it."""
    whisper = sys.modules["whisper"]
    filters = whisper.mel_filters().numpy()
    assert filters.shape == (80, 201)
    # the beginning of the table that Whisper carries, as librosa computes it
    assert filters[:2, :3].ravel() == pytest.approx([0, 0.02486259, 0, 0, 0.00199082, 0.02287177], abs=1e-7)
    assert filters[60:].sum(1) * 40 == pytest.approx(np.ones(20), abs=0.05)  # bands of area one, bins of 40 Hz
    assert whisper.log_mel(np.zeros(16000, np.float32)).unique().tolist() == [-1.5]
    sine = np.sin(2 * np.pi * 1000 * np.arange(480_000) / 16000).astype(np.float32)
    found = whisper.log_mel(sine).numpy()
    assert found.shape == (80, 3000)
    power = filters[:, 24:27] @ np.array([0.25, 1.0, 0.25]) * 1e4
    band = int(power.argmax())
    assert found[:, 1500].argmax() == band
    assert found[band, 1500] == pytest.approx((np.log10(power[band]) + 4) / 4, abs=1e-4)
    assert found.min() == pytest.approx(found.max() - 2, abs=1e-5)  # no more than 8 decades below


def test_the_page_says_when_the_word_error_rate_does_not_fall(benchmark: Any, tmp_path: Path) -> None:
    texts = ("a b c d", "a b c", "x b c d")
    spoken = [Hypotheses(f"u{i}", "me", texts, (-1.0, -1.1, -1.2), texts[0], "test") for i in range(9)]
    for name in ("paper", "tuned"):
        models = {label: [np.array([-8.0, -2.0, -9.0])] * 9 for label in benchmark.METHODS}
        result = Plan.of(spoken, 0.1, 0.0).rescored(models)
        write(result, {"data": "ted", "seed": 0}, tmp_path / name)
    page = sys.modules["results_rescoring"].section(tmp_path)
    assert "| the paper | 26.83 |  | 26.56 | 26.16 | 26.32 | 26.09 |  |" in page
    assert "| 0.0 | 0.0 | 25.0 | 25.0 | 25.0 | 25.0 | 0.0 |" in page
    assert "the word error rate rises with FL" in page
    assert "less than the bonus alone (0.0 %)" in page
