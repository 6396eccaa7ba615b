"""Nothing in the package is for POSIX systems only: by its text, and by a run without what Windows does not have.

Which names of the standard library Windows lacks is what its type stubs say (typeshed, which comes with mypy).
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mypy
import pytest

import bespoke

SOURCES = sorted(Path(bespoke.__file__).parent.rglob("*.py"))
STUBS = Path(mypy.__file__).parent / "typeshed" / "stdlib"
PATHS = ("/tmp", "/dev/", "/proc/", "/var/", "/etc/")


# -- the text ----------------------------------------------------------------------------------------------------------
def names(body: list[ast.stmt], platform: str) -> Iterator[str]:
    """What a stub defines on a platform."""
    here = {"sys": SimpleNamespace(platform=platform, version_info=sys.version_info)}
    for node in body:
        if isinstance(node, ast.If):
            chosen = eval(compile(ast.Expression(node.test), "stub", "eval"), here)
            yield from names(node.body if chosen else node.orelse, platform)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def defined(module: str, platform: str) -> set[str]:
    """What a module of the standard library has on a platform."""
    found = [path for path in (STUBS / f"{module}.pyi", STUBS / module / "__init__.pyi") if path.is_file()]
    return set(names(ast.parse(found[0].read_text()).body, platform)) if found else set()


@cache
def posix_only(module: str) -> set[str]:
    """Names of a module that Linux has and Windows lacks; all of them, for modules such as fcntl."""
    return defined(module, "linux") - defined(module, "win32")


def guarded(node: ast.AST, parents: dict[ast.AST, ast.AST], about: str) -> bool:
    """Whether it stands where the program has asked if this module, or path, is there."""
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.If | ast.IfExp):
            calls = [call for call in ast.walk(node.test) if isinstance(call, ast.Call)]
            asked = [call for call in calls if ast.unparse(call.func) in ("hasattr", "os.path.exists")]
            if any(ast.unparse(call.args[0]).strip("'") == about for call in asked):
                return True
    return False


def troubles(tree: ast.AST) -> Iterator[str]:
    """What does not work on Windows, in one file."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in parents:
        if isinstance(node, ast.Import | ast.ImportFrom):
            stem = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                lacking = posix_only(stem or alias.name)
                if alias.name in lacking if stem else lacking and lacking >= set(defined(alias.name, "linux")):
                    yield f"{node.lineno}: import {alias.name}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = node.value.id
            if node.attr in posix_only(module) and not guarded(node, parents, module):
                yield f"{node.lineno}: {module}.{node.attr}"
            if (module, node.attr) == ("os", "rename"):
                yield f"{node.lineno}: os.rename fails on Windows where the name is taken; use os.replace"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(PATHS):
            asked = isinstance(parents[node], ast.Call)  # of os.path.exists
            if not asked and not guarded(node, parents, node.value.rstrip("/")):
                yield f"{node.lineno}: {node.value!r}"
        if isinstance(node, ast.With):
            opened = ast.unparse(node.items[0].context_expr)
            if opened.startswith("open(") and "'rb'" in opened and "os.fsync" in ast.unparse(node):
                yield f"{node.lineno}: Windows flushes only files opened for writing; open it as 'r+b'"


def test_stubs_say_what_windows_lacks() -> None:
    assert {"preadv", "sched_getaffinity", "fork", "pwrite", "O_DIRECTORY"} <= posix_only("os")
    assert {"SIGKILL", "pthread_sigmask", "SIGHUP"} <= posix_only("signal")
    assert not {"replace", "fsync", "truncate", "cpu_count", "getpid"} & posix_only("os")
    assert {"flock", "LOCK_EX"} <= posix_only("fcntl")


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("import fcntl", False),
        ("from resource import getrusage", False),
        ("import os\nos.preadv(1, [], 2)", False),
        ("import os\nn = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()", True),
        ("import os\nos.rename('a', 'b')", False),
        ("import os\nwith open('a', 'rb') as file:\n    os.fsync(file.fileno())", False),
        ("import os, signal\nos.replace('a', 'b')\nsignal.signal(signal.SIGINT, signal.SIG_IGN)", True),
    ],
)
def test_the_search_finds_them(text: str, fine: bool) -> None:
    assert (list(troubles(ast.parse(text))) == []) == fine


def test_no_source_needs_posix() -> None:
    found = {path.name: list(troubles(ast.parse(path.read_text()))) for path in SOURCES}
    assert len(found) > 100
    assert {name: lines for name, lines in found.items() if lines} == {}


# -- a run -------------------------------------------------------------------------------------------------------------
WITHOUT = """
import os, signal, sys

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # importing it is an ImportError, in this process and in those it starts
for module, lacking in ((os, OS), (signal, SIGNAL)):
    for name in lacking:
        if hasattr(module, name):
            delattr(module, name)
"""
# what Python's own multiprocessing needs on Linux (waitpid and the like) has to stay
LACKING = {
    "OS": ("fork", "forkpty", "pread", "preadv", "pwrite", "pwritev", "readv", "writev", "sched_getaffinity", "statvfs",
           "O_DIRECTORY", "O_NOFOLLOW", "sync", "fdatasync", "posix_fadvise", "posix_fallocate", "lockf", "killpg",
           "nice", "getloadavg", "sysconf", "mkfifo", "chown", "sendfile", "copy_file_range", "memfd_create"),
    "SIGNAL": ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGSTOP", "SIGCONT", "alarm", "setitimer",
               "pthread_sigmask", "pthread_kill", "sigwait", "SIG_BLOCK", "SIG_SETMASK", "SIG_UNBLOCK"),
}  # fmt: skip

EXPERIMENT: dict[str, Any] = {
    "data": {"source": "exam"}, "cohort": {"size": 5}, "engine": {"workers": 1},
    "stage": [{"method": "ditto", "rounds": 2, "adapt_epochs": 1}],
}  # fmt: skip
MADE = """
import bespoke, json, os, sys
bespoke.run(json.loads(sys.argv[1]), sys.argv[2])
assert all(not hasattr(os, name) for name in ("preadv", "pread", "fork", "sched_getaffinity"))
"""


def test_a_run_without_what_windows_lacks(tmp_path: Path) -> None:
    """With a worker process, which lacks it too; the result is that of a run here."""
    assert set(LACKING["OS"]) <= posix_only("os")
    assert set(LACKING["SIGNAL"]) <= posix_only("signal")
    (tmp_path / "sitecustomize.py").write_text("".join(f"{n} = {v!r}\n" for n, v in LACKING.items()) + WITHOUT)
    path = os.pathsep.join([str(tmp_path), str(Path(bespoke.__file__).parents[1])])
    command = [sys.executable, "-W", "ignore", "-c", MADE, json.dumps(EXPERIMENT), str(tmp_path / "without")]
    (tmp_path / "temp").mkdir()  # its locks are not those of processes with fcntl, so it shares no folder with them
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path / "temp")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    bespoke.run(EXPERIMENT, tmp_path / "here")
    assert (tmp_path / "without" / "result.json").read_bytes() == (tmp_path / "here" / "result.json").read_bytes()
