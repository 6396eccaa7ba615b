"""A federation on several machines, with NVIDIA FLARE, which only the extra `deploy` installs."""

from importlib.util import find_spec

from bespoke.errors import needs_extra

if find_spec("nvflare") is None:
    raise needs_extra("nvflare", "deploy", "a federation on several machines")
