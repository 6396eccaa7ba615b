"""Copies of the rows for other processes: never longer there than needed, whatever becomes of their owner."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from bespoke.data.population import Population
from bespoke.data.shared_copy import SharedCopy

MADE = """
import time, torch
from bespoke.data.shared_copy import SharedCopy
from bespoke.data.population import Population
lent = SharedCopy(Population.build({"y": torch.zeros(2)}, ["a", "b"]))
print(lent.folder, flush=True)
time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def population() -> Population:
    return Population.build({"y": torch.tensor([1.0, 2.0])}, ["a", "b"])


def test_it_can_be_mapped_and_goes_when_it_is_closed(temporary: Path) -> None:
    lent = SharedCopy(population())
    assert Population.open(lent.folder).columns["y"].tolist() == [1.0, 2.0]
    lent.close()
    assert list(temporary.iterdir()) == []


def test_one_does_not_take_anothers(temporary: Path) -> None:
    first, second = SharedCopy(population()), SharedCopy(population())
    assert first.folder.exists()
    assert second.folder.exists()
    second.close()
    assert first.folder.exists()
    first.close()


def test_the_next_one_clears_what_a_killed_process_left(temporary: Path) -> None:
    """While it lives its folder stays; after kill -9 it stays until somebody comes."""
    process = subprocess.Popen([sys.executable, "-c", MADE], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    assert left.parent == temporary
    SharedCopy(population()).close()
    assert left.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert left.exists()
    SharedCopy(population()).close()
    assert list(temporary.iterdir()) == []


def test_a_folder_that_is_just_being_made_is_left_alone(temporary: Path) -> None:
    """It has no lock yet: a folder without one may be anybody's."""
    (temporary / "bespoke-population-other").mkdir()
    SharedCopy(population()).close()
    assert [path.name for path in temporary.iterdir()] == ["bespoke-population-other"]
