"""Is the time of a whole comparison, its report included, proportional to its clients? How much memory does it need?

    python benchmarks/many_clients.py                     # 10,000, 100,000 and 1,000,000 clients, ten rows each
    python benchmarks/many_clients.py --clients 10000     # measures this size again
    python benchmarks/many_clients.py --clients           # measures nothing, writes the page from stored measurements

The program writes a table, and `bespoke compare` runs three methods on it with one seed; every client is tested. It
measures CPU seconds, which a busy machine changes little, and peak memory, in a separate process for each size.
Measurements are stored in runs/many-clients. All stored sizes appear in the section of docs/speed.md.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet

import sections
from bespoke.cli.exit_codes import program
from bespoke.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PAGE, KEPT = ROOT / "docs" / "speed.md", ROOT / "runs" / "many-clients"
ROWS, FEATURES, ROUNDS = 10, 5, 20
TARGET = 1_000_000  # clients that have to pass
METHODS = ("fedavg", "local", "finetune")


def write_table(path: Path, clients: int) -> None:
    """Linear regression in which every client has its own slope, so that personal models are better."""
    rng = np.random.default_rng(1)
    writer = None
    for begin in range(0, clients, 100_000):
        many = min(100_000, clients - begin)
        client = np.repeat(np.arange(begin, begin + many), ROWS)
        x = rng.normal(size=(len(client), FEATURES))
        slope = np.repeat(rng.normal(1.0, 0.5, (many, FEATURES)), ROWS, axis=0)
        columns = {"client": client, **{f"x{n}": x[:, n] for n in range(FEATURES)}}
        columns["y"] = (x * slope).sum(1) + rng.normal(0.0, 0.5, len(client))
        table = pyarrow.table(columns)
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer:
        writer.close()


def child(clients: int, folder: Path) -> None:
    """Runs one comparison and prints its time, memory and disk space."""
    table = folder / "table.parquet"
    write_table(table, clients)
    command = [
        sys.executable, "-m", "bespoke", "compare", str(table), "--client", "client", "--target", "y", "--methods",
        ",".join(METHODS), "--seeds", "1", "--rounds", str(ROUNDS), "--no-tune", "--jobs", "1", "--out",
        str(folder / "out"),
    ]  # fmt: skip
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"bespoke compare ended with {done.returncode}:\n{done.stderr}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    training = 0.0
    for log in (folder / "out").glob("runs/*/timing.jsonl"):
        training += sum(json.loads(line)["seconds"] for line in log.read_text().splitlines())
    found = {
        "clients": clients, "cpu": used.ru_utime + used.ru_stime, "wall": time.perf_counter() - begin,
        "rounds": training, "gigabytes": used.ru_maxrss / 2**20,
        "disk": sum(path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file()) / 2**30,
    }  # fmt: skip
    print(json.dumps(found))


def section(measured: list[dict[str, float]]) -> str:
    """The section of the page: a row for each size, and the cost of an additional client between the two largest."""
    rows = [
        f"| {one['clients']:,} | {one['cpu']:.1f} | {1e6 * one['cpu'] / one['clients']:.0f} | {one['gigabytes']:.2f} "
        f"| {one['disk']:.2f} |"
        for one in measured
    ]
    more = ""
    if len(measured) > 1:
        fewer, most = measured[-2:]
        clients = most["clients"] - fewer["clients"]
        time, memory = (most[what] - fewer[what] for what in ("cpu", "gigabytes"))
        more = f"From {fewer['clients']:,} to {most['clients']:,} clients, each additional client costs "
        more += f"{1e6 * time / clients:.0f} us of CPU and {2**20 * memory / clients:.1f} kB of memory."
        if (missing := TARGET - most["clients"]) > 0:
            needed = most["gigabytes"] + missing * memory / clients
            more += f"\nAt this rate {TARGET:,} clients would need {needed:.1f} GB. This was not measured."
    table = "\n".join(rows)
    return f"""## A whole comparison of many clients

A table with ten rows of five features per client, three methods, {ROUNDS} rounds of 100 clients. Every client is
tested, and the report is included. One process, one run of each size, in CPU seconds, which a busy machine changes
little. Target: {TARGET:,} clients in linear time, with less than 8 GB. Command: `python benchmarks/many_clients.py`

| clients | CPU s | CPU us per client | peak GB | folder GB |
| ---: | ---: | ---: | ---: | ---: |
{table}

{more}
The largest part of the memory is the scores of all 46 candidates of fine-tuning on all clients' rows. They are stored
in single precision, with one column for what all candidates share, and are put into their tables while personal
models are made. Choices are made one candidate after the other."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        with tempfile.TemporaryDirectory() as folder:
            child(arguments.clients[0], Path(folder))
        return
    KEPT.mkdir(parents=True, exist_ok=True)
    print(f"{'clients':>10} {'CPU s':>8} {'CPU us per client':>17} {'peak GB':>8} {'folder GB':>10}")
    for clients in arguments.clients:
        command = [sys.executable, __file__, "--child", "--clients", str(clients)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise UserError(done.stderr)
        (KEPT / f"{clients}.json").write_text(done.stdout, encoding="utf-8")
        found = json.loads(done.stdout)
        each = 1e6 * found["cpu"] / clients
        print(f"{clients:>10,} {found['cpu']:>8.1f} {each:>17.0f} {found['gigabytes']:>8.2f} {found['disk']:>10.2f}")
    measured = sorted((json.loads(path.read_text()) for path in KEPT.glob("*.json")), key=lambda one: one["clients"])
    sections.put(PAGE, sections.parts(PAGE.read_text(encoding="utf-8"))[0], [section(measured)])


if __name__ == "__main__":
    program(main)
