"""bespoke: personalized federated learning. Models to measure."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public names and where they live; imported when first used, so that `import bespoke` is instant.
_PUBLIC = {
    "Callback": "bespoke.callbacks.callback",
    "EarlyStop": "bespoke.callbacks.early_stop",
    "TensorBoard": "bespoke.callbacks.tensorboard",
    "MLflow": "bespoke.callbacks.mlflow",
    "WandB": "bespoke.callbacks.wandb",
    "Comparison": "bespoke.study.comparison",
    "Experiment": "bespoke.experiment.experiment",
    "METHODS": "bespoke.methods",
    "Method": "bespoke.method",
    "Population": "bespoke.data.population",
    "Result": "bespoke.report.result",
    "Run": "bespoke.runs.training",
    "RunFolder": "bespoke.runs.folder",
    "Stage": "bespoke.experiment.experiment",
    "UserError": "bespoke.errors",
    "build": "bespoke.experiment.build",
    "compare": "bespoke.api",
    "forget": "bespoke.api",
    "generate": "bespoke.api",
    "load_personal": "bespoke.deploy.export",
    "metric": "bespoke.models.own_metric",
    "model": "bespoke.models.own.model",
    "population": "bespoke.data.arrays",
    "write_population": "bespoke.data.arrays",
    "load_source": "bespoke.data.sources.registry",
    "read_config": "bespoke.experiment.reading",
    "read_table": "bespoke.data.tables.table",
    "register": "bespoke.doors",
    "run": "bespoke.api",
    "trust": "bespoke.imported",
    "summarize": "bespoke.report.report",
    "tune": "bespoke.api",
    "write_report": "bespoke.report.page",
}

__all__ = [*sorted(_PUBLIC), "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'bespoke' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
