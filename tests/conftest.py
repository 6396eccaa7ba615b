"""What all tests share: one torch thread, where the real data lies, and how hypothesis draws."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"

if DATA.is_dir():
    os.environ.setdefault("BESPOKE_DATA", str(DATA))

# No deadline: a shared machine may stall. Derandomized: a failure is the same for everyone; HYPOTHESIS_PROFILE=explore
# looks for new examples.
quiet = [HealthCheck.too_slow, HealthCheck.differing_executors]
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=quiet)
settings.register_profile("explore", deadline=None, max_examples=500, suppress_health_check=quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny models are faster with one thread; engines set the number of threads they are told."""
    torch.set_num_threads(1)


@pytest.fixture
def shared_data() -> Path:
    """The folder with the real datasets, or a reason to skip."""
    named = os.environ.get("BESPOKE_DATA")
    if not named or not Path(named).is_dir():
        pytest.skip("the real data is not here: set BESPOKE_DATA, or put it into ../shared/data")
    return Path(named)
