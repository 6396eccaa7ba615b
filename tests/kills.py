"""Runs that are killed: the test's end of resume_driver.py, and what is compared of the folders they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KILLED = -signal.SIGKILL
NOT_A_RESULT = ("timing.jsonl", ".lock")


class Driver:
    """Talks to the process that forks and kills."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))  # for benchmarks/
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "resume_driver.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert self._answer() == {"ready": True}

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the driver died"
        return json.loads(line)

    def run(self, folder: Path, plan: str, workers: int = 0, seconds: float = 0.0, **how: Any) -> dict[str, Any]:
        """Run or resume; `at` and `when` kill from inside at an event, `delay` from outside after so many seconds."""
        assert self.process.stdin is not None
        job = {"folder": str(folder), "plan": plan, "workers": workers, "seconds": seconds, **how}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run but for wall times and the lock; half-written ones would show here too."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in NOT_A_RESULT)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def assert_identical(found: dict[str, bytes], expected: dict[str, bytes], story: str) -> None:
    assert sorted(found) == sorted(expected), story
    different = [name for name in expected if found[name] != expected[name]]
    assert not different, f"{story}: {different}"
