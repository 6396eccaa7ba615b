"""Measures nodes of a Ray cluster, and rounds of 10,000, 100,000 and 1,000,000 clients.

    python benchmarks/scale.py                        # both; needs bespoke-fl[ray]
    python benchmarks/scale.py --sizes 10000          # measures these rounds again
    python benchmarks/scale.py --nodes 1 2 4          # on a machine with four cores or more
    python benchmarks/scale.py --sizes --nodes        # only writes the page, from stored measurements

Nodes are Ray nodes on this machine with one core each. Engines of 1, 2, ... actors take turns in one run, round by
round, and so do worker processes, so that other work on the machine affects all of them alike. Rounds of many clients
run on one core, in a separate process for each size and method. Measurements are stored in runs/scale. All stored
measurements go into docs/scale.md, with a calculation for a million active clients per day.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from bespoke.cli.exit_codes import program
from bespoke.errors import UserError
from peers import processes

ROOT = Path(__file__).resolve().parents[1]
PAGE, KEPT = ROOT / "docs" / "scale.md", ROOT / "runs" / "scale"
SIZES, METHODS = (10_000, 100_000, 1_000_000), ("fedavg", "ditto")
ROWS, FEATURES = 10, 10  # of a client of the many
HEAVY = {"clients": 400, "rows": 60, "features": 64, "hidden": [256, 256], "cohort": 200}
TURNS = 5
DAY, MILLION = 86_400, 1_000_000
Found = dict[str, Any]


# -- a round of many clients -------------------------------------------------------------------------------------------
def round_of(clients: int, name: str, folder: Path) -> Found:
    """One core runs a round of all clients; then it writes the private state as a checkpoint does."""
    from dataclasses import replace

    from bespoke.data.population import Population
    from bespoke.data.sources.synthetic import write_large
    from bespoke.data.splits import everything
    from bespoke.federation.choice import choose
    from bespoke.federation.engine import Engine
    from bespoke.federation.work import ClientWork
    from bespoke.methods import METHODS as KNOWN
    from bespoke.models import build_task

    if not (folder / "population.json").exists():
        write_large(folder, clients, ROWS, FEATURES, seed=0)
        return {}  # in a process of its own: what it needed is no part of the round
    population = Population.open(folder)
    train, task = everything(population), build_task(population.about)
    method = KNOWN[name](task, lr=0.05, batch_size=5)
    params, work = task.init(0), ClientWork(method, train)
    how = replace(choose(population, work, params, clients, workers=0), threads=1)
    everyone = np.arange(clients)
    with Engine(population, how) as engine, tempfile.TemporaryDirectory() as disk:
        engine.open(work, params)
        server = method.init_server(params)
        engine.round(server, everyone[:500], 0)  # compiles
        engine.abandon()
        engine.template()
        before = processes.peak_rss_mb(os.getpid())
        began, cpu = time.perf_counter(), time.process_time()
        outcome = engine.round(server, everyone, 1)
        server = method.server_round(server, outcome.cohort)
        engine.commit()
        wall, used = time.perf_counter() - began, time.process_time() - cpu
        began = time.process_time()
        names = engine.save_private(Path(disk), "all")
        saving = time.process_time() - began
        size = sum((Path(disk) / name).stat().st_size for name in names)
    return {
        "clients": clients, "method": name, "cpu": used, "wall": wall, "saving": saving, "private": size,
        "before_mb": before, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "up": outcome.bytes_up / clients, "down": outcome.bytes_down / clients,
        "disk": sum(file.stat().st_size for file in folder.iterdir()), "engine": how.text(),
    }  # fmt: skip


# -- nodes -------------------------------------------------------------------------------------------------------------
def nodes_of(counts: list[int], folder: Path) -> Found:
    """Clients per second of so many actors, each on its own node, and of worker processes; in turns."""
    from dataclasses import replace

    from bespoke.data.population import Population
    from bespoke.data.sources.synthetic import write_large
    from bespoke.data.splits import everything
    from bespoke.federation.engine import Choice, Engine
    from bespoke.federation.ray_actors import actors
    from bespoke.federation.ray_cluster import Cluster
    from bespoke.federation.work import ClientWork
    from bespoke.methods import FedAvg
    from bespoke.models import build_task

    write_large(folder / "people", HEAVY["clients"], HEAVY["rows"], HEAVY["features"], seed=0)
    population = Population.open(folder / "people")
    train = everything(population)
    task = build_task(population.about, "mlp", hidden=HEAVY["hidden"])
    method, params = FedAvg(task, lr=0.05, batch_size=10), task.init(0)
    work, server = ClientWork(method, train), method.init_server(params)
    looped = Choice(False, 1, 0, 1, "autograd", "one client at a time")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    os.environ |= {"RAY_TMPDIR": str(folder / "r"), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex()}
    (folder / "r").mkdir()
    from ray.cluster_utils import Cluster as Nodes

    plain = {"include_dashboard": False, "node_ip_address": "127.0.0.1", "object_store_memory": 200 * 2**20}
    began, nodes = time.perf_counter(), Nodes()
    engines: dict[str, Engine] = {}
    found: Found = {}
    try:
        for _ in range(max(counts)):
            nodes.add_node(**plain, num_cpus=len(counts))  # actors of engines whose turn it is not do nothing
        with Cluster(nodes.address) as cluster:
            found["start"] = time.perf_counter() - began
            try:
                for count in counts:
                    for kind in ("actors", "processes"):
                        began, how = time.perf_counter(), replace(looped, workers=count)
                        places = actors(cluster, population, how, folder) if kind == "actors" else None
                        engine = engines[f"{kind} {count}"] = Engine(population, how, places)
                        engine.open(work, params)
                        found[f"start {kind} {count}"] = time.perf_counter() - began
                seconds: dict[str, list[float]] = {name: [] for name in engines}
                empty: dict[str, list[float]] = {name: [] for name in engines}
                used: dict[str, list[list[float]]] = {name: [] for name in engines}
                random = np.random.default_rng(0)
                for turn in range(TURNS + 1):
                    cohort = np.sort(random.choice(HEAVY["clients"], HEAVY["cohort"], replace=False))
                    for name, engine in engines.items():
                        before, here = _cpu(), time.process_time()
                        began = time.perf_counter()
                        engine.round(server, cohort, turn)
                        engine.commit()
                        if turn:
                            seconds[name].append(time.perf_counter() - began)
                            here, spent = time.process_time() - here, _cpu()
                            there = sorted(spent[pid] - before.get(pid, 0.0) for pid in spent)
                            used[name].append([here, *there[-len(engine.remotes) :]])
                        began = time.perf_counter()
                        for _ in range(10):
                            engine.kept_layers() if engine.layered else engine._all("settle")
                        empty[name].append((time.perf_counter() - began) / 10)
                found["memory"] = processes.peak_rss_mb(os.getpid())
            finally:
                for engine in engines.values():
                    engine.close()
    finally:
        nodes.shutdown()
    rates = {name: [HEAVY["cohort"] / one for one in taken] for name, taken in seconds.items()}
    return {
        **found, "counts": counts, "rates": rates, "used": used,
        "empty": {name: statistics.median(taken) for name, taken in empty.items()},
        "parameters": sum(leaf.numel() for leaf in params.values()), "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[1],
    }  # fmt: skip


def _cpu() -> dict[int, float]:
    """CPU seconds so far of each process that holds clients: actors and workers."""
    import psutil

    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if "ray::HostActor" in words or "spawn_main" in words:
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
    return found


# -- the page ----------------------------------------------------------------------------------------------------------
def page(rounds: list[Found], nodes: Found | None) -> str:
    parts = [INTRODUCTION]
    if nodes:
        parts.append(_nodes(nodes))
    if rounds:
        parts.append(_rounds(rounds))
    if rounds and nodes:
        parts.append(_million(rounds, nodes))
    return "\n\n".join(part.strip() for part in parts) + "\n"


INTRODUCTION = """# Scale

