"""How clients are executed: in a loop or vectorized, in which chunks, in how many worker processes.

It is chosen by the model and its work, then, where that does not settle it, by a short trial; and it can be told.
"""

from __future__ import annotations

import os
import time
from typing import Any, Literal

import numpy as np

from bespoke.data.population import Population
from bespoke.engines.batches import work_of
from bespoke.engines.engine import Choice, unicast
from bespoke.engines.host import WHOLE, ClientWork, Host, Mode
from bespoke.errors import UserError
from bespoke.models import kernels
from bespoke.models.task import Gradient
from bespoke.tensors import Params, count

CACHE = 2**21  # bytes a chunk's step may touch before it falls out of a core's cache
TRAINED = 2**29  # bytes that a chunk's own copies of what is trained may take, where memory is the limit
COPIES = 8  # of what is trained: parameters, slopes and Adam's moments, before and after a step
WORTH_WORKERS = 0.25  # seconds of a round from which on worker processes are worth their start
SMALL = 200_000  # parameters up to which vectorizing over clients is tried against the loop
LAUNCH = 2e-3  # seconds that a step costs besides its arithmetic
SPEED = 3e10  # floating point operations a second of one core, roughly
LONG_STEP = 10 * LAUNCH  # seconds of a client's step from which on there is nothing to gain by vectorizing


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose(
    population: Population,
    work: ClientWork,
    params: Params,
    cohort: int,
    *,
    kind: Literal["auto", "looped", "vectorized"] = "auto",
    chunk: int | None = None,
    workers: int | None = None,
) -> Choice:
    """How to execute this work: by what the model is, then, where that does not settle it, by a short trial."""
    many = cores()
    task: Any = work.method.task
    size = count(params)
    row = sum(c[0].numel() * max(c.element_size(), 4) for n, c in population.columns.items() if n in ("x", "y"))
    batch = work.method.batching().size if work.method.trains else work.method.support_batching().size
    linear = getattr(task, "has_closed_form", False)
    compiled = linear and kernels.available()
    # a step of a chunk should stay in the cache; compiled descent reads rows in place and has but the updates to hold
    fit = 8 * CACHE // (8 * size) if compiled else CACHE // (8 * size + batch * row)
    vectorizes, batched = getattr(task, "vectorizes", True), getattr(task, "batches_clients", False)
    if batched:  # what is trained may be far more than the task's parameters: the generators of embeddings
        shared = work.method.broadcast(work.method.init_server(params, work.before(population)))
        fit = min(fit, TRAINED // (COPIES * 4 * max(count(shared), 1)))
    best_chunk = chunk or max(min(fit, 2048), 4)
    arithmetic = 0.0 if linear else 6.0 * _work(population, task, size) / SPEED  # seconds a row, there and back
    rows = population.sizes(np.arange(min(len(population), 2000)))
    step = min(batch, rows.mean()) * arithmetic
    if kind == "auto":
        if linear:
            vectorized, reason = True, "linear model"
        elif batched and batch < WHOLE.size:  # else a chunk would hold what is made of all rows of all its clients
            vectorized, reason = True, "a model that takes the rows of many clients in one batch"
        elif batched:
            vectorized, reason = False, "all rows of a client at once"
        elif not vectorizes:
            vectorized, reason = False, "a model that cannot be vectorized"
        elif size > SMALL:
            vectorized, reason = False, f"heavy model of {size:,} parameters"
        elif step > LONG_STEP:
            vectorized, reason = False, f"heavy model, about {step:.2g} s a step"
        else:
            vectorized, reason = _trial(population, work, params, best_chunk)
    else:
        if kind == "vectorized" and not vectorizes:
            raise UserError(
                "engine.kind = 'vectorized' does not fit this model: torch.func.vmap cannot run it; use 'looped'"
            )
        vectorized, reason = kind == "vectorized", "as told"
    if workers is None:
        # starting workers costs seconds: worth it where a round takes long
        steps, examples = (cohort * found / len(rows) for found in work_of(rows, work.method.batching()))
        long = (batched or not vectorized) and LAUNCH * steps + arithmetic * examples > WORTH_WORKERS
        workers = many if long and many > 1 else 0
    gradient: Gradient = "autograd"
    if vectorized:
        gradient = "fused" if compiled else "closed-form" if linear else "func"
    # a small model's steps are too short to be shared by threads, which wait for each other on a busy machine
    threads = 1 if workers or (not vectorized and step <= LONG_STEP) else many
    return Choice(vectorized, best_chunk if vectorized else 1, workers, threads, gradient, reason)


def _work(population: Population, task: Any, size: int) -> int:
    """Multiply-adds of a row; of a task that does not say, as if each parameter were used once at every position."""
    if hasattr(task, "work"):
        return task.work(population.columns["x"][:1])
    return size * population.columns["y"][0].numel()


def _trial(population: Population, work: ClientWork, params: Params, chunk: int) -> tuple[bool, str]:
    """Run a few clients both ways and take the faster."""
    clients = work.train.clients[:chunk]
    speed = {}
    for vectorized in (False, True):
        host = Host(population, Mode(vectorized, chunk, 1, "func" if vectorized else "autograd"))
        host.open(work, params)
        server = work.method.init_server(params, work.before(population))
        some = clients if vectorized else clients[:4]
        run = host.train if work.method.trains else None
        if run is None:
            return True, f"small model of {count(params):,} parameters"
        rows = None if work.method.groups(server) is None else np.zeros_like(some)
        for _ in range(2):  # the first run warms up
            begin = time.perf_counter()
            run(work.method.broadcast(server), unicast(work.method, server, some), some, 0, None, rows)
            speed[vectorized] = len(some) / (time.perf_counter() - begin)
    ratio = speed[True] / speed[False]
    faster = ratio > 1
    return faster, f"a trial ran {max(ratio, 1 / ratio):.1f} times as fast {'vectorized' if faster else 'looped'}"
