"""benchmarks/language.py: the page of language models, from run folders and from cached tables of word frequencies."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bespoke.errors import UserError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def language(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module("language")
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("self_fl", "fedembed", "language") or name.startswith("results"):
            del sys.modules[name]


def run(label: str, curve: dict[int, float]) -> Any:
    lines = [{"round": at, "validation": {"perplexity": value} if value else None} for at, value in curve.items()]
    return SimpleNamespace(label=label, seed=0, lines=lambda name: lines)


def study(curve: dict[int, float], **compare: Any) -> Any:
    methods = [{"name": "fedavg", "label": "fedavg", "title": "FedAvg", "tuning": [], "chosen": {}}]
    return SimpleNamespace(runs=[run("fedavg", curve)], labels=["fedavg"], compare={"methods": methods, **compare})


def test_convergence_is_said_as_it_is(language: Any) -> None:
    (falling,) = language._converged(study({0: 999.0, 10: 400.0, 15: 0.0, 30: 200.0, 40: 190.0}))
    assert "400.0 after 10, 200.0 after 30, 190.0 after 40 rounds" in falling
    assert falling.endswith("From round 30 on it fell by 5.0 %: not converged.")
    (flat,) = language._converged(study({10: 400.0, 30: 200.0, 40: 199.0}))
    assert flat.endswith("by 0.5 %: about converged.")
    (past,) = language._converged(study({10: 400.0, 20: 100.0, 30: 150.0, 40: 165.0}))
    assert "From round 30 on it rose by 10.0 %: past its best after round 20." in past
    assert language._converged(study({10: 400.0})) == []


def test_what_was_tried_is_listed(language: Any) -> None:
    tried = [{"knobs": {"server.lr": rate}, "validation": value} for rate, value in ((0.01, 250.0), (0.1, 300.0))]
    entry = {"title": "FedAvg", "tuning": tried, "chosen": {"server.lr": 0.01}}
    (text,) = language._rates(SimpleNamespace(compare={"methods": [entry]}))
    assert "{'server.lr': 0.01}: 250.0, {'server.lr': 0.1}: 300.0; chosen {'server.lr': 0.01}" in text


def test_word_frequencies_come_from_the_cache(language: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"title": "By topics", "columns": ["group", "talks", "gain"], "rows": [["sea", 1200, "+3.1 %"]]}
    (tmp_path / "language-unigrams.json").write_text(json.dumps([{"title": "All talks", "tables": [table]}]))
    page = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["language.py", str(tmp_path), "--output", str(page)])
    language.main()
    text = page.read_text()
    assert text.startswith("# Language models: Group Personalized FL\n")
    head = "### All talks\n\nBy topics:\n\n| group | talks | gain |\n| --- | ---: | ---: |\n"
    assert f"{head}| sea | 1,200 | +3.1 % |" in text
    assert "| general | 211.2 | 190.1 | 178.3 | **168.1** |" in text


def test_without_runs_it_says_what_to_do(language: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["language.py", str(tmp_path), "--output", str(tmp_path / "page.md")])
    with pytest.raises(UserError, match="holds no finished run of a language model: see --help"):
        language.main()
    assert not (tmp_path / "page.md").exists()
