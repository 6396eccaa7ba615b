"""Chooses how clients are executed: in a loop or vectorized, in which chunks, in how many worker processes.

The model and its work decide. Where they do not, a short trial does. `[engine]` of an experiment overrides both.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from bespoke import devices
from bespoke.data.population import Population
from bespoke.errors import UserError
from bespoke.federation.batches import WHOLE, work_of
from bespoke.federation.engine import Choice, unicast
from bespoke.federation.host import Host
from bespoke.federation.roster import Roster
from bespoke.federation.work import ClientWork, Mode
from bespoke.method import Method
from bespoke.models.fast import kernels
from bespoke.task import Gradient, Precision, Task
from bespoke.tensors import Params, count, leaves

CACHE = 2**21  # bytes a chunk's step may touch before it falls out of a core's cache
TRAINED = 2**29  # bytes that a chunk's own copies of what is trained may take, where memory is the limit
COPIES = 8  # of what is trained: parameters, slopes and Adam's moments, before and after a step
WORTH_WORKERS = 0.25  # a round of more seconds than this is worth the start of worker processes
SMALL = 200_000  # up to so many parameters, a trial compares vectorized clients with the loop
LAUNCH = 2e-3  # seconds that a step costs besides its arithmetic
SPEED = 3e10  # floating point operations a second of one core, roughly
GPU_CHUNK = 2**31  # bytes that the clients of a chunk may take on a GPU
LONG_STEP = 10 * LAUNCH  # a client's step of more seconds than this gains nothing from vectorizing


def no_vmap(task: Task) -> str:
    """Why clients cannot be vectorized as asked."""
    why = task.looped or "this model: torch.func.vmap cannot run it"
    return f"engine.kind = 'vectorized' does not fit {why}; use 'looped'"


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
    precision: Precision = "float32",
    device: str = "cpu",
    stages: tuple[Method, ...] = (),
) -> Choice:
    """Chooses how to execute this work: by the model, or, where that does not decide, by a short trial.

    stages: the methods of all stages of the run, which is executed on one device.
    """
    device = devices.chosen(device)
    if not work.method.task.portable:
        if workers:
            raise UserError(
                f"engine.workers = {workers}: the model was given as an object of this program, and worker processes "
                "cannot import it; put it into a module, as net = bespoke.model(...) in mypkg/nets.py, or use "
                "workers = 0"
            )
        workers = 0
    if device != "cpu":
        made = _on_device(population, work, params, device, stages, kind, chunk, workers, precision)
        if made is not None:
            return made
    elsewhere = "" if device == "cpu" else f", in float64, which {device} does not have"
    many = cores()
    task = work.method.task
    size = count(params)
    row = sum(c[0].numel() * max(c.element_size(), 4) for n, c in population.columns.items() if n in ("x", "y"))
    batch = work.method.batching().size if work.method.trains else work.method.support_batching().size
    linear = task.has_closed_form
    compiled = linear and kernels.available()
    # a step of a chunk should stay in the cache; compiled descent reads rows in place and holds only the updates
    fit = 8 * CACHE // (8 * size) if compiled else CACHE // (8 * size + batch * row)
    vectorizes, batched = task.vectorizes, task.batches_clients
    if batched:  # what is trained may be far larger than the task's parameters: generators of embeddings are
        shared = work.method.broadcast(work.method.init_server(params, work.before(Roster.of(population))))
        fit = min(fit, TRAINED // (COPIES * 4 * max(count(shared), 1)))
    best_chunk = chunk or max(min(fit, 2048), 4)
    # seconds of a row, there and back
    arithmetic = 0.0 if linear else 6.0 * task.work(population.columns["x"][:1]) / SPEED
    rows = population.sizes(np.arange(min(len(population), 2000)))
    step = min(batch, rows.mean()) * arithmetic
    if kind == "auto":
        if linear:
            vectorized, reason = True, "linear model"
        elif batched and batch < WHOLE.size:  # else a chunk would hold intermediate values of all its rows
            vectorized, reason = True, "a model that takes the rows of many clients in one batch"
        elif batched:
            vectorized, reason = False, "all rows of a client at once"
        elif not vectorizes:
            vectorized, reason = False, task.looped or "a model that cannot be vectorized"
        elif size > SMALL:
            vectorized, reason = False, f"heavy model of {size:,} parameters"
        elif step > LONG_STEP:
            vectorized, reason = False, f"heavy model, about {step:.2g} s a step"
        else:
            vectorized, reason = _trial(population, work, params, best_chunk)
    else:
        if kind == "vectorized" and not vectorizes:
            raise UserError(no_vmap(task))
        vectorized, reason = kind == "vectorized", "as told"
    reason += "" if task.portable else "; a model that is no part of a module stays in this process"
    if workers is None:
        # workers take seconds to start, which pays only if a round takes long
        steps, examples = (cohort * found / len(rows) for found in work_of(rows, work.method.batching()))
        long = (batched or not vectorized) and LAUNCH * steps + arithmetic * examples > WORTH_WORKERS
        workers = many if long and many > 1 else 0
    gradient: Gradient = "autograd"
    if vectorized:
        gradient = "fused" if compiled else "closed-form" if linear else "func"
    # a small model's steps are too short for several threads, which wait for each other on a busy machine
    threads = 1 if workers or (not vectorized and step <= LONG_STEP) else many
    if precision == "bf16" and linear:
        precision, reason = "float32", f"{reason}, whose steps are exact in float32 alone"
    elif precision == "bf16" and not devices.has_bf16(devices.CPU):
        reason += "; this processor has no instructions for bfloat16, so float32 is faster here"
    reason += elsewhere
    return Choice(vectorized, best_chunk if vectorized else 1, workers, threads, gradient, reason, precision)


def _on_device(
    population: Population, work: ClientWork, params: Params, device: str, stages: tuple[Method, ...],
    kind: str, chunk: int | None, workers: int | None, precision: Precision,
) -> Choice | None:  # fmt: skip
    """Chooses how to execute this work on a GPU; None if the work needs float64 and the device has none.

    A GPU needs large batches of work, so clients are vectorized wherever vmap can run the model. One process keeps one
    GPU busy.
    """
    place, task, size = torch.device(device), work.method.task, count(params)
    sent = work.method.broadcast(work.method.init_server(params, work.before(Roster.of(population))))
    kept = [work.method.init_private(params), sent]
    double = any(map(in_double, (work.method, *stages))) or any(leaf.dtype == torch.float64 for leaf in leaves(kept))
    if double and not devices.has_double(place):
        return None
    if kind == "vectorized" and not task.vectorizes:
        raise UserError(no_vmap(task))
    batching = work.method.batching() if work.method.trains else work.method.support_batching()
    vectorizes = task.vectorizes and not (task.batches_clients and batching.size >= WHOLE.size)
    vectorized = vectorizes if kind == "auto" else kind == "vectorized"
    reason = "many clients a step" if vectorized else task.looped or "a model that cannot be vectorized"
    reason = reason if kind == "auto" else "as told"
    # each client of a chunk holds its copies of the model, and the activations of its batch
    row = population.columns["x"][:1]
    rows = min(batching.size, int(population.sizes(np.arange(min(len(population), 2000))).max()))
    numbers = COPIES * max(size, count(sent) * task.batches_clients) + rows * (row.numel() + task.work(row) // 64)
    fit = chunk or min(max(GPU_CHUNK // (4 * numbers), 1), 2048)
    gradient: Gradient = "autograd"
    if vectorized:
        gradient = "closed-form" if task.has_closed_form else "func"
    if workers is None:
        workers = devices.gpus() if device == "cuda" and devices.gpus() > 1 else 0
    if precision == "bf16" and task.has_closed_form:
        precision, reason = "float32", f"{reason}, whose steps are exact in float32 alone"
    elif precision == "bf16" and not devices.has_bf16(place):
        reason += "; this device is not known to compute in bfloat16 by itself"
    return Choice(vectorized, fit if vectorized else 1, workers, 1, gradient, reason, precision, device)


def fitting(how: Choice, methods: tuple[Method, ...]) -> Choice:
    """Adapts a choice made for other methods: moves to the CPU if these need float64 and the device has none."""
    if devices.has_double(torch.device(how.device)) or not any(map(in_double, methods)):
        return how
    return replace(how, device="cpu", reason=f"{how.reason}; in float64, which {how.device} does not have")


def in_double(method: Method) -> bool:
    """Whether a method's clients compute in float64, as fits to convergence do."""
    needs, task = method.needs, method.task
    solved = needs.head or needs.smooth or getattr(method, "solver", "") == "exact"
    return solved or (task.safe and task.has_closed_form)


def _trial(population: Population, work: ClientWork, params: Params, chunk: int) -> tuple[bool, str]:
    """Run a few clients both ways and take the faster."""
    clients = work.train.clients[:chunk]
    speed = {}
    for vectorized in (False, True):
        host = Host(population, Mode(vectorized, chunk, 1, "func" if vectorized else "autograd"))
        host.open(work, params)
        server = work.method.init_server(params, work.before(Roster.of(population)))
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
