"""Table 3 and memory: the stored and sent bytes and the time of each method, in one process and one thread.

Bytes are those of the real trees: private state, broadcast, message. Times are processor time of a text, in training
(local steps of a round) and in testing (scoring test texts with the personal model, without making it); methods take
turns, and the median counts. The milliseconds depend on the machine; compare ratios to FedPC. Hidden states below
a head are computed each time, as on a device that sees a text once. (bespoke normally caches them.)
"""

from __future__ import annotations

import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.fedpc.throughput import CONTEXTS, texts

from bespoke import pretrained
from bespoke.data.splits import everything
from bespoke.federation.batches import WHOLE, Orders
from bespoke.federation.host import Host
from bespoke.federation.work import ClientWork, Mode
from bespoke.methods import METHODS
from bespoke.models import frozen
from bespoke.models.frozen import FrozenLM
from bespoke.models.prefix import PrefixLM
from bespoke.storage import write_text
from bespoke.tensors import nbytes

NAMES = ("fedpc", "fedpc-frozen", "fedpc-generated", "fedpc-split", "fedpc-meta", "shared-prefix")
STEPS, REPEATS, SOME = 2, 3, 4  # local steps of a round, rounds of each method, clients


def write(place: Path, name: str, repeats: int = REPEATS) -> None:
    """Measure every method that there is; a file that is there is kept."""
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:  # with memory as the runs have it: see __main__.py
            write_text(place, json.dumps(alone.submit(measured, name, repeats).result(), indent=1))


def measured(name: str, repeats: int = REPEATS) -> dict[str, Any]:
    """Bytes and seconds of each method."""
    torch.set_num_threads(1)
    frozen.MEMORY = 0
    task = PrefixLM(FrozenLM(name), contexts=CONTEXTS)
    population, params = texts(task.network), task.init(0)
    clients = np.arange(SOME)
    hosts, bytes_of, seconds = {}, {}, dict[str, dict[str, list[float]]]()
    for label in (known for known in NAMES if known in METHODS):
        method: Any = METHODS[label](task, steps=STEPS)
        looped = "head" in method.init_server(params).get("params", {})  # last layers: one client after the other
        host = Host(population, Mode(False) if looped else Mode(True, 64, 1, "func"))
        host.open(ClientWork(method, everything(population)), params)
        down = method.broadcast(method.init_server(params))
        private = method.init_private(params)
        moments = nbytes(private.get("moments", {}))
        hosts[label] = host, method, down
        bytes_of[label] = {
            "private": nbytes(private) - moments, "moments": moments, "down": nbytes(down),
            "up": nbytes(host.template()),
        }  # fmt: skip
        seconds[label] = {"training": [], "testing": []}
    for again in range(repeats):
        for place, (label, (host, _, down)) in enumerate(hosts.items()):
            begun = time.process_time()
            done = host.train(down, None, clients, key=again)
            seconds[label]["training"].append((time.process_time() - begun) / done.examples)
            tested = SOME + (again * len(hosts) + place) % (len(population) - SOME)
            seconds[label]["testing"].append(_testing(host, down, population, tested))
    model = pretrained.language_model(name)
    return {
        "pretrained": Path(name).name, "contexts": CONTEXTS, "vocabulary": task.network.vocabulary,
        "width": task.network.width, "model": sum(p.numel() * p.element_size() for p in model.parameters()),
        "methods": {
            label: {**bytes_of[label], **{what: statistics.median(all_) for what, all_ in seconds[label].items()}}
            for label in hosts
        },
    }  # fmt: skip


def _testing(host: Host, down: Any, population: Any, tested: int) -> float:
    """Seconds to score a text of this client with the first client's personal model."""
    split = everything(population)
    model = host.personal(down, None, 0, split, len(host.work.method.candidates()) - 1, 1)
    task: Any = host.work.method.task
    rows = Orders.draw(split, np.array([tested]), WHOLE, None).sliced(0).rows()
    begun = time.process_time()
    with torch.no_grad():
        task.score(task.judged(model, rows), rows)
    return (time.process_time() - begun) / len(rows["x"])
