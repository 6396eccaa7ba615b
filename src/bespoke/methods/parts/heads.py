"""Splits a model into two parts: the last layer (head) and the layers below it (body)."""

from __future__ import annotations

from bespoke.task import Task
from bespoke.tensors import Params


def body_and_head(task: Task, params: Params) -> tuple[Params, Params]:
    """The parameters of the body, and those of the last layer."""
    head = {name: p for name, p in params.items() if name.startswith(task.last_layer)}
    return {name: p for name, p in params.items() if name not in head}, head