This page shows how throughput grows with the nodes of a [Ray cluster](ray.md) and what a round of very many clients
needs. From these figures it calculates what a million active clients per day would need. Command: `python
benchmarks/scale.py`, which writes this page from its measurements.

Compare ratios, not rates, because the machine did other work during the measurement. The compared variants took turns
in one run. Times of rounds are CPU seconds, which a busy machine changes little."""


def _nodes(found: Found) -> str:
    counts, rates = found["counts"], found["rates"]
    middle = {name: statistics.median(values) for name, values in rates.items()}
    path = {name: statistics.median(here + max(there) for here, *there in used) for name, used in found["used"].items()}
    alone = {kind: path[f"{kind} {counts[0]}"] * counts[0] for kind in ("actors", "processes")}
    rows = []
    for kind, what in (("actors", "Ray, nodes:"), ("processes", "worker processes:")):
        for count in counts:
            name = f"{kind} {count}"
            low, high = min(rates[name]), max(rates[name])
            rows.append(
                f"| {what} {count} | {HEAVY['cohort'] / path[name]:.0f} | {alone[kind] / (count * path[name]):.0%} | "
                f"{middle[name]:.0f} ({low:.0f} to {high:.0f}) | {1e3 * found['empty'][name]:.1f} |"
            )
    table = "\n".join(rows)
    last = f"actors {counts[-1]}"
    return f"""## Nodes

