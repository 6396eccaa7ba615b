"""benchmarks/fedpc: numbers from made-up run folders by hand, the page, and FedPC (Frozen) from a run of FedPC."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bespoke.errors import UserError

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.fedpc import claims, examples, page, parts, readings  # noqa: E402

from bespoke.statistics.significance import Interval  # noqa: E402

USERS = ["Arya", "Bran", "Ross"]


def made_up(folder: Path, values: dict[str, dict[int, list[float]]], seeds: int = 2) -> Path:
    """A comparison folder: perplexities of three users by method and samples (0: all); a seed adds a tenth of them."""
    methods = [{"label": label, "stages": [{"rounds": 12, "steps": 5}], "tuning": [], "chosen": {}} for label in values]
    folder.mkdir(parents=True)
    (folder / "compare.json").write_text(json.dumps({"methods": methods, "seeds": list(range(seeds))}))
    for label, found in values.items():
        for seed in range(seeds):
            run = folder / "runs" / f"{label}-seed{seed}"
            (run / "analysis").mkdir(parents=True)
            (run / "config.toml").write_text("[data.options]\nmost = 500\n")
            (run / "timing.jsonl").write_text('{"stage": 0, "round": 1, "seconds": 30.0}\n')
            table = {samples: [(1 + seed / 10) * v for v in row] for samples, row in found.items()}
            frame = pd.DataFrame({"client": USERS, "query_perplexity": table.pop(0)})
            frame.to_parquet(run / "clients.parquet")
            if table:
                rows = [(user, most, v) for most, row in table.items() for user, v in zip(USERS, row)]
                pd.DataFrame(rows, columns=["client", "most", "value"]).to_parquet(run / "analysis/examples.parquet")
            if label == "fedpc":
                crossed = {"client": USERS, "own": frame["query_perplexity"], "other": 2 * frame["query_perplexity"],
                           "none": [400.0, 500.0, 600.0]}  # fmt: skip
                pd.DataFrame(crossed).to_parquet(run / "analysis/crossed.parquet")
                (run / "untuned.json").write_text(json.dumps(dict(zip(USERS, [130.0, 140.0, 150.0]))))
    return folder


VALUES: dict[str, dict[int, list[float]]] = {
    "fedpc": {0: [100.0, 110.0, 120.0], 1: [200.0, 220.0, 240.0]},
    "fedpc-split": {0: [300.0, 330.0, 360.0], 1: [900.0, 990.0, 1080.0]},
    "fedpc-meta": {0: [150.0, 165.0, 180.0], 1: [150.0, 165.0, 180.0]},
    "shared-prefix": {0: [100.0, 110.0, 120.0]},
}


def test_perplexities_are_read_by_seed_and_user(tmp_path: Path) -> None:
    table = readings.read_table(made_up(tmp_path / "known", VALUES))
    assert table is not None
    assert table.users == USERS
    assert table.values["fedpc", "1"].tolist() == [[200, 220, 240], pytest.approx([220, 242, 264])]
    assert table.at("fedpc-frozen", "5").tolist() == [[130, 140, 150]] * 2  # the same whatever the samples
    assert table.at("none", "all").tolist() == [[400, 500, 600]] * 2
    assert table.at("fedpc", "5") is None
    assert readings.over_seeds(table.at("fedpc", "all")) == pytest.approx((115.5, 11 / 2**0.5))  # 110 and 121
    assert readings.read_table(tmp_path / "nothing") is None


def test_changes_by_hand() -> None:
    half = readings.change(np.array([[1.0, 2.0, 3.0]]), np.array([[2.0, 4.0, 6.0]]))
    assert half.value == pytest.approx(-0.5)
    assert (half.interval.low, half.interval.high) == pytest.approx((-0.5, -0.5))
    assert half.text() == "−50.0 % (−50.0 to −50.0)"
    wide = readings.change(np.array([[1.0, 4.0] * 5]), np.array([[2.0, 2.0] * 5]))  # halved, doubled
    assert wide.value == pytest.approx(0)
    assert wide.side == 0
    assert [claims.lower(readings.Change(0, Interval(*i))) for i in ((-2, -1), (-1, 1), (1, 2))] == [
        "yes", "cannot be told", "no: the opposite",
    ]  # fmt: skip
    assert [claims.same(readings.Change(0, Interval(*i))) for i in ((-0.04, 0.01), (-0.2, -0.1), (-0.2, 0.1))] == [
        "yes", "no: it falls", "cannot be told",
    ]  # fmt: skip


def test_the_page(tmp_path: Path) -> None:
    made_up(tmp_path / "known", VALUES)
    rates = made_up(tmp_path / "rates", VALUES)
    about = json.loads((rates / "compare.json").read_text())
    about["methods"][0] |= {"tuning": [{"knobs": {"lr": 0.01}, "validation": 123.4}], "chosen": {"lr": 0.01}}
    (rates / "compare.json").write_text(json.dumps(about))
    written = tmp_path / "smollm2" / "runs" / "fedpc-seed0" / "examples.md"
    written.parent.mkdir(parents=True)
    written.write_text(
        "# Generated examples: run\n\nContinuations\n\n| user, context | “I think” |\n|---|---|\n| Arya | so |\n"
    )
    output = tmp_path / "fedpc.md"
    output.write_text("# Old\n\n## Table 2: withheld users\n\nas it stood\n\n## Examples\n\nof another program\n")
    page.write(tmp_path, output)
    text = output.read_text()
    assert "| all | 115.5 ± 7.8 (46.7 ± 1.7) | 140.0 ± 0 (51.2 ± 2.0) | " in text
    third = "−66.7 % (−66.7 to −66.7)"
    assert f"| FedPC is better than Split-Learning, all samples | 46.7 against 82.1 | {third} | yes |" in text
    assert "| Meta-Learning does not improve with samples | 113.0 against 111.7 | +0.0 % (+0.0 to +0.0) | yes |" in text
    assert "(here Meta-Learning) by 45 to 55 % | −43 % | −33.3 % (−33.3 to −33.3) | no |" in text
    assert "- FedPC against one shared prefix: +0.0 % (+0.0 to +0.0), no difference that can be told" in text
    assert "| another user's | 231.0 | +100.0 % (+100.0 to +100.0) |" in text
    assert "| FedPC | lr 0.01: 123.4 | lr 0.01 |" in text
    assert "| FedPC | 30 | 55 |" in text  # 30 s a round of 5 updates: 55 rounds of 10 take 55 minutes
    assert "## Table 2: withheld users\n\nas it stood" in text
    assert "from the run above.\n\nContinuations\n\n| user, context |" in text
    assert text.rstrip().endswith("## Examples\n\nof another program")
    page.write(tmp_path, output)
    assert output.read_text() == text
    with pytest.raises(UserError, match="smollm2 comes first"):
        examples.tables(tmp_path / "nothing")
    with pytest.raises(UserError, match="holds no finished part"):
        page.write(tmp_path / "nothing", output)


def test_memory_and_times_are_ratios(tmp_path: Path) -> None:
    small = {"private": 1_000, "moments": 2_000, "down": 3_000, "up": 3_000, "training": 0.01, "testing": 0.004}
    head = {**small, "private": 30_000_000, "moments": 0, "down": 50_000_000, "training": 0.03, "testing": 0.002}
    costs = {"pretrained": "m", "contexts": 2, "vocabulary": 32_000, "width": 8, "model": 60_000_000,
             "methods": {"fedpc": small, "fedpc-split": head}}  # fmt: skip
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    text = page._costs(tmp_path)
    assert "| Split-Learning | 3.00 (2.52) | 0.50 (1.62) | 30.0 MB | 0 | 50.0 MB | 3.00 kB |" in text
    assert "1 of 32,000 here, 0.0031 %" in text
    assert "0.0050 % of Split-Learning's, or 0.0075 % with Adam's moments" in text


def test_what_noise_does_is_said(tmp_path: Path) -> None:
    made_up(tmp_path / "known", VALUES)
    folder = made_up(tmp_path / "private", {"fedpc": {0: [500.0, 600.0, 700.0]}}, seeds=1)
    about = json.loads((folder / "compare.json").read_text()) | {"privacy": {"epsilon": 8.0}}
    (folder / "compare.json").write_text(json.dumps(about))
    run = folder / "runs" / "fedpc-seed0"
    (run / "result.json").write_text(json.dumps({"privacy": {"released": {"epsilon": 7.9912}}}))
    noise = {"clip": 0.5, "sum": {"delta": 0.75}}
    (run / "ledger.jsonl").write_text(f'{{"round": 0}}\n{json.dumps({"round": 1, "noise": noise})}\n')
    text = page._private(tmp_path)
    assert "FedPC has a perplexity of 600.0 (115.5 without noise). Noise of 1.5 times the clipping bound" in text
    assert "sum of 3 messages. The spent epsilon is 7.99." in text


def test_parts_take_the_rates_that_were_chosen(tmp_path: Path) -> None:
    asked = argparse.Namespace(folder=tmp_path, most=0, pretrained="", seeds=0, rounds=0, jobs=1)
    with pytest.raises(UserError, match="learning rates come first"):
        parts.comparison("known", asked)
    rates = parts.comparison("rates", asked)
    assert rates.tune
    assert set(rates.grid) == set(rates.methods)
    assert {math.prod(map(len, grid.values())) for grid in rates.grid.values()} == {6}  # as many trials for each
    chosen = [{"label": name, "chosen": {"lr": 0.5, "server.lr": 0.25}} for name in rates.methods]
    (tmp_path / "rates").mkdir()
    (tmp_path / "rates" / "compare.json").write_text(json.dumps({"methods": chosen}))
    known = parts.comparison("known", asked)
    assert not known.tune
    assert known.knobs["fedpc"] | {"server": {}} == {"steps": 5, "lr": 0.5, "server": {}}
    assert known.knobs["fedpc"]["server"]["lr"] == 0.25
    for part in parts.PARTS:
        parts.comparison(part, asked).plan.check()
    assert parts.comparison("withheld", asked).base["split"]["protocol"] == "cross-device"
    assert parts.comparison("seasons", asked).base["data"]["options"]["contexts"] == "season"
    assert parts.comparison("smollm2", asked).base["model"]["pretrained"] == "smollm2"
    few = argparse.Namespace(**{**vars(asked), "most": 20, "seeds": 1, "rounds": 2, "pretrained": "folder"})
    tiny = parts.comparison("known", few)
    assert (tiny.seeds, tiny.rounds, tiny.base["model"]["pretrained"]) == ((0,), 2, "folder")
    assert tiny.base["data"]["options"]["most"] == 20


def test_frozen_is_fedpc_without_tuning(tmp_path: Path) -> None:
    """One training serves both: embeddings as a run of fedpc has left them score as those of fedpc-frozen do."""
    pytest.importorskip("transformers")
    from bespoke.study.comparison import Comparison
    from small_language import tiny_model

    rows = [(f"u{n % 4}", f"c{n % 2}", " ".join(f"w{(n * k) % 50}" for k in range(1, 7))) for n in range(40)]
    pd.DataFrame(rows, columns=["who", "where", "post"]).to_csv(tmp_path / "posts.csv", index=False)
    data = {"table": str(tmp_path / "posts.csv"), "client": "who", "text": "post", "context": "where"}
    base: dict[str, Any] = {
        "metric": "perplexity", "data": data, "model": {"name": "frozen", "pretrained": tiny_model()}
    }  # fmt: skip
    knobs: dict[str, dict[str, Any]] = {
        name: {"steps": 3, "lr": 0.03, "batch_size": 5} for name in ("fedpc", "fedpc-frozen", "fedpc-meta")
    }
    Comparison(base, tmp_path / "out", tuple(knobs), (0,), 1, tune=False, knobs=knobs).run()
    runs = tmp_path / "out" / "runs"
    parts.untuned(runs / "fedpc-seed0")
    found = json.loads((runs / "fedpc-seed0" / "untuned.json").read_text())
    frozen = pd.read_parquet(runs / "fedpc-frozen-seed0" / "clients.parquet").set_index("client")["query_perplexity"]
    tuned = pd.read_parquet(runs / "fedpc-seed0" / "clients.parquet").set_index("client")["query_perplexity"]
    assert found == pytest.approx(frozen.to_dict(), rel=1e-5)
    assert max(abs(tuned - frozen)) > 1e-4
    places = [runs / f"{name}-seed0" / "engine.json" for name in ("fedpc", "fedpc-meta")]
    engines = [json.loads(place.read_text())["reason"] for place in places]
    assert engines[0] == "a model that takes the rows of many clients in one batch"
    assert engines[1] != engines[0]  # last layers are too large for a chunk of clients: found out anew


def test_a_rate_at_the_edge_of_what_was_tried_is_told() -> None:
    tuning = [{"knobs": {"lr": lr, "mu": mu}} for lr in (0.1, 0.2, 0.3) for mu in (1.0,)]
    assert page._edges({"chosen": {"lr": 0.3, "mu": 1.0}, "tuning": tuning}) == {"lr": 0.3}
    assert page._edges({"chosen": {"lr": 0.2, "mu": 1.0}, "tuning": tuning}) == {}  # of mu there was no other
