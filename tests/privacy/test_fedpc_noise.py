"""FedPC under [privacy]: the noise that was added is the noise that was accounted for, and psi stays on its client."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import load_file
from scipy.stats import norm

import bespoke as library

pytest.importorskip("transformers")
pytest.importorskip("dp_accounting")

ROUNDS, CLIENTS = 3, 5


def test_the_ledgers_noise_gives_the_epsilon_that_is_reported(tmp_path: Path) -> None:
    from small_language import tiny_model

    rows = [(f"u{n % CLIENTS}", f"c{n % 2}", f"w{n} w{n + 1} w{n + 2} w{n + 3} w{n + 4}") for n in range(50)]
    pd.DataFrame(rows, columns=["who", "where", "post"]).to_csv(tmp_path / "posts.csv", index=False)
    path, budget = tmp_path / "run", {"clip": 0.5, "epsilon": 8.0, "delta": 0.01}
    library.run(
        {
            "metric": "perplexity", "watched": 1, "cohort": {"sampling": "full"}, "privacy": budget,
            "data": {"table": str(tmp_path / "posts.csv"), "client": "who", "text": "post", "context": "where"},
            "model": {"name": "frozen", "pretrained": tiny_model()},
            "stage": [{"method": "fedpc", "rounds": ROUNDS, "steps": 2, "tune_steps": 1, "batch_size": 4, "lr": 0.03}],
        },
        path,
    )  # fmt: skip
    ledger = [json.loads(line) for line in (path / "ledger.jsonl").read_text().splitlines()]
    trained = [line for line in ledger if line.get("noise")]
    assert len(trained) == ROUNDS
    assert all(line["revealed"] == {"delta": "SUM", "uses": "SUM", "weight": "COUNT"} for line in trained)
    deviations = {sd for line in trained for sd in line["noise"]["sum"].values()}
    assert len(deviations) == 1
    # one client more or less moves the sum of all hidden fields by up to the bound: a Gaussian mechanism a round
    mu = ROUNDS**0.5 * 0.5 / deviations.pop()
    told = json.loads((path / "result.json").read_text())["privacy"]["released"]
    assert told["mu"] == pytest.approx(mu, rel=1e-6)
    epsilon = told["epsilon"]
    delta = norm.cdf(mu / 2 - epsilon / mu) - pow(2.718281828459045, epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(0.01, rel=1e-3)
    assert 7.5 < epsilon <= 8.0

    (file,) = (path / "private").glob("*.safetensors")
    kept = load_file(file)["rows"].numpy()  # bytes of psi and Adam's moments, a row for each client
    assert len(kept) == CLIENTS
    pieces = {row[at : at + 16].tobytes() for row in kept for at in range(0, len(row) - 15, 16)}
    assert len(pieces) > 50
    others = [f.read_bytes() for f in path.rglob("*") if f.is_file() and f.parent.name != "private"]
    assert not any(piece in other for piece in pieces if any(piece) for other in others)
