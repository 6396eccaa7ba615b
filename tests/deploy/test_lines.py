"""The hub's line to a site, without FLARE's processes: an answer that is late, one that never comes, one of before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.controller_spec import Task
from nvflare.apis.shareable import Shareable

from bespoke.deploy.flare.controller import SiteLine
from bespoke.deploy.flare.executor import MESSAGE
from bespoke.errors import RemoteLost
from bespoke.federation.remote import Late


class Hub:
    """What a line needs of the hub's controller; `late`: seconds."""

    def __init__(self, late: float = 0.1) -> None:
        self.late, self.context = late, None
        self.away: dict[str, float] = {}
        self.seen: dict[str, float] = {}
        self.tasks: list[Task] = []
        self.cancelled: list[Task] = []
        self.ended = False

    def send(self, task: Task, context: Any, targets: list[str]) -> None:
        assert targets == ["north"]
        self.tasks.append(task)

    def cancel_task(self, task: Task) -> None:
        self.cancelled.append(task)

    def dead(self, name: str) -> bool:
        return self.ended

    def check_abort(self) -> None:
        pass

    def fetched(self, place: int = -1) -> None:
        task = self.tasks[place]
        task.after_task_sent_cb(SimpleNamespace(task=task), None)

    def answered(self, reply: bytes, place: int = -1) -> None:
        task, result = self.tasks[place], Shareable()
        result[MESSAGE] = reply
        task.result_received_cb(SimpleNamespace(task=task, result=result), None)


def asked(late: float = 0.1) -> tuple[Any, SiteLine]:
    """A line on which a message was sent and fetched."""
    hub: Any = Hub(late)
    line = SiteLine(hub, "north")
    line.send(b"train")
    hub.fetched()
    return hub, line


def test_a_late_answer_is_received_when_it_is_there() -> None:
    hub, line = asked()
    with pytest.raises(Late, match=r"site north: it is late: no answer within 0\.1 seconds"):
        line.receive()
    assert line.alive()
    assert not line.ready()
    assert not hub.cancelled
    hub.answered(b"sums")
    assert line.ready()
    assert line.receive() == b"sums"
    line.send(b"next")  # late anew, if it is
    hub.fetched()
    with pytest.raises(Late):
        line.receive()


def test_a_site_that_is_late_twice_is_lost() -> None:
    hub, line = asked()
    with pytest.raises(Late):
        line.receive()
    with pytest.raises(RemoteLost, match=r"site north is lost: it is late: .* twice") as lost:
        line.receive()
    assert not isinstance(lost.value, Late)
    assert hub.cancelled == hub.tasks
    assert not line.alive()


def test_a_late_site_whose_process_ends_is_ready_to_be_lost() -> None:
    hub, line = asked()
    with pytest.raises(Late):
        line.receive()
    hub.ended = True
    assert line.ready()
    with pytest.raises(RemoteLost, match="its job process has ended") as lost:
        line.receive()
    assert not isinstance(lost.value, Late)


def test_an_answer_to_an_earlier_message_is_not_taken_for_the_next() -> None:
    hub, line = asked(5.0)
    line.send(b"next")
    hub.fetched()
    hub.answered(b"of before", 0)
    assert not line.ready()
    hub.answered(b"of now")
    assert line.receive() == b"of now"
