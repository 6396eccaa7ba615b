"""Does a round cost more when the population is larger? Compares 1,000 with 1,000,000 clients on disk, same cohort.

Each size runs in separate processes, in turns. Peak memory is therefore that of one size, and noise affects both alike.
`speed.py --population` puts the result into docs/speed.md; `python benchmarks/population.py` only prints it.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from peers import processes

SIZES = (1_000, 1_000_000)
ROWS, FEATURES, COHORT, ROUNDS, TURNS = 10, 20, 100, 200, 9


def folder(cache: Path, clients: int) -> Path:
    return cache / f"population-{clients}"


def child(path: Path) -> dict[str, float]:
    """Open the population, draw cohorts, train; in a process of its own."""
    from bespoke.data.population import Population
    from bespoke.data.splits import everything
    from bespoke.federation.choice import choose
    from bespoke.federation.cohorts import Sampler
    from bespoke.federation.engine import Engine
    from bespoke.federation.work import ClientWork
    from bespoke.methods import FedAvg
    from bespoke.models import build_task

    for file in path.iterdir():  # no size waits for the disk: this compares bespoke, not the disk
        with file.open("rb") as stream:
            while stream.read(2**24):
                pass
    begin = time.perf_counter()
    population = Population.open(path)
    opened = time.perf_counter() - begin
    train = everything(population)
    task = build_task(population.about)
    method = FedAvg(task, lr=0.05, batch_size=5)
    params = task.init(0)
    work = ClientWork(method, train)
    sampler = Sampler(train, seed=0, size=COHORT)
    seconds = []
    with Engine(population, choose(population, work, params, COHORT, workers=0)) as engine:
        engine.open(work, params)
        server = method.init_server(params)
        next_clients = sampler.draw(0).reported
        for number in range(ROUNDS):
            begin = time.perf_counter()
            clients, next_clients = next_clients, sampler.draw(number + 1).reported
            outcome = engine.round(server, clients, number, next_clients)
            server = method.server_round(server, outcome.cohort)
            seconds.append(time.perf_counter() - begin)
    return {
        "open_ms": 1e3 * opened,
        "round_ms": 1e3 * statistics.median(seconds),
        "peak_mb": processes.peak_rss_mb(os.getpid()),
    }


def measure(cache: Path) -> dict[int, dict[str, float]]:
    """Medians over turns for each size."""
    from bespoke.data.sources.synthetic import write_large

    cache.mkdir(parents=True, exist_ok=True)
    for clients in SIZES:
        if not (folder(cache, clients) / "population.json").exists():
            write_large(folder(cache, clients), clients, ROWS, FEATURES, seed=0)
    found: dict[int, list[dict[str, float]]] = {clients: [] for clients in SIZES}
    for _ in range(TURNS):
        for clients in SIZES:
            command = [sys.executable, __file__, "--child", str(folder(cache, clients))]
            found[clients].append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    return {c: {name: statistics.median(t[name] for t in turns) for name in turns[0]} for c, turns in found.items()}


def table(found: dict[int, dict[str, float]]) -> str:
    small, large = (found[clients] for clients in SIZES)
    lines = [
        "## Size of the population",
        "",
        f"{COHORT} clients per round with {ROWS} rows of {FEATURES} features each; linear regression. The population "
        f"is on disk, its files in the system's cache. Medians of {TURNS} processes of {ROUNDS} rounds. "
        "Target: within 10 %.",
        "Command: `python benchmarks/population.py`",
        "",
        "| clients | opening ms | round ms | peak MB |",
        "| ---: | ---: | ---: | ---: |",
    ]
    lines += [f"| {c:,} | {f['open_ms']:.2f} | {f['round_ms']:.2f} | {f['peak_mb']:.0f} |" for c, f in found.items()]
    ratios = " | ".join(f"{large[name] / small[name]:.2f}" for name in ("round_ms", "peak_mb"))
    return "\n".join([*lines, f"| ratio | | {ratios} |"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(Path(sys.argv[2]))))
    else:
        print(table(measure(Path(__file__).resolve().parent.parent / ".cache" / "speed")))
