"""Callbacks by name."""

from __future__ import annotations

from typing import Any

from bespoke.callbacks.callback import Callback
from bespoke.callbacks.early_stop import EarlyStop
from bespoke.callbacks.mlflow import MLflow
from bespoke.callbacks.tensorboard import TensorBoard
from bespoke.callbacks.wandb import WandB
from bespoke.errors import UserError
from bespoke.registry import Registry


def _checked(found: Any, where: str) -> type[Callback]:
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise UserError(f"{where} is not a callback: it must be a class that inherits bespoke.Callback")
    return found


_OURS: dict[str, type[Callback]] = {
    "early-stop": EarlyStop, "tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB,
}  # fmt: skip
CALLBACKS: Registry[type[Callback]] = Registry("callback", "bespoke.callbacks", _OURS, _checked)
