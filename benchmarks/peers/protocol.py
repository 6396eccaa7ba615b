"""How `speed.py` talks to a peer: JSON lines, one command on stdin, one answer on stdout.

    {"cmd": "load", "workload": path}  ->  {"ready": true, "startup_seconds": s, "version": text}
    {"cmd": "round", "clients": [...], "return_update": path or null}
                                       ->  {"seconds": s, "clients": n, "peak_rss_mb": m}
    {"cmd": "rounds", "cohorts": [[...], ...]}   rounds back to back, as in training; the answer is that of "round"
    {"cmd": "reset"}                   ->  {"reset": true}
    {"cmd": "quit"}                    ->  {"bye": true}

and {"error": text} when a command failed. A peer is a module `peers/NAME.py` with a class `Peer` that has the
methods of `PeerProtocol`; everything else is done here, the same for all. Needs numpy only.
"""

import json
import os
import queue
import sys
import time
import traceback
from collections.abc import Callable
from typing import IO, Any, Protocol

import numpy as np

from peers import processes, workloads

CORES = 2
"""Cores, and so threads or workers, that every peer may use."""

Params = dict[str, np.ndarray]


class PeerProtocol(Protocol):
    """What a peer's class `Peer` must offer."""

    version: str
    """What is measured, such as "flwr 1.41.0"."""

    def load(self, workload: workloads.Workload) -> None:
        """Gets everything ready for the first round, the global parameters being `workload.params`."""

    def round(self, clients: list[int]) -> None:
        """One FedAvg round: returns when the new global parameters are there. This alone is timed."""

    def params(self) -> Params:
        """The global parameters, named and laid out as in `workload.params`."""

    def reset(self) -> None:
        """Makes the global parameters `workload.params` again."""

    def close(self) -> None:
        """Ends threads and processes that the peer started."""


class Handover:
    """Drives a framework that owns its training loop, which runs in a thread of its own.

    The peer calls `run`, which returns when the framework has done that round. The framework's hook between rounds
    calls `next_cohort`, which waits there and returns None when there is nothing left to do.
    """

    def __init__(self) -> None:
        self._cohorts: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(self, clients: list[int]) -> None:
        self._cohorts.put(clients)
        self._wait()

    def wait_until_ready(self) -> None:
        self._wait()

    def stop(self) -> None:
        self._cohorts.put(None)

    def next_cohort(self) -> list[int] | None:
        self._outcomes.put(None)
        return self._cohorts.get()

    def guard(self, loop: Callable[[], Any]) -> Callable[[], None]:
        """The loop as a thread's target: whatever ends it is told to whoever waits for a round."""

        def guarded() -> None:
            try:
                loop()
                self._outcomes.put(RuntimeError("the framework ended its loop"))
            except BaseException as error:
                self._outcomes.put(error)

        return guarded

    def _wait(self) -> None:
        if (error := self._outcomes.get()) is not None:
            raise error


def claim_stdout() -> IO[str]:
    """Keeps stdout for the answers, and sends all that libraries print there to stderr instead."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def serve(make_peer: Callable[[], PeerProtocol], commands: IO[str], answers: IO[str]) -> None:
    """Obeys commands until "quit", or until whoever sends them is gone."""

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    peer: PeerProtocol | None = None
    for line in iter(commands.readline, ""):
        command = json.loads(line)
        try:
            match command["cmd"]:
                case "load":
                    peer = make_peer()
                    peer.load(workloads.load(command["workload"]))
                    answer(ready=True, startup_seconds=processes.seconds_since_start(), version=peer.version)
                case "round":
                    answer(**_round(peer, command["clients"], command.get("return_update")))
                case "rounds":
                    answer(**_rounds(peer, command["cohorts"]))
                case "reset":
                    peer.reset()
                    answer(reset=True)
                case "quit":
                    break
                case unknown:
                    answer(error=f"unknown command {unknown!r}")
        except Exception as error:
            traceback.print_exc()
            answer(error=f"{type(error).__name__}: {error}")
    if peer is not None:
        peer.close()
    answer(bye=True)


def _rounds(peer: PeerProtocol, cohorts: list[list[int]]) -> dict[str, float]:
    start = time.perf_counter()
    for clients in cohorts:
        peer.round(clients)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "clients": sum(map(len, cohorts)), "peak_rss_mb": processes.peak_rss_mb(os.getpid())}


def _round(peer: PeerProtocol, clients: list[int], update_path: str | None) -> dict[str, float]:
    before = {name: value.copy() for name, value in peer.params().items()} if update_path else {}
    start = time.perf_counter()
    peer.round(clients)
    seconds = time.perf_counter() - start
    if update_path:
        np.savez(update_path, **{name: value - before[name] for name, value in peer.params().items()})
    return {"seconds": seconds, "clients": len(clients), "peak_rss_mb": processes.peak_rss_mb(os.getpid())}
