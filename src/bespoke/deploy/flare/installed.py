"""Whether NVIDIA FLARE is there, which only the extra `deploy` installs."""

from __future__ import annotations

from importlib.util import find_spec

from bespoke.errors import needs_extra


def require_flare() -> None:
    """Refuses with the name of the extra if FLARE is missing."""
    if find_spec("nvflare") is None:
        raise needs_extra("nvflare", "deploy", "a federation on several machines")
