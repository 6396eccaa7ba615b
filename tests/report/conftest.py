"""The fake run folders of tests/statistics serve here too."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

_path = Path(__file__).parents[1] / "statistics" / "conftest.py"
_spec = importlib.util.spec_from_file_location("fake_run_folders", _path)
assert _spec
assert _spec.loader
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
toy, write_comparison, write_run = _module.toy, _module.write_comparison, _module.write_run


@pytest.fixture(scope="session")
def make_comparison() -> Callable[..., Path]:
    """As `write_comparison`, for folders that several tests look at."""
    return _module.make_comparison
