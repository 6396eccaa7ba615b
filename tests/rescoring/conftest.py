"""Tiny runs of language models: battles in one group, films in the other, each with words of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bespoke

FILM = ["red apples fall", "apples fall from trees", "red apples"]
BATTLE = ["ships sail over seas", "cold ships sail", "cold seas"]
STAGES = (
    {"method": "fedavg", "rounds": 6, "lr": 2.0, "batch_size": 4},
    {"method": "group-fl", "rounds": 4, "lr": 2.0, "batch_size": 4},
    {"method": "group-perfl", "lrs": [1.0], "epochs": 2, "batch_size": 4, "choose": "last"},
)


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Path]]:
    """Trains so many of the stages; returns the run folder."""
    data = tmp_path_factory.mktemp("words")
    (data / "wikitext103").mkdir()
    pages = [(f"Film {i}", FILM) for i in range(3)] + [(f"Battle {i}", BATTLE) for i in range(3)]
    text = "".join(f" = {title} = \n" + "".join(f" {line}\n" for line in 3 * lines) for title, lines in pages)
    (data / "wikitext103" / "wiki.train.tokens").write_text(text, encoding="utf-8")

    def trained(stages: int) -> Path:
        folder = tmp_path_factory.mktemp("runs") / "run"
        bespoke.run(
            {
                "seed": 0,
                "data": {"source": "wikitext103", "options": {"length": 6, "vocabulary": 20, "least": 2}},
                "model": {"name": "lstm", "embedding": 4, "hidden": 6, "layers": 1},
                "engine": {"workers": 0},
                "stage": list(STAGES[:stages]),
            },
            folder,
        )
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESPOKE_DATA", str(data))
        yield trained


@pytest.fixture(scope="session")
def run(train: Callable[[int], Path]) -> Path:
    """A run of GroupPerFL."""
    return train(3)
