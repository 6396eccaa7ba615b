"""Apple's pfl-research with one worker process a core, which is what its guide on fast simulations recommends.

This process is the first worker and starts the others, to which it passes every command on.
"""

import json
import os
import socket
import subprocess
import sys
from typing import Any

from peers.protocol import CORES, Params
from peers.workloads import Workload


class Peer:
    def load(self, workload: Workload) -> None:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        # Only the first address is used, as the place where the workers meet.
        os.environ["PFL_WORKER_ADDRESSES"] = ",".join([f"localhost:{port}"] * CORES)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ["OMP_NUM_THREADS"] = "1"
        self.helpers = [self.start_helper(rank) for rank in range(1, CORES)]
        self.tell_helpers(cmd="load", workload=workload.path)

        os.environ["PFL_WORKER_RANK"] = "0"
        from peers import pfl_worker  # Not earlier: importing pfl waits until all workers do.

        self.worker = pfl_worker.Peer()
        self.worker.load(workload)
        self.version = f"{self.worker.version}, {CORES} processes"

    def start_helper(self, rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "peers", "pfl_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PFL_WORKER_RANK": str(rank)},
        )

    def tell_helpers(self, **command: Any) -> None:
        for helper in self.helpers:
            helper.stdin.write(json.dumps(command) + "\n")
            helper.stdin.flush()

    def round(self, clients: list[int]) -> None:
        self.tell_helpers(cmd="round", clients=clients)
        self.worker.round(clients)

    def params(self) -> Params:
        return self.worker.params()

    def reset(self) -> None:
        self.tell_helpers(cmd="reset")
        self.worker.reset()

    def close(self) -> None:
        self.tell_helpers(cmd="quit")
        self.worker.close()
        for helper in self.helpers:
            helper.wait(timeout=20)
