"""A command of bespoke in a forked child: a fresh state, a time limit, a kill at a chosen moment.

Forking saves the seconds of importing PyTorch. The parent has to be single-threaded: `ready` imports everything and
starts no thread.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

SECONDS = 60.0  # a command that takes longer hangs
MEMORY = 3 << 30  # bytes of data a command may ask for; a fuzzed size must not take the whole machine
STOPPED = 130  # the code of a command that SIGINT or SIGTERM ended
CRASH = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Ended:
    """How a command ended; the code is negative for a signal, and None for a command that had to be stopped."""

    code: int | None
    out: str
    err: str
    seconds: float
    orphans: int = 0  # processes that outlived it

    @property
    def said(self) -> str:
        return f"{self.out}\n{self.err}"


def ready() -> None:
    """Import what any command needs and load what is compiled, so that children do not have to."""
    import importlib

    import numpy as np
    import torch

    torch.set_num_threads(1)
    for name in (
        "cli", "study.comparison", "study.tuning", "report.page", "report.trials", "analysis.analyze", "deploy.export",
        "deploy.forget", "cli.listings", "cli.progress", "models.fast.kernels",
    ):  # fmt: skip
        importlib.import_module(f"bespoke.{name}")
    for name in ("pyarrow.parquet", "pyarrow.csv", "pandas", "torch.func", "torch._dynamo", "scipy.stats", "optuna"):
        importlib.import_module(name)
    from benchmarks.attack.worlds import experiment

    from bespoke.experiment.build import build
    from bespoke.experiment.checks import checked
    from bespoke.federation.engine import Choice, Engine
    from bespoke.federation.work import ClientWork

    world = build(checked(experiment("ditto"), "a first experiment"))
    params = world.task.init(0)
    with Engine(world.population, Choice(True, 4, 0, 1, "fused", "to compile")) as engine:
        for stage in world.stages:
            engine.open(ClientWork(stage.method, world.split.train), params)
            engine.round(stage.method.init_server(params), np.arange(4), 0)


def bespoke(
    words: list[str],
    folder: Path,
    *,
    kill_after: float | None = None,
    by: signal.Signals = signal.SIGKILL,
    limit: float = SECONDS,
    before: Callable[[], None] = lambda: None,
) -> Ended:
    """Run `bespoke WORDS` in this folder; `before` is called in the child, where it may change anything.

    It is killed after some seconds `by` a signal; one that asks it to end has to be heard within the limit.
    """
    streams = [os.memfd_create(name) for name in ("out", "err")]
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(words, folder, streams, before)
    hung = not _ends(child, limit if kill_after is None else kill_after)
    if hung and kill_after is not None:
        os.kill(child, by)
        hung = not _ends(child, limit)
    if hung:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    seconds, code = time.monotonic() - began, os.waitstatus_to_exitcode(status)
    orphans = _orphans(child)
    texts = []
    for stream in streams:
        os.lseek(stream, 0, os.SEEK_SET)
        with open(stream, "rb") as file:
            texts.append(file.read().decode("utf-8", errors="replace"))
    return Ended(None if hung else code, *texts, seconds, orphans)


def _become(words: list[str], folder: Path, streams: list[int], before: Callable[[], None]) -> NoReturn:
    """The child: standard streams, working directory and arguments as a shell would set them."""
    code, begun = 1, False
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `main` sets it
        os.setsid()  # so that its own children can be found
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
        sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder)
        sys.argv = ["bespoke", *words]
        before()
        from bespoke import cli

        begun = True
        cli.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not begun:
            code = STOPPED
        else:
            traceback.print_exc()
    finally:
        for file in (sys.stdout, sys.stderr):
            file.flush()
        os._exit(code)


def _ends(child: int, seconds: float) -> bool:
    """Whether the process ends within so many seconds."""
    handle = os.pidfd_open(child)
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def _orphans(group: int, patience: float = 5.0) -> int:
    """How many processes of a session outlive its leader by some seconds; they are killed."""
    deadline = time.monotonic() + patience
    while (left := _members(group)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for member in left:
        os.kill(member, signal.SIGKILL)
    return len(left)


def _members(group: int) -> list[int]:
    """The processes of a group that are alive."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:  # most often: nothing to look for
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                _, _, rest = (entry / "stat").read_text().rpartition(")")
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, _, its_group, *_ = rest.split()
            if int(its_group) == group and state != "Z":
                found.append(int(entry.name))
    return found
