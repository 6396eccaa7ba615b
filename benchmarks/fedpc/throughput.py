"""A round of FedPC on a frozen model: compares clients batched together with one client after the other.

    python benchmarks/fedpc/throughput.py --pretrained FOLDER

Both are measured in processor time of one thread, in turns and several times, so that other work on the machine affects
both alike. Prints texts per second of each (the median), their ratio, the largest resident memory, and the difference
of the two updates.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time

import numpy as np
import torch

from bespoke.data.population import Population
from bespoke.data.splits import everything
from bespoke.federation.host import Host
from bespoke.federation.work import ClientWork, Mode
from bespoke.methods import FedPC
from bespoke.models.frozen import FrozenLM
from bespoke.models.prefix import PrefixLM
from bespoke.tensors import flatten, norm, subtract

CLIENTS, TEXTS, CONTEXTS, LONGEST = 19, 60, 2, 32


def texts(network: FrozenLM) -> Population:
    """Texts of random words whose lengths are spread as those of spoken lines: most are short."""
    random = np.random.default_rng(0)
    rows = CLIENTS * TEXTS
    lengths = np.clip(random.lognormal(2.3, 0.7, rows), 3, LONGEST).astype(int)
    words = random.integers(3, network.vocabulary, (rows, LONGEST))
    y = np.where(np.arange(LONGEST) < lengths[:, None], words, -1)
    x = np.concatenate([np.ones((rows, 1), int), np.where(y < 0, 1, y)[:, :-1]], 1)
    client = np.repeat(np.arange(CLIENTS), TEXTS)
    columns = {"x": x.astype(np.int32), "y": y.astype(np.int32), "context": client % CONTEXTS}
    return Population.build(columns, [f"client {i:02}" for i in client], about={"name": "texts"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pretrained", required=True, help="a model's folder, GGUF file or name")
    parser.add_argument("--steps", type=int, default=2, help="local steps of a round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each kind")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = PrefixLM(FrozenLM(arguments.pretrained), contexts=CONTEXTS)
    population, params = texts(task.network), task.init(0)
    method = FedPC(task, steps=arguments.steps)
    server = method.init_server(params)
    kinds = {"one after the other": Mode(False), "batched together": Mode(True, 64, 1, "func")}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    sent = {}
    for _ in range(arguments.repeats):
        for kind, mode in kinds.items():
            host = Host(population, mode)
            host.open(ClientWork(method, everything(population)), params)
            begin = time.process_time()
            done = host.train(method.broadcast(server), None, np.arange(CLIENTS), key=1)
            seconds[kind].append(time.process_time() - begin)
            sent[kind] = done.sums["delta"]
    rate = {kind: done.examples / statistics.median(found) for kind, found in seconds.items()}
    alone, together = rate.values()
    reference, other = sent.values()
    print(
        json.dumps(
            {
                "texts_per_second": {kind: round(value, 1) for kind, value in rate.items()},
                "ratio": round(together / alone, 2),
                "largest_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
                "update_apart": float(norm(subtract(flatten(other), flatten(reference))) / norm(flatten(reference))),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
