"""Does a whole comparison, its report included, take time in proportion to its clients, and how much memory?

    python benchmarks/many_clients.py                          # 100,000 and 1,000,000 clients, ten rows each
    python benchmarks/many_clients.py --clients 10000 20000

A table is written, and `bespoke compare` runs three methods on it with one seed, every client tested. It counts CPU
seconds, which a busy machine does not change, and the peak of memory, in a process of its own for every size.
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

from bespoke.cli.exit_codes import program
from bespoke.errors import UserError

ROWS, FEATURES, ROUNDS = 10, 5, 20
METHODS = ("fedavg", "local", "finetune")


def write_table(path: Path, clients: int) -> None:
    """Clients with a slope of their own: linear regression, where a model of one's own pays."""
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
    """One comparison; prints what it took, of it the reading, and how the runs and the report share it."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        with tempfile.TemporaryDirectory() as folder:
            child(arguments.clients[0], Path(folder))
        return
    print(f"{'clients':>10} {'CPU s':>8} {'CPU us a client':>16} {'peak GB':>8} {'folder GB':>10}")
    for clients in arguments.clients:
        command = [sys.executable, __file__, "--child", "--clients", str(clients)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise UserError(done.stderr)
        found = json.loads(done.stdout)
        each = 1e6 * found["cpu"] / clients
        print(f"{clients:>10,} {found['cpu']:>8.1f} {each:>16.0f} {found['gigabytes']:>8.2f} {found['disk']:>10.2f}")


if __name__ == "__main__":
    program(main)
