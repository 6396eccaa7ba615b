"""bespoke: personalized federated learning. Models to measure."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public names and where they live; imported when first used, so that `import bespoke` is instant.
_PUBLIC = {
    "Comparison": "bespoke.comparison",
    "Experiment": "bespoke.stages",
    "METHODS": "bespoke.methods",
    "Method": "bespoke.method",
    "Population": "bespoke.data.population",
    "Run": "bespoke.rounds",
    "RunFolder": "bespoke.runfolder",
    "Stage": "bespoke.stages",
    "UserError": "bespoke.errors",
    "build": "bespoke.experiments",
    "compare": "bespoke.api",
    "forget": "bespoke.api",
    "generate": "bespoke.api",
    "load_personal": "bespoke.deploy.personal",
    "load_source": "bespoke.data.sources",
    "read_config": "bespoke.config",
    "read_table": "bespoke.data.table",
    "run": "bespoke.api",
    "summarize": "bespoke.metrics.summary",
    "tune": "bespoke.api",
    "write_report": "bespoke.reports.html",
}

__all__ = [*sorted(_PUBLIC), "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'bespoke' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
