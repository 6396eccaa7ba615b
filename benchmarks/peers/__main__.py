"""Runs one peer: `python -m peers NAME`, with the folder `benchmarks` on the path. `speed.py` does this."""

import importlib
import sys

from peers import protocol

if __name__ == "__main__":
    # The answers' channel is claimed before the peer's libraries are imported, because some talk while they are.
    answers = protocol.claim_stdout()
    protocol.serve(lambda: importlib.import_module(f"peers.{sys.argv[1]}").Peer(), sys.stdin, answers)
