"""A run killed at any instant resumes to identical bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bespoke.errors import UserError
from bespoke.runs.folder import Checkpoint, RunFolder, read_checkpoint
from bespoke.storage import open_arrays, write_arrays
from kills import KILLED, Driver, assert_identical, contents

EVERYWHERE = os.environ.get("BESPOKE_KILLS") == "everywhere"  # every event, every way: minutes instead of seconds


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.close()


Reference = tuple[dict[str, bytes], list[str], float]


@pytest.fixture(scope="module")
def references(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """Each plan run to its end: its files, its events, and how long it took."""
    found: dict[str, Reference] = {}
    for plan in ("ditto", "finetune", "changes", "reproducible", "early"):
        folder = tmp_path_factory.mktemp(plan)
        done = driver.run(folder / "run", plan, census=str(folder / "census.json"))
        assert done["code"] == 0
        found[plan] = contents(folder / "run"), json.loads((folder / "census.json").read_text()), done["seconds"]
    return found


def test_two_runs_are_identical(driver: Driver, references: dict[str, Reference], tmp_path: Path) -> None:
    for plan, (expected, events, _) in references.items():
        assert driver.run(tmp_path / plan, plan)["code"] == 0
        assert_identical(contents(tmp_path / plan), expected, plan)
        assert {"result.json", "clients.parquet", "choices.json", "rounds.jsonl", "ledger.jsonl"} <= expected.keys()
        assert {"replace", "append", "unlink"} <= set(events)
        assert ("stopped" in json.loads(expected["result.json"])) == (plan == "early")  # by a callback
        again = driver.run(tmp_path / plan, plan)  # a finished run stays as it is
        assert again["code"] == 0
        assert_identical(contents(tmp_path / plan), expected, plan)


@pytest.mark.parametrize(
    ("plan", "kills"), [("ditto", 14), ("finetune", 5), ("changes", 8), ("reproducible", 8), ("early", 6)]
)
def test_killed_from_inside(
    driver: Driver, references: dict[str, Reference], tmp_path: Path, plan: str, kills: int
) -> None:
    """Before, amid or after a random event of the folder; half of the time the resumed run is killed again."""
    expected, events, _ = references[plan]
    draw = random.Random(7)
    chosen = [(int(len(events) * (i + draw.random()) / kills), draw.choice(["before", "amid", "after"]))
              for i in range(kills)]  # fmt: skip
    if EVERYWHERE:
        chosen = [(at, when) for at in range(len(events)) for when in ("before", "amid", "after")]
    for at, when in chosen:
        folder = tmp_path / f"{at}-{when}"
        story = f"{plan}: killed {when} event {at} ({events[at]})"
        assert driver.run(folder, plan, at=at, when=when)["code"] == KILLED, story
        if draw.random() < 0.5:
            second = draw.randrange(10)
            story += f", again before event {second}"
            assert driver.run(folder, plan, at=second)["code"] in (KILLED, 0), story
        assert driver.run(folder, plan)["code"] == 0, story
        assert_identical(contents(folder), expected, story)
        shutil.rmtree(folder)


@pytest.mark.parametrize(("plan", "kills"), [("ditto", 6), ("finetune", 2)])
def test_killed_from_outside(
    driver: Driver, references: dict[str, Reference], tmp_path: Path, plan: str, kills: int
) -> None:
    expected, _, seconds = references[plan]
    draw = random.Random(11)
    for number in range(kills):
        folder = tmp_path / str(number)
        delay = seconds * (number + draw.random()) / kills
        story = f"{plan}: killed after {delay:.3f} s of {seconds:.3f}"
        assert driver.run(folder, plan, delay=delay)["code"] in (KILLED, 0), story
        assert driver.run(folder, plan)["code"] == 0, story
        assert_identical(contents(folder), expected, story)


def test_checkpoints_may_be_far_apart(driver: Driver, references: dict[str, Reference], tmp_path: Path) -> None:
    """With a checkpoint at the end of stages only, a kill loses the stage, and the results are the same."""
    _, events, _ = references["ditto"]
    assert driver.run(tmp_path / "whole", "ditto", seconds=1e9)["code"] == 0
    expected = contents(tmp_path / "whole")
    for name in ("result.json", "clients.parquet", "rounds.jsonl", "ledger.jsonl", "choices.json"):
        assert expected[name] == references["ditto"][0][name]  # how often it is saved changes no result
    for at in (len(events) // 4, len(events) // 2):
        folder = tmp_path / str(at)
        assert driver.run(folder, "ditto", seconds=1e9, at=at)["code"] in (KILLED, 0)
        assert driver.run(folder, "ditto", seconds=1e9)["code"] == 0
        assert_identical(contents(folder), expected, f"killed at {at}")


def test_saved_often_then_rarely_leaves_no_stray_private_state(driver: Driver, tmp_path: Path) -> None:
    """A segment written for a checkpoint that never came must not lie about: it is private state nobody knows of."""
    done = driver.run(tmp_path / "run", "ditto", census=str(tmp_path / "census.json"))
    assert done["code"] == 0
    saved = [path.name for path in (tmp_path / "run" / "private").iterdir()]
    shutil.rmtree(tmp_path / "run")
    assert saved == ["001-0000005-0.safetensors"]  # of all clients that took part, as the last round left them
    stray = next(
        at for at in range(1000) if _killed_with_stray(driver, tmp_path / f"run {at}", at, skip=40)
    )  # fmt: skip
    folder = tmp_path / f"run {stray}"
    assert driver.run(folder, "ditto", seconds=1e9)["code"] == 0
    found = RunFolder(folder).latest()
    assert found is not None
    assert sorted(p.name for p in (folder / "private").iterdir()) == sorted(found.segments)


def _killed_with_stray(driver: Driver, folder: Path, at: int, skip: int) -> bool:
    """Whether a kill after this event leaves a segment that the newest checkpoint does not name."""
    driver.run(folder, "ditto", at=at + skip, when="after")
    newest = RunFolder(folder).latest()
    there = {path.name for path in (folder / "private").glob("*.safetensors")}
    return newest is not None and newest.round > 0 and bool(there - set(newest.segments))


def test_killed_with_workers(driver: Driver, references: dict[str, Reference], tmp_path: Path) -> None:
    """Two workers hold the private state; killed in the stateful stage, resumed by two others."""
    _, events, _ = references["ditto"]
    assert driver.run(tmp_path / "whole", "ditto", workers=2)["code"] == 0
    expected = contents(tmp_path / "whole")
    late = int(len(events) * 0.7)
    assert driver.run(tmp_path / "killed", "ditto", workers=2, at=late, when="amid")["code"] == KILLED
    assert any((tmp_path / "killed" / "private").iterdir())
    assert driver.run(tmp_path / "killed", "ditto", workers=2)["code"] == 0
    assert_identical(contents(tmp_path / "killed"), expected, f"killed at {late} of {len(events)}")


# -- checkpoints -------------------------------------------------------------------------------------------------------
def interrupted(driver: Driver, references: dict[str, Reference], folder: Path) -> None:
    """A run that stands in the middle of its second stage."""
    events = references["ditto"][1]
    assert driver.run(folder, "ditto", at=int(len(events) * 0.75))["code"] == KILLED


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("*.safetensors"))


@pytest.mark.parametrize("damage", ["empty", "short", "flipped", "nonsense"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    driver: Driver, references: dict[str, Reference], tmp_path: Path, damage: str
) -> None:
    interrupted(driver, references, tmp_path / "run")
    path = newest(tmp_path / "run")
    whole = bytearray(path.read_bytes())
    if damage == "flipped":
        whole[-3] ^= 1  # one bit of a parameter
    ruined = {"empty": b"", "short": whole[: len(whole) // 2], "flipped": whole, "nonsense": b"x" * 100}[damage]
    path.write_bytes(bytes(ruined))
    before = RunFolder(tmp_path / "run").latest()
    assert before is not None
    assert f"{before.stage:03d}-{before.round:07d}" < path.name
    assert driver.run(tmp_path / "run", "ditto")["code"] == 0
    assert_identical(contents(tmp_path / "run"), references["ditto"][0], damage)


def test_when_no_checkpoint_can_be_read_the_run_says_so(
    driver: Driver, references: dict[str, Reference], tmp_path: Path
) -> None:
    interrupted(driver, references, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint of .* can be used: .*empty"):
        RunFolder(tmp_path / "run").latest()


def test_another_format_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    folder.save(Checkpoint(0, 1, {"params": {"w": torch.ones(2)}}, {}, [], {}))
    path = newest(tmp_path / "run")
    arrays, about = open_arrays(path)
    described = {**json.loads(about["bespoke"]), "format": 99}
    write_arrays(path, {n: a.clone() for n, a in arrays.items()}, {"bespoke": json.dumps(described)})
    with pytest.raises(UserError, match=r"written by another version \(format 99, known: 2\)"):
        read_checkpoint(path)
    with pytest.raises(UserError, match="another version"):
        folder.latest()
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(UserError, match="not a checkpoint of bespoke"):
        read_checkpoint(path)


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name appears only when all bytes are on disk; a failure leaves the old ones and nothing else."""
    folder = RunFolder.create(tmp_path / "run", "")
    server = {"params": {"w": torch.arange(1000.0)}, "optimizer": {"time": torch.tensor(3)}}
    folder.save(Checkpoint(0, 1, server, {"rounds.jsonl": (0, None)}, ["a"], {"k": 1}))
    order: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (order.append("fsync"), fsync(descriptor))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b))[1])
    folder.save(Checkpoint(0, 2, server, {}, [], {}))
    assert order[-2:] == ["fsync", "replace"]  # logs first, then the file, then its name

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        folder.save(Checkpoint(0, 3, server, {}, [], {}))
    found = folder.latest()
    assert found is not None
    assert found.round == 2
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "000-0000001.safetensors", "000-0000002.safetensors",
    ]  # fmt: skip
    first = read_checkpoint(tmp_path / "run" / "checkpoints" / "000-0000001.safetensors")
    assert (first.stage, first.round, first.segments, first.about) == (0, 1, ["a"], {"k": 1})
    assert torch.equal(first.server["params"]["w"], server["params"]["w"])
    assert int(first.server["optimizer"]["time"]) == 3


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    for stage, number in [(0, -1), (0, 1), (0, 2), (1, -1), (1, 1), (1, 2), (1, 3)]:
        folder.save(Checkpoint(stage, number, {"w": torch.tensor(float(number))}, {}, [], {}))
        found = folder.latest()
        assert found is not None
        assert (found.stage, found.round) == (stage, number)
    kept = [path.stem for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert kept == ["001--000001", "001-0000002", "001-0000003"]  # where the stage began, and the last two


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "")
    with folder.locked(), pytest.raises(UserError, match="in use by another process"), folder.locked():
        pass