{HEAVY["cohort"]} clients per round with {HEAVY["rows"]} rows of {HEAVY["features"]} features each, a network of
{found["parameters"]:,} parameters, one epoch in batches of 10, one client at a time. A node is a Ray node on this
machine with {found["cores"]} cores. Worker processes are shown for comparison.

The first rate is by CPU time: the time of a round is the CPU time of the server's process plus that of the busiest
place, as if each had its own core. Efficiency is this rate divided by the rate of one place and by the number of
places. The second rate is by wall-clock time, with a load of {found["load"]:.0f} on the machine. Medians of {TURNS}
rounds, with the range. An empty call goes to all places and back.

| places | clients/s by CPU | efficiency | clients/s by wall clock (range) | empty call ms |
| --- | ---: | ---: | ---: | ---: |
{table}

The cluster was ready after {found["start"]:.0f} s, the actors of an engine after {found[f"start {last}"]:.0f} s more.
All processes of this benchmark, including Ray's, used at most {found["memory"] / 1024:.1f} GB. Nodes of one machine
share its memory and have no network between them. On a cluster of machines the traffic is added: {_megabytes(found)}
of parameters to each node and back in a round."""


def _megabytes(found: Found) -> str:
    return f"{4e-6 * found['parameters']:.2g} MB"


def _rounds(rounds: list[Found]) -> str:
    rows = [
        f"| {r['method']} | {r['clients']:,} | {r['cpu']:.2f} | {1e6 * r['cpu'] / r['clients']:.1f} | "
        f"{r['peak_mb']:,.0f} | {r['before_mb']:,.0f} | {r['private'] / 1e6:,.1f} | {r['saving']:.2f} | "
        f"{r['disk'] / 1e6:,.0f} |"
        for r in rounds
    ]
    table = "\n".join(rows)
    return f"""## Rounds of many clients

Every client of the population takes part in the round: {ROWS} rows of {FEATURES} features, linear regression, one
epoch in batches of 5. `fedavg` keeps nothing on a client; `ditto` keeps a model per client. One core,
{_how(rounds[0])}.

Rows and private state are mapped from disk. "Peak" is the peak memory of the whole process, and "before" is its peak
before the round. A checkpoint holds the private state of all clients in a file; "written in" is the CPU time for
writing it.

