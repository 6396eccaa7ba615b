"""Where the data tests find data: the real files beside the repo, or an empty folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch) -> Path:
    if not REAL.is_dir():
        pytest.skip("the real data is not beside the repo (../shared/data)")
    monkeypatch.setenv("BESPOKE_DATA", str(REAL))
    return REAL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which sources look for their files, and nowhere else."""
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"
