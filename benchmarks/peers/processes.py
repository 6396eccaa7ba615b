"""Process trees, read from /proc: their memory, and pausing, resuming and ending them."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # It ended meanwhile.
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def tree(root: int) -> list[int]:
    """The process and all that descend from it, parents first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _status(int(entry)).get("PPid")):
            children.setdefault(int(parent), []).append(int(entry))
    found = [root]
    for pid in found:  # The list grows while it is walked.
        found.extend(children.get(pid, []))
    return found


def peak_rss_mb(root: int) -> float:
    """The sum over the tree of each process's own peak of resident memory.

    Pages that processes share are counted once for each of them.
    """
    kilobytes = [_status(pid).get("VmHWM", "0 kB").split()[0] for pid in tree(root)]
    return sum(map(int, kilobytes)) / 1024


def seconds_since_start() -> float:
    """How long this process has been running, the interpreter's own start included."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def pause(root: int) -> None:
    send(tree(root), signal.SIGSTOP)


def resume(root: int) -> None:
    # Children first: a parent that wakes up to silent children might take them for dead.
    send(tree(root)[::-1], signal.SIGCONT)


def end(pids: list[int], patience: float = 5.0) -> None:
    """Ends the processes, gently at first."""
    send(pids, signal.SIGCONT)
    send(pids, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and any(_status(pid).get("State", "Z")[0] != "Z" for pid in pids):
        time.sleep(0.05)
    send(pids, signal.SIGKILL)