| method | clients | CPU s | CPU us per client | peak MB | before MB | checkpoint MB | written in s | population MB |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
{table}"""


def _how(found: Found) -> str:
    return str(found["engine"]).partition(", in process")[0]


def _million(rounds: list[Found], nodes: Found) -> str:
    used = nodes["used"][f"actors {nodes['counts'][0]}"]
    rate = HEAVY["cohort"] / statistics.median(sum(one) for one in used)
    heavy_bytes = 4.0 * nodes["parameters"]
    rows = []
    for method in METHODS:
        r = max((one for one in rounds if one["method"] == method), key=lambda one: one["clients"])
        each = (r["cpu"] + r["saving"]) / r["clients"]
        rows.append(_needs(f"linear regression, {method}", each, r["up"], r["down"], r["private"] / r["clients"]))
    rows.append(_needs(f"network of {nodes['parameters']:,} parameters, fedavg", 1 / rate, heavy_bytes, heavy_bytes, 0))
    rows.append(_needs("the same network, ditto: twice the work", 2 / rate, heavy_bytes, heavy_bytes, heavy_bytes))
    table = "\n".join(rows)
    return f"""## A million active clients a day

An active client takes part in one round per day. This makes {MILLION / DAY:.1f} clients per second. "Cores" is the
number of cores that a simulation would keep busy all day at the costs above. Traffic is the average traffic of the
server of a real federation, up and down together; real traffic has peaks. Private state is that of all million
clients.

| work | CPU ms per client | cores | one round of all on 64 cores | traffic, Mbit/s | kB per client | private state GB |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
{table}

These are calculations, not measurements. They assume that the cost of a client stays constant beyond the measured
sizes, and that all cores are like those of this machine."""


def _needs(what: str, seconds: float, up: float, down: float, private: float) -> str:
    whole = MILLION * seconds / 64
    took = f"{whole:.1f} s" if whole < 120 else f"{whole / 60:.0f} min"
    traffic = MILLION * (up + down) * 8 / DAY / 1e6
    cores = MILLION * seconds / DAY
    return (
        f"| {what} | {1e3 * seconds:.3g} | {cores:.2g} | {took} | {traffic:.3g} | {(up + down) / 1e3:.3g} | "
        f"{MILLION * private / 1e9:.3g} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="numbers of clients in a round")
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 2], help="how many nodes, the smallest first")
    parser.add_argument("--child", nargs=3, metavar=("CLIENTS", "METHOD", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        clients, method, folder = asked.child
        print(json.dumps(round_of(int(clients), method, Path(folder))))
        return
    if asked.nodes and max(asked.nodes) > (cores := len(os.sched_getaffinity(0))):
        raise UserError(f"--nodes {max(asked.nodes)}: a node has a core of its own, and there are {cores}")
    KEPT.mkdir(parents=True, exist_ok=True)
    for clients in asked.sizes:
        with tempfile.TemporaryDirectory() as folder:
            for method in ("", *METHODS):  # the first one writes the population
                command = [sys.executable, __file__, "--child", str(clients), method, str(Path(folder) / "people")]
                done = subprocess.run(
                    command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
                )
                if done.returncode:
                    raise UserError(done.stderr)
                if method:
                    (KEPT / f"round-{clients:08d}-{method}.json").write_text(done.stdout, encoding="utf-8")
                    print(done.stdout.strip())
    if asked.nodes:
        with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as folder:  # sockets have short paths
            measured = nodes_of(sorted(asked.nodes), Path(folder))
        (KEPT / "nodes.json").write_text(json.dumps(measured), encoding="utf-8")
        print(json.dumps(measured))
    kept = sorted(KEPT.glob("round-*.json"), key=lambda path: path.name.split("-")[::-1])
    nodes = json.loads((KEPT / "nodes.json").read_text()) if (KEPT / "nodes.json").exists() else None
    rounds = [json.loads(path.read_text()) for path in kept]
    PAGE.write_text(
        page(sorted(rounds, key=lambda r: (METHODS.index(r["method"]), r["clients"])), nodes), encoding="utf-8"
    )


if __name__ == "__main__":
    program(main)