def test_another_experiment_does_not_go_on_with_the_folder(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", "seed = 1\n")
    RunFolder.create(tmp_path / "run", "seed = 1\n")
    with pytest.raises(UserError, match="another"):
        RunFolder.create(tmp_path / "run", "seed = 2\n")
    assert (tmp_path / "run" / "config.toml").read_text() == "seed = 1\n"


# -- the command line --------------------------------------------------------------------------------------------------
TOML = """
seed = 1
[data]
source = "synthetic"
options = { clients = 30, examples = 12, features = 4 }
[cohort]
size = 20
[[stage]]
method = "fedavg"
rounds = 1500
lr = 0.05
[[stage]]
method = "finetune"
epochs = 2
lrs = [0.1]
"""


def bespoke(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bespoke", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_leaves_a_run_that_can_go_on(tmp_path: Path) -> None:
    (tmp_path / "exp.toml").write_text(TOML)
    arguments = ["run", str(tmp_path / "exp.toml"), "--json", "--out"]
    whole = bespoke(*arguments, str(tmp_path / "whole"))
    stopped = bespoke(*arguments, str(tmp_path / "stopped"))
    log = tmp_path / "stopped" / "rounds.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().count("\n") > 3):
        assert time.monotonic() < deadline
        assert stopped.poll() is None, stopped.communicate()
        time.sleep(0.005)
    stopped.send_signal(signal.SIGINT)
    _, said = stopped.communicate(timeout=60)
    assert stopped.returncode == 130
    assert "--resume" in said
    assert "Traceback" not in said
    assert not (tmp_path / "stopped" / "result.json").exists()
    assert 3 < log.read_text().count("\n") < 1500
    assert whole.wait(timeout=120) == 0
    resumed = bespoke(*arguments, str(tmp_path / "stopped"), "--resume")
    out, said = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, said
    results = {name: contents(tmp_path / name) for name in ("whole", "stopped")}
    assert_identical(results["stopped"], results["whole"], "Ctrl-C")
    assert json.loads(out)["query"] == json.loads(results["whole"]["result.json"])["query"]


def helpers(process: subprocess.Popen[str]) -> list[int]:
    """The worker processes of a process."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes())


def until(happens: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_killed_workers_and_parents_and_sigterm(tmp_path: Path) -> None:
    """Each end is told for what it is and leaves a run that goes on, to what an undisturbed run leaves."""
    (tmp_path / "exp.toml").write_text(TOML.replace("rounds = 1500", "rounds = 80") + "[engine]\nworkers = 2\n")
    out, log = tmp_path / "run", tmp_path / "run" / "rounds.jsonl"
    command = ["run", str(tmp_path / "exp.toml"), "--json", "--out", str(out)]

    def begun(*more: str) -> tuple[subprocess.Popen[str], list[int]]:
        running = bespoke(*command, *more)
        before = log.read_text().count("\n") if log.exists() else 0
        until(lambda: log.exists() and log.read_text().count("\n") > before + 5, running)
        return running, helpers(running)

    running, workers = begun()
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "Traceback" not in said
    assert f"(process {workers[1]}) was killed (signal 9, SIGKILL), as the operating system does" in said
    assert "of 2" in said
    assert said.rstrip().endswith(f"--out {out} --resume")

    running, _ = begun("--resume")
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert f"go on with: bespoke run {tmp_path / 'exp.toml'} --json --out {out} --resume" in said

    running, _ = begun("--resume")
    os.kill(running.pid, signal.SIGKILL)
    _, said = running.communicate(timeout=20)  # returns when the last worker has ended: they hold stderr open
    assert said == ""

    finished = bespoke(*command, "--resume")
    _, said = finished.communicate(timeout=120)
    assert finished.returncode == 0, said
    command[-1] = str(tmp_path / "whole")
    assert bespoke(*command).wait(timeout=120) == 0
    assert_identical(contents(out), contents(tmp_path / "whole"), "disturbed three times")
