"""How often the hub looks whether a task is done."""

from __future__ import annotations

from typing import Any

CHECK_PERIOD = 0.02  # seconds; FLARE's 0.2 would be most of a short round
TASK_REQUEST_INTERVAL = 0.05  # seconds between a site's questions for work, in a job's config_fed_server.json


def set_check_period(controller: Any, seconds: float = CHECK_PERIOD) -> None:
    """Sets the period of a controller that has its communicator, so from `start_controller` on.

    `Controller(task_check_period=...)` of FLARE 2.9 has no effect: it sets `task_check_period` of the communicator,
    which reads `_task_check_period`. tests/deploy/test_check_period.py fails when a version of FLARE mends that.
    """
    controller.communicator._task_check_period = seconds
