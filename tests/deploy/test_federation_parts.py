"""The parts of a FLARE job without FLARE's processes: what an executor answers, and what a job holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from bespoke.deploy.federated.rules import Rules
from bespoke.deploy.flare.executor import MESSAGE, TASK, SiteExecutor, rules_of
from bespoke.deploy.flare.hardened import CONTROLLER, EXECUTOR
from bespoke.deploy.flare.job import Federation, write_job
from bespoke.errors import RemoteLost, UserError
from bespoke.federation.calls import Call
from bespoke.federation.roster import Roster
from bespoke.federation.wire import decode_answer, encode_call
from deploy.sites_here import site
from test_protocol import FEDAVG, asked, people


def executor(folder: Path) -> SiteExecutor:
    made = SiteExecutor()
    made.site = site(people(), folder)
    return made


def asked_of(one: SiteExecutor, message: Any, task: str = TASK) -> Shareable:
    data = Shareable()
    data[MESSAGE] = message
    return one.execute(task, data, FLContext(), Signal())


def test_an_executor_answers_bytes_with_bytes(tmp_path: Path) -> None:
    reply = asked_of(executor(tmp_path), encode_call(Call("hello")))
    assert reply.get_return_code() == ReturnCode.OK
    roster = decode_answer(reply[MESSAGE], "hello")
    assert isinstance(roster, Roster)
    assert list(roster.ids) == list(people().ids)


@pytest.mark.parametrize("message", ["text", 7, None, {"a": b"b"}])
def test_anything_but_bytes_is_refused(message: Any, tmp_path: Path) -> None:
    assert asked_of(executor(tmp_path), message).get_return_code() == ReturnCode.BAD_TASK_DATA
    assert (
        asked_of(executor(tmp_path), encode_call(Call("hello")), "train").get_return_code() == ReturnCode.BAD_TASK_DATA
    )


def test_a_tampered_or_oversized_message_is_refused_and_the_job_lives(tmp_path: Path) -> None:
    one = executor(tmp_path)
    message = bytearray(encode_call(Call("describe", {"config": {"seed": 1}, "learned": None})))
    message[60] ^= 4
    reply = asked_of(one, bytes(message))
    assert reply.get_return_code() == ReturnCode.OK  # any other would end the job for all sites
    with pytest.raises(UserError, match="the message was damaged on its way"):
        decode_answer(reply[MESSAGE], "describe")
    assert one.site is not None
    one.site.limit = 120
    reply = asked_of(one, encode_call(Call("describe", {"config": {"seed": 1}, "learned": None})))
    with pytest.raises(UserError, match=r"a message of \d+ bytes was refused: the limit is 120"):
        decode_answer(reply[MESSAGE], "describe")
    one.site.limit = 2**20
    roster: Roster = decode_answer(asked_of(one, encode_call(Call("hello")))[MESSAGE], "hello")
    assert roster.ids[0] == "client 00"


def test_a_site_that_cannot_open_says_no_more_than_that(tmp_path: Path) -> None:
    """Its rows are gone: the hub hears that the site is lost, the site's own log says why."""
    reply = asked_of(SiteExecutor(), encode_call(Call("hello")))  # a context without a workspace
    assert reply.get_return_code() == ReturnCode.OK
    with pytest.raises(RemoteLost, match=r"the site cannot answer \(AssertionError\); see its log"):
        decode_answer(reply[MESSAGE], "hello")


def test_a_job_is_settings_alone_and_names_its_sites(tmp_path: Path) -> None:
    folder = write_job(tmp_path / "job", "exp", ["east", "west"], 60.0)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"meta.json", "app/config/config_fed_server.json", "app/config/config_fed_client.json"}
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["deploy_map"] == {"app": ["server", "east", "west"]}
    text = "".join((folder / name).read_text() for name in files)
    assert text.count('"path": ') == 2
    assert f'"path": "{CONTROLLER}"' in text
    assert f'"path": "{EXECUTOR}"' in text
    assert "all" not in meta["deploy_map"]["app"]


def test_a_run_has_a_name_that_is_no_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be the name of a run"):
        Federation(tmp_path, asked([FEDAVG]), "../elsewhere")


def test_a_sites_settings_are_its_rules() -> None:
    said = {"least": 4, "epsilon": 2.0, "delta": 1e-4, "methods": ["ditto"], "share_clients": True}
    assert rules_of(said) == Rules(4, 2.0, 1e-4, ("ditto",), True)
    assert rules_of({"least": 1, "models": ["mine:net"]}) == Rules(1, models=("mine:net",))
    with pytest.raises(UserError, match="a budget needs an epsilon above zero and a delta between 0 and 1"):
        rules_of({"least": 1, "epsilon": 1.0, "delta": None})
    with pytest.raises(UserError, match="'shell' is not built in"):
        rules_of({"least": 1, "methods": ["shell"]})
