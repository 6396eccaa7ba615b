"""Pages of studies, and Self-FL's: from files on disk, safe, the same bytes each time; claims that can fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bespoke.data.population import Population
from bespoke.report.figure_page import Section, line, plot, render_study

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import results_self_fl
from self_fl import claims, page, synthetic, uncertainty
from self_fl.folders import FIVE, Compared, claim, of_global, top, weighted, worst

HOSTILE = "</script><script>alert(1)</script>"


def test_a_page_is_whole_and_safe() -> None:
    figure = plot([line(HOSTILE, [1, 2], [3, 4], "m1")], "x", "y", "a figure", yaxis={"range": [0, 5]})
    sections = [
        Section(HOSTILE, "lead", [("one", figure, HOSTILE)], [[["a", "b"], ["1", HOSTILE]]], ["note"], "run it")
    ]
    text = render_study("title", HOSTILE, sections)
    assert text == render_study("title", HOSTILE, sections)
    assert HOSTILE not in text
    assert 'id="figure-one"' in text
    payload = json.loads(text.split('id="payload">')[1].split("</script>")[0])
    found = payload["figures"]["one"]
    assert found["data"][0]["y"] == [3, 4]
    assert found["layout"]["yaxis"]["range"] == [0, 5]
    assert found["layout"]["xaxis"]["title"]["text"] == "x"
    assert "--m1:" in text  # the theme
    assert "Plotly.react" in text  # the script


# -- Self-FL -----------------------------------------------------------------------------------------------------------
def table(accuracy: list[float], train: list[int], query: list[int], baseline: float = 0.5) -> pd.DataFrame:
    return pd.DataFrame({
        "query_accuracy": accuracy, "baseline_accuracy": baseline, "train_examples": train, "query_examples": query,
    })  # fmt: skip


def test_measures_by_hand() -> None:
    """Twenty clients, a tenth is two: those with most rows have 0.9 (3 rows) and 0.6 (1 row): 3.3 / 4."""
    accuracy = [0.5] * 16 + [0.1, 0.3, 0.9, 0.6]
    found = table(accuracy, [1] * 18 + [90, 80], [1] * 18 + [3, 1])
    assert top(found) == pytest.approx(3.3 / 4)
    assert worst(found) == pytest.approx(0.2)
    assert weighted(found) == pytest.approx((8 + 0.4 + 2.7 + 0.6) / 22)
    assert of_global(found) == 0.5


def write_comparison(folder: Path, labels: tuple[str, ...], lift: dict[str, float]) -> None:
    """A comparison folder as far as the study reads it: two seeds, methods apart by `lift`."""
    stages = {"self-fl": {"method": "self-fl", "rounds": 4, "others": "all"}}
    other = {"method": "x", "rounds": 4}
    methods = [{"label": label, "chosen": {}, "stages": [stages.get(label, other)]} for label in labels]
    about = {
        "seeds": [0, 1],
        "methods": methods,
        "cohort": 5,
        "data": {"clients": 20},
        "model": {"name": "Linear", "parameters": 10},
    }
    for label in labels:
        for seed in (0, 1):
            run = folder / "runs" / f"{label}-seed{seed}"
            run.mkdir(parents=True)
            values = np.linspace(0.3, 0.6, 20) + lift.get(label, 0.0)
            frame = table(values.tolist(), list(range(1, 21)), [4] * 20, 0.4 + lift.get(label, 0.0) / 2)
            frame.to_parquet(run / "clients.parquet")
            points = [
                {"round": r, "validation": {"weighted_accuracy": 0.4 + 0.01 * r + lift.get(label, 0.0)}}
                for r in range(5)
            ]
            lines = [*points, {"round": 9, "validation": None}]
            (run / "rounds.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (folder / "compare.json").write_text(json.dumps(about))


@pytest.mark.parametrize(("lift", "verdict"), [(0.2, "reproduced (2 of 2)"), (-0.1, "not reproduced (0 of 2)")])
def test_claims_follow_from_the_folders(tmp_path: Path, lift: float, verdict: str) -> None:
    ablation = tuple(f"only {part}{kind}" for kind in ("", " scatter") for part in ("start", "steps", "weights"))
    entries = (*FIVE, "self-fl-scatter", "self-fl-augmented", *ablation)
    forty = ("ditto 40 steps", "pfedme 40 steps", "per-fedavg 40 steps")
    lifts = {"self-fl": lift, "only start": lift, "self-fl-scatter": 0.2, "only steps scatter": 0.1}
    write_comparison(tmp_path / "self-fl-five-classes", (*entries, *forty), lifts)
    study = Compared.found(tmp_path / "self-fl-five-classes")
    assert study is not None
    found = {one.text: one.verdict for one in (*claims.best(study, "x"), *claims.stand_in(study))}
    assert found["x: Self-FL has the highest weighted accuracy of the five"] == verdict
    assert found["Table 1: Self-FL is best for the tenth served worst"] == verdict
    most = "of the components alone, the initial value helps the global model most"
    assert found[f"Figure 2b, Self-FL: {most}"] == verdict
    assert claims.shifted(study, "x")[0].verdict == verdict
    sums = "Self-FL, variances as sums"
    assert found[f"x: {sums} has the highest weighted accuracy of the five"] == "reproduced (2 of 2)"
    assert found[f"Figure 2b, {sums}: {most}"] == "not reproduced (0 of 2)"
    assert claims.shifted(study, "x")[1].verdict == "reproduced (2 of 2)"
    assert found["Figure 7: Algorithms 1 and 2 differ by less than 1 % in accuracy"] == "not reproduced (0 of 2)"
    assert claim("", (), [True, False]).verdict == "mixed (1 of 2)"


def test_page_and_results_are_made_of_what_is_there(tmp_path: Path) -> None:
    assert page.sections(tmp_path) == []
    write_comparison(tmp_path / "self-fl-mnist", FIVE, {"self-fl": 0.1})
    write_comparison(tmp_path / "self-fl-mnist-sparse", ("fedavg", "ditto", "self-fl"), {"self-fl": -0.1})
    (tmp_path / "self-fl-synthetic").mkdir()
    (tmp_path / "self-fl-synthetic" / "synthetic.json").write_text(json.dumps([synthetic.study(3, 4)]))
    (tmp_path / "self-fl-mnist-steps").mkdir()
    steps = pd.DataFrame({"round": [99, 100, 100], "client": ["a", "a", "b"], "examples": [5, 5, 6]})
    steps = steps.assign(computed=[3.0, 50.0, 7.0], taken=[3.0, 40.0, 7.0], label="self-fl-scatter")
    steps.to_parquet(tmp_path / "self-fl-mnist-steps" / "steps.parquet")
    titles = [section.title for section in page.sections(tmp_path)]
    assert len(titles) == 6
    assert "Local steps (Figures 11, 12)" in titles
    text = results_self_fl.section(tmp_path)
    assert "| Self-FL | 55.00 ± 0.00 | 45.00 ± 0.00 |" in text
    assert "| Self-FL, variances as sums | 100 | 2 | 11.3 | 28.5 | 45.7 | 50 % |" in text
    assert "### CIFAR" not in text
    assert text.count('Linear of 10 parameters. Self-FL sums over all other clients (`others = "all"`).') == 2
    assert "| FedAvg, smoothed | global |" in text
    assert text.count("the paper seems to score Ditto by its global model.") == 1  # beside MNIST's best of five
    assert text.count("| reproduced (2 of 2) |") >= 3


# -- uncertainty -------------------------------------------------------------------------------------------------------
def test_variances_are_found_again() -> None:
    """Uneven clients in uneven groups; rows have variance 2, clients 0.5, groups 1.5: the means over 40 drawings."""
    found: dict[str, list[float]] = {"rows": [], "clients": [], "groups": []}
    for seed in range(40):
        random = np.random.default_rng(seed)
        group = random.integers(0, 30, 300)
        sizes = random.integers(2, 12, 300)
        theta = random.normal(0, 1.5**0.5, 30)[group] + random.normal(0, 0.5**0.5, 300)
        y = np.repeat(theta, sizes) + random.normal(0, 2**0.5, int(sizes.sum()))
        names = np.repeat([f"{c:03d}" for c in range(300)], sizes)
        made: Any = Population.build({"x": y, "y": y}, names, group=np.repeat(group, sizes), about={"title": "t"})
        for part, value in uncertainty.components(made).items():
            found[part].append(value)
    for part, truth in (("rows", 2.0), ("clients", 0.5), ("groups", 1.5)):
        assert np.mean(found[part]) == pytest.approx(truth, rel=0.1)
    studied = uncertainty.study(made)
    assert (np.array(studied["group"]) <= np.array(studied["local"]) + 1e-12).all()
    assert (np.array(studied["all"]) <= np.array(studied["group"]) + 1e-12).all()
    assert [name for name, _, _ in uncertainty.section(studied).figures] == ["uncertainty", "medians"]
    few = {"examples": [1, 5, 6, 9], "local": [8.0, 4.0, 2.0, 1.0], "group": [3.0, 2.0, 1.0, 0.5], "all": [1.0] * 4}
    assert uncertainty.medians(few) == {"all clients": [3.0, 1.5, 1.0], "the smallest quarter": [8.0, 3.0, 1.0]}
