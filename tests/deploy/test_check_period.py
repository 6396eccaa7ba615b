"""A canary: FLARE ignores a controller's check period, and bespoke sets it where FLARE reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.impl import wf_comm_server
from nvflare.apis.impl.controller import Controller
from nvflare.apis.impl.wf_comm_server import WFCommServer

from bespoke.deploy.flare.check_period import set_check_period


class Idle(Controller):
    def start_controller(self, fl_ctx: Any) -> None: ...

    def stop_controller(self, fl_ctx: Any) -> None: ...

    def control_flow(self, abort_signal: Any, fl_ctx: Any) -> None: ...


def pause(communicator: WFCommServer, monkeypatch: pytest.MonkeyPatch) -> float:
    """How long FLARE really sleeps between two looks at a task."""
    task = SimpleNamespace(props={}, completion_status=None, task_done_cb=None)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        task.completion_status = "done"

    monkeypatch.setattr(wf_comm_server, "time", SimpleNamespace(sleep=sleep))
    communicator.wait_for_task(task, None)
    return slept[0]


def test_flare_ignores_the_period_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when FLARE is mended: then `set_check_period` can go."""
    controller = Idle(task_check_period=0.05)
    controller.set_communicator(WFCommServer())
    assert pause(controller.communicator, monkeypatch) == 0.2


def test_the_period_is_set_where_flare_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Idle()
    controller.set_communicator(WFCommServer())
    set_check_period(controller, 0.03)
    assert pause(controller.communicator, monkeypatch) == 0.03
