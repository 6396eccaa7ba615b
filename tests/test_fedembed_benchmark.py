"""FedEmbed's two experiments as commands: what they ask for, and the tables made of what they leave."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pytest

from bespoke.config import read_toml
from bespoke.errors import UserError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
sys.path.insert(0, str(BENCHMARKS / "fedembed"))
from mnist import MNIST  # noqa: E402
from voice import VOICE  # noqa: E402

import results_fedembed  # noqa: E402

PAPER = tomllib.loads((BENCHMARKS / "fedembed" / "paper.toml").read_text())
ASKED = argparse.Namespace(number=0, jobs=1, rounds=0, seeds=0, methods=None)


@pytest.mark.parametrize("experiment", [MNIST, VOICE], ids=lambda experiment: experiment.name)
@pytest.mark.parametrize("column", ["none", "gaussian"])
def test_nine_methods_with_the_papers_numbers(experiment, column, tmp_path):
    privacy = read_toml(VOICE.privacy) if column == "gaussian" else {}
    found = experiment.comparison(tmp_path, "imbalanced", privacy, ASKED)
    found._check()
    assert set(found.methods) == set(results_fedembed.ORDER)
    assert found.base["data"]["options"]["users"] == "imbalanced"
    assert ("privacy" in found.base) == (column == "gaussian")
    numbers = PAPER[experiment.table]["imbalanced"]
    assert {m: [e["mean"], e["sd_seeds"]] for m, e in found.expected.items() if m != "source"} == {
        method: row[column] for method, row in numbers.items()
    }
    few = argparse.Namespace(**{**vars(ASKED), "number": 60, "rounds": 3, "seeds": 2, "methods": ["FedRep"]})
    found = experiment.comparison(tmp_path, "balanced", privacy, few)
    assert (found.methods, found.rounds, found.seeds) == (("FedRep",), 3, (0, 1))
    assert found.base["data"]["options"]["number"] == 60


def test_everything_that_the_paper_has_of_it():
    for table, parts in (("table2", ""), ("table3", ""), ("table4", 4), ("table5", 3)):
        for half in ("none", "gaussian") if parts else ("balanced", "imbalanced"):
            assert set(PAPER[table][half]) == set(results_fedembed.ORDER)
        assert not parts or all(len(row) == parts for row in PAPER[table]["none"].values())
    voices = sorted(voice for part in PAPER["table5"]["parts"].values() for voice in part)
    assert voices == [f"{voice:02d}" for voice in range(20)]


def test_tables_by_hand(tmp_path):
    table = pd.DataFrame({"group": ["00", "00", "05", "07"], "query_f1": [0.9, 0.7, 0.6, 0.2]})
    again = table.assign(query_f1=[0.8, 0.6, 0.6, 0.4])
    found = {("imbalanced", "gaussian"): {"FedRep": [table, again]}}
    run = tmp_path / "imbalanced-gaussian" / "runs" / "FedRep-seed0"
    run.mkdir(parents=True)
    (run / "result.json").write_text(json.dumps({"privacy": {"released": {"epsilon": 8.25}, "delta": 0.00088}}))
    lines = results_fedembed.overall(tmp_path, found, PAPER["table3"])
    assert lines[0] == "| method | imbalanced, gaussian: paper | ours |"
    assert lines[2] == "| FedRep | 0.49 ± 0.00 | 0.600 ± 0.000 (ε 8.25 at δ 0.00088) |"
    assert lines[3] == "| PFedMe | 0.49 ± 0.03 | – |"
    (run / "result.json").write_text(json.dumps({"privacy": {"released": {"epsilon": None}, "delta": 0.00088}}))
    assert "(ε ∞)" in results_fedembed.overall(tmp_path, found, PAPER["table3"])[2]
    assert results_fedembed.below(found, PAPER["table3"]) == ["", "No method is below the paper's mean."]
    worse = {key: {"FedRep": [table.assign(query_f1=0.4)]} for key in found}
    assert "FedRep (imbalanced, gaussian; by 0.09)" in results_fedembed.below(worse, PAPER["table3"])[1]
    parts = results_fedembed.by_part(found["imbalanced", "gaussian"], "gaussian", PAPER["table5"])
    assert parts[2] == "| FedRep | 0.47 | 0.750 ± 0.071 | 0.50 | 0.600 ± 0.000 | 0.49 | 0.300 ± 0.141 |"
    with pytest.raises(UserError, match="holds no comparison"):
        results_fedembed.section(tmp_path)
