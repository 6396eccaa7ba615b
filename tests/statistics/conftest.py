"""Writes run folders and comparison folders as `bespoke run` and `bespoke compare` lay them out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

PARAMETERS = 100


def make_run(
    folder: Path,
    label: str,
    seed: int,
    values: Sequence[float],
    clients: Sequence[str],
    *,
    metric: str = "mse",
    lower: bool = True,
    baseline: Sequence[float] | None = None,
    groups: Sequence[str] | None = None,
    examples: Sequence[int] | None = None,
    query: Sequence[int] | None = None,
    rounds: int = 4,
    personalization_steps: int = 0,
    curve: Sequence[float] | None = None,
    rows: Mapping[str, Sequence[float]] | None = None,
    reported: int | None = None,
    **result: Any,
) -> Path:
    """One finished run; every other number follows from these."""
    folder.mkdir(parents=True, exist_ok=True)
    n = len(clients)
    examples = list(examples or [10 * (i + 1) for i in range(n)])
    query = list(query or [5] * n)
    pd.DataFrame(
        {
            "client": list(clients),
            "group": list(groups or [""] * n),
            "train_examples": examples,
            "support_examples": examples,
            "validation_examples": query,
            "query_examples": query,
            "candidate": ["epoch 1"] * n,
            f"query_{metric}": np.asarray(values, float),
            f"validation_{metric}": np.asarray(values, float),
            f"baseline_{metric}": np.asarray(values if baseline is None else baseline, float),
            "query_mae": np.sqrt(np.abs(np.asarray(values, float))),
        }
    ).to_parquet(folder / "clients.parquet")
    if rows is not None:  # the values of each client's test rows; the same place is the same row in every run
        write_rows(folder, rows)
        result.setdefault("rows_metric", metric)
    payload = 4 * PARAMETERS
    round_lines, ledger = [], []
    for r in range(rounds + 1):
        down = payload * n if r else 0
        back = n if reported is None else reported  # clients whose update arrived
        seen = curve[r] if curve is not None else float(np.mean(values)) * (1 + 1 / (r + 1))
        round_lines.append(
            {"stage": 0, "method": label, "round": r, "clients": n if r else 0, "excluded": [], "dropped": 0,
             "bytes_down": down, "bytes_up": payload * back if r else 0,
             "steps": 6 * back if r else 0, "examples": 60 * n if r else 0,
             "validation": {metric: seen} if r % 2 == 0 else None}
        )  # fmt: skip
        if r:
            ledger.append(
                {"stage": 0, "round": r, "method": label, "contacted": n, "reported": back, "bytes_down": down,
                 "bytes_up": payload * back, "steps": 6 * back, "revealed": {"delta": "SUM", "weight": "SUM"}}
            )  # fmt: skip
    ledger.append(
        {"round": None, "phase": "personalization", "bytes_down": payload * n, "steps": personalization_steps * n}
    )
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in round_lines))
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ledger))
    head = f'label = "{label}"\nseed = {seed}\nmetric = "{metric}"\n'
    (folder / "config.toml").write_text(head + '\n[data]\nname = "toy"\n')
    record = {
        "format": 1, "label": label, "seed": seed, "metric": metric, "lower_is_better": lower,
        "metrics": [metric, "mae"], "lower": ["mae", *([metric] if lower else [])], "protocol": "cross-silo",
        "clients": n, "unevaluated": 0, "rounds": rounds, "bytes_down": payload * n * (rounds + 1),
        "bytes_up": payload * n * rounds, "steps": (6 * rounds + personalization_steps) * n, "parameters": PARAMETERS,
        "excluded": {}, "chosen": {"rate": 0.1}, "notes": [],
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(record | result))
    return folder


def write_rows(folder: Path, rows: Mapping[str, Sequence[float]]) -> None:
    """Writes rows.parquet: one value of the metric for each test row of each client."""
    flat = [(client, row, value) for client, values in rows.items() for row, value in enumerate(values)]
    table = pd.DataFrame(flat, columns=["client", "row", "value"]).astype({"row": "int64", "value": "float64"})
    table.to_parquet(folder / "rows.parquet")


def make_comparison(
    folder: Path,
    values: Mapping[str, Sequence[Sequence[float]]],
    clients: Sequence[str] | None = None,
    *,
    baseline: str = "fedavg",
    compare: Mapping[str, Any] | None = None,
    references: Mapping[str, Sequence[Sequence[float]]] | None = None,
    **options: Any,
) -> Path:
    """A comparison: for every method, one list of client values per seed. All but the baseline are personal."""
    seeds = range(len(next(iter(values.values()))))
    clients = list(clients or [f"client {i:02d}" for i in range(len(next(iter(values.values()))[0]))])
    for label, by_seed in values.items():
        for seed in seeds:
            before = values[baseline][seed] if baseline in values else by_seed[seed]
            make_run(
                folder / "runs" / f"{label}-seed{seed}", label, seed, by_seed[seed], clients,
                baseline=before, personalization_steps=0 if label == baseline else 12, **options,
            )  # fmt: skip
    for label, by_seed in (references or {}).items():
        for seed in seeds:
            make_run(folder / "runs" / f"{label}-seed{seed}", label, seed, by_seed[seed], clients, **options)
    record = {
        "format": 1, "title": "A toy comparison", "question": "Does it help?", "metric": options.get("metric", "mse"),
        "lower_is_better": options.get("lower", True), "baseline": baseline,
        "methods": [
            {"label": label, "title": label.capitalize(), "summary": f"What {label} does.",
             "travels": {"delta": "the change of the model"}, "private": {"rows": "the client's rows"},
             "personal": "the fine-tuned model", "unseen": "the shared model", "stages": [], "chosen": {"rate": 0.1},
             "tuning": [{"knobs": {"rate": 0.1}, "validation": 1.0}, {"knobs": {"rate": 0.01}, "validation": 2.0}]}
            for label in values
        ],
        "references": [{"label": label, "title": label.capitalize(), "what": "not federated"}
                       for label in references or {}],
        "seeds": list(seeds),
        "data": {"name": "toy", "title": "Toy data", "clients": len(clients), "examples": 100, "groups": 0,
                 "features": ["x"], "target": "y", "task": "regression", "licence": "none",
                 "notes": ["Nothing missing."]},
        "split": {"protocol": "cross-silo"}, "model": {"name": "linear", "parameters": PARAMETERS},
        "engine": {"text": "vectorized over clients"}, "command": "bespoke compare toy.toml",
        "versions": {"torch": "2"},
    }  # fmt: skip
    (folder / "compare.json").write_text(json.dumps(record | dict(compare or {})))
    return folder


# As fixtures, because two folders' conftest modules cannot both be imported by that name.
@pytest.fixture
def write_run() -> Callable[..., Path]:
    return make_run


@pytest.fixture
def write_comparison() -> Callable[..., Path]:
    return make_comparison


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Four clients, two seeds; fine-tuning helps three of them and hurts client 03 in both seeds."""
    return make_comparison(
        tmp_path / "toy",
        {
            "fedavg": [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]],
            "finetune": [[0.5, 1.0, 2.5, 5.0], [0.5, 1.5, 2.5, 4.5]],
        },
    )
