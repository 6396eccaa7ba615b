"""Measures one federated round, in clients per second, with bespoke and with other frameworks.

All peers train on the same tensors from the same parameters in the same order of minibatches. They take turns in one
run; a signal stops a peer while it is another peer's turn. First their updates are compared. A peer whose update
differs from that of the plain PyTorch loop is reported as failed and is not timed.

Each framework has its own virtual environment, which is made on demand. The peers `loop`, `centralised` and `bespoke`
run with the interpreter that runs this file.
"""

import argparse
import json
import os
import platform
import select
import shlex
import signal
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import population
import sections
from peers import processes, workloads
from peers.protocol import CORES

BENCHMARKS = Path(__file__).resolve().parent
REPOSITORY = BENCHMARKS.parent
TOLERANCE = 1e-3
"""Largest relative error of a peer's update: float32 rounding in another order stays well below."""
WITHIN = 0.5
"""The same in bfloat16, as a part of what another order of each client's rows, another seed's, makes of the loop's."""
TURN_SECONDS = 0.5
"""A peer's turn is one round, or as many as fit in this: short rounds are too noisy one by one."""
MOST_ROUNDS = 500
"""Rounds asked for at once."""
PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class Contestant:
    module: str
    """Name of the file in `benchmarks/peers`."""
    requirements: tuple[str, ...] = ()
    """What its own environment holds. Without any, it runs with this interpreter."""
    is_federated: bool = True
    """Whether its update must be that of FedAvg."""
    low_precision: bool = False
    """Whether its products are of eight significant bits."""
    checkout: Path = REPOSITORY
    """The checkout of this project that has the peer, and the package where it runs with this interpreter."""


TORCH = "torch==2.13.0"
CONTESTANTS = {  # In the order of turns: the reference comes first, because the others are compared with it.
    "loop": Contestant("loop"),
    "centralised": Contestant("centralised", is_federated=False),
    "flower": Contestant("flower", ("flwr[simulation]==1.41.0", TORCH)),
    "pfl": Contestant("pfl", ("pfl[pytorch]==0.6.0", TORCH)),
    # FedJAX's last release predates both: small models are fastest with the newer JAX, the CNN with the older.
    "fedjax": Contestant("fedjax", ("fedjax==0.0.17", "jax==0.10.2", "jaxlib==0.10.2")),
    "fedjax-older": Contestant("fedjax", ("fedjax==0.0.17", "jax==0.5.3", "jaxlib==0.5.3")),
    "bespoke": Contestant("bespoke"),
    "bespoke-bf16": Contestant("bespoke_bf16", low_precision=True),
}
OURS, LOW, REFERENCE, BEFORE = "bespoke", "bespoke-bf16", "loop", "bespoke-before"
AS_FAST = 0.97  # of an earlier checkout's rate; what is below it has become slower

# How many times as fast as the peer bespoke means to be. Centralised training does the arithmetic without any
# federation; single-threaded workers can still beat its two threads.
ABOVE_ALL = {name: 1.0 for name in CONTESTANTS if name not in (OURS, LOW)}
TARGETS: dict[str, dict[str, float]] = {
    "w1": {"flower": 80, "pfl": 15, "fedjax": 5, "fedjax-older": 5},
    "w2": dict.fromkeys(ABOVE_ALL, 1.2),
    "w3": {"pfl": 75, "flower": 200},
    "w3b": {"pfl": 75, "flower": 200},
    "w4": {**dict.fromkeys(ABOVE_ALL, 1.2), "pfl": 1.25},
    "w5": {**dict.fromkeys(ABOVE_ALL, 1.25)},
}


@dataclass
class Result:
    """What is known about one peer on one workload. `failure` says why there is no more."""

    peer: str
    version: str = ""
    rates: list[float] = field(default_factory=list)
    """Clients per second, one for each turn."""
    startup_seconds: float | None = None
    first_round_seconds: float | None = None
    peak_mb: float = 0.0
    relative_error: float | None = None
    failure: str | None = None

    @property
    def rate(self) -> float | None:
        return None if self.failure or not self.rates else statistics.median(self.rates)


class Failure(Exception):
    """A peer could not do what it was asked; the message goes into the table."""


class PeerProcess:
    """A peer in a process of its own, with all that it starts."""

    def __init__(self, name: str, python: str, scratch: Path) -> None:
        module, checkout = CONTESTANTS[name].module, CONTESTANTS[name].checkout
        if not (checkout / "benchmarks" / "peers" / f"{module}.py").exists():
            raise Failure(f"there is no benchmarks/peers/{module}.py in {checkout}")
        package = [] if checkout == REPOSITORY else [str(checkout / "src")]
        python_path = [str(checkout / "benchmarks"), *package, *filter(None, [os.environ.get("PYTHONPATH")])]
        scratch.mkdir(parents=True, exist_ok=True)
        with open(scratch / f"{name}.log", "wb") as log:
            self.process = subprocess.Popen(
                [python, "-m", "peers", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=scratch,  # Not the repository: some libraries leave files where they run.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path)},
                start_new_session=True,
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While it is this peer's turn. After it the peer is stopped, because some are busy even when idle."""
        processes.resume(self.process.pid)
        try:
            yield
        finally:
            processes.pause(self.process.pid)

    def ask(self, **command: Any) -> dict[str, Any]:
        try:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
            answer = self._read_answer()
        except BrokenPipeError:
            raise Failure(f"ended before it was asked to {command['cmd']}") from None
        if "error" in answer:
            raise Failure(f"could not {command['cmd']}: {answer['error']}")
        return answer

    def _read_answer(self) -> dict[str, Any]:
        deadline, received = time.monotonic() + PATIENCE_SECONDS, b""
        output = self.process.stdout.fileno()
        while not received.endswith(b"\n"):
            if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise Failure(f"gave no answer in {PATIENCE_SECONDS:.0f} s")
            if not (chunk := os.read(output, 1 << 16)):
                raise Failure("ended unexpectedly")
            received += chunk
        return json.loads(received)

    def close(self) -> None:
        """Asks the peer to quit, and ends whatever of it is left then."""
        everything = processes.tree(self.process.pid)
        processes.resume(self.process.pid)
        # Its answer is not read: an interrupted command's might still come first.
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.process.stdin.write(b'{"cmd": "quit"}\n')
            self.process.stdin.flush()
            self.process.wait(timeout=30)
        processes.end(everything)
        self.process.wait()


def interpreter(name: str, cache: Path) -> str:
    """The Python to run the peer with; makes its environment if there is none yet, or another."""
    requirements = CONTESTANTS[name].requirements
    if not requirements:
        return sys.executable
    folder = cache / "environments" / name
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join(requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        install = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "numpy", *requirements],
            capture_output=True,
            text=True,
        )
        if install.returncode:
            complaints = [line for line in install.stderr.splitlines() if line.startswith("ERROR")]
            raise Failure(f"does not install: {complaints[0] if complaints else 'pip failed'}")
        stamp.write_text(wanted)
    return str(python)


def relative_error(update: Path, reference: Path) -> float:
    with np.load(update) as ours, np.load(reference) as theirs:
        if set(ours.files) != set(theirs.files):
            raise Failure(f"updates {sorted(ours.files)} instead of {sorted(theirs.files)}")
        if any(ours[name].shape != theirs[name].shape for name in theirs.files):
            raise Failure("its update has other shapes")
        difference = sum(float(np.square(ours[name] - theirs[name], dtype=np.float64).sum()) for name in theirs.files)
        scale = sum(float(np.square(theirs[name], dtype=np.float64).sum()) for name in theirs.files)
    return (difference / scale) ** 0.5


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Race:
    """One workload, all peers in turn."""

    def __init__(self, workload_name: str, peers: list[str], cache: Path) -> None:
        self.name = workload_name
        self.cache = cache
        self.path = workloads.make(workload_name, cache / "workloads")
        self.workload = workloads.load(str(self.path))
        self.results = {peer: Result(peer) for peer in peers}
        self.running: dict[str, PeerProcess] = {}

    def run(self, repeats: int) -> list[Result]:
        try:
            for peer in self.results:
                say(f"{self.name}: {peer} starts, and its update is checked")
                self.attempt(peer, self.start)
            for repetition in range(repeats):
                for peer in list(self.running):
                    self.attempt(peer, lambda peer, repetition=repetition: self.take_turn(peer, repetition))
                standing = ", ".join(f"{r.peer} {r.rates[-1]:,.4g}" for r in self.results.values() if r.rate)
                say(f"{self.name}: repetition {repetition + 1} of {repeats}, clients/s: {standing}")
        finally:
            for process in self.running.values():
                process.close()
        return list(self.results.values())

    def attempt(self, peer: str, action: Callable[[str], None]) -> None:
        """A peer that fails drops out; the others go on."""
        try:
            action(peer)
        except Failure as failure:
            self.results[peer].failure = str(failure)
            say(f"{self.name}: {peer} FAILED: {failure}")
            if process := self.running.pop(peer, None):
                process.close()

    def start(self, peer: str) -> None:
        result = self.results[peer]
        python = interpreter(peer, self.cache)
        scratch = self.cache / "scratch" / self.name
        update = scratch / f"{peer}.npz"
        update.unlink(missing_ok=True)
        process = self.running[peer] = PeerProcess(peer, python, scratch)
        ready, first = self.updated(process, self.path, update)
        result.version, result.startup_seconds = ready["version"], ready["startup_seconds"]
        result.first_round_seconds, result.peak_mb = first["seconds"], first["peak_rss_mb"]
        if not CONTESTANTS[peer].is_federated:
            return
        if self.results[REFERENCE].failure:
            raise Failure(f"`{REFERENCE}` failed, so there is nothing to check its update against")
        result.relative_error = relative_error(update, scratch / f"{REFERENCE}.npz")
        tolerance, besides = TOLERANCE, ""
        if CONTESTANTS[peer].low_precision:
            spread = self.spread(scratch)
            tolerance, besides = WITHIN * spread, f"; rows in another order make {spread:.2g}"
            result.version += f"; relative error {result.relative_error:.2g}{besides}"
        # Written so that it also catches a result that is not a number.
        if not result.relative_error < tolerance:
            error = f"relative error {result.relative_error:.2g}{besides}"
            raise Failure(f"computes another update than `{REFERENCE}` ({error})")

    def updated(self, process: PeerProcess, workload: Path, update: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a peer says as it is loaded, and after the first round, whose update it writes."""
        with process.alone():
            ready = process.ask(cmd="load", workload=str(workload))
            return ready, process.ask(cmd="round", clients=self.workload.cohort(0), return_update=str(update))

    def spread(self, scratch: Path) -> float:
        """How far the reference's update is from its own with each client's rows in another order."""
        other = scratch / "reordered.npz"
        process = PeerProcess(REFERENCE, interpreter(REFERENCE, self.cache), scratch / "reordered")
        try:
            self.updated(process, workloads.reordered(self.path), other)
        finally:
            process.close()
        return relative_error(other, scratch / f"{REFERENCE}.npz")

    def take_turn(self, peer: str, repetition: int) -> None:
        result, process = self.results[peer], self.running[peer]
        clients, seconds, number = 0, 0.0, 0
        with process.alone():
            process.ask(cmd="reset")
            process.ask(cmd="round", clients=self.workload.cohort(0)[: 2 * CORES], return_update=None)  # to wake up
            while seconds < TURN_SECONDS:
                # one round to know how long it takes, then as many as fit, back to back as in training
                fit = int((TURN_SECONDS - seconds) / (seconds / number)) if number else 1
                numbers = range(number + 1, number + 1 + min(max(fit, 1), MOST_ROUNDS))
                cohorts = [self.workload.cohort(1000 * (repetition + 1) + n) for n in numbers]
                answer = process.ask(cmd="rounds", cohorts=cohorts)
                number += len(cohorts)
                clients, seconds = clients + answer["clients"], seconds + answer["seconds"]
                result.peak_mb = max(result.peak_mb, answer["peak_rss_mb"])
        result.rates.append(clients / seconds)


# ---------------------------------------------------------------------------------------------------- the document


@dataclass
class Report:
    results: dict[str, list[Result]]
    """By workload."""
    command: str
    repeats: int


def machine() -> str:
    described = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    model = next((value.strip() for key, _, value in described if key.strip() == "model name"), platform.machine())
    return f"{model}, {CORES} cores used, no GPU; {platform.system()}, Python {platform.python_version()}"


INTRODUCTION = f"""# Speed

The tables measure one federated round in clients per second: one local epoch on every client of the cohort, then
FedAvg weighted by examples. All peers compute the same update from the same tensors. This is checked first (relative
error below {TOLERANCE:g} against the plain loop). The peers take turns in one run. `loop` is a plain PyTorch loop
over clients with one thread. `centralised` is SGD over the same minibatches on one model with two threads, without
any federation. `bespoke-bf16` is bespoke with `[engine] precision = "bf16"`. Its update must be within the spread of
seeds: its distance from the loop's update must be less than half of the change that another order of each client's
rows makes to the loop's update.

A peer's turn is one round, or as many consecutive rounds as fit in half a second. Clients/s is the median over turns,
with the range. The ratio is bespoke's rate divided by the peer's rate; the target is its required minimum. The first
round includes any compilation and is not part of the median. Memory is the sum of the peaks of all processes of a
peer. Sections are measured separately, each on the machine that it names. Ratios can be compared, rates cannot."""


def speed_tables(report: Report) -> list[str]:
    measured = f"Machine: {machine()}. Turns for each peer: {report.repeats}. Command: `{report.command}`"
    return [f"{speed_table(name, results)}\n\n{measured}" for name, results in report.results.items()]


def speed_table(workload: str, results: list[Result]) -> str:
    settings = workloads.CATALOGUE[workload][0]
    ours = next((result.rate for result in results if result.peer == OURS), None)
    lines = [
        f"## {settings.title}",
        "",
        settings.about,
        "",
        "| peer | version | clients/s (range) | bespoke / peer | target | start-up s | first round s | peak MB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for result in results:
        target = AS_FAST if result.peer == BEFORE else TARGETS[workload].get(result.peer)
        if result.rate is None:
            reason = " ".join((result.failure or "not measured").replace("|", "/").split())
            speed, ratio = f"failed: {reason[:200]}", ""
        else:
            speed = f"{result.rate:,.4g} ({min(result.rates):,.4g} to {max(result.rates):,.4g})"
            ratio = f"{ours / result.rate:.3g}" if ours and result.peer != OURS else ""
        cells = [
            result.peer,
            result.version,
            speed,
            ratio,
            f"{target:.3g}" if target else "",
            "" if result.startup_seconds is None else f"{result.startup_seconds:.1f}",
            "" if result.first_round_seconds is None else f"{result.first_round_seconds:.2f}",
            f"{result.peak_mb:,.0f}" if result.peak_mb else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------- the command line


def choice_of(known: list[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


def parse_arguments() -> argparse.Namespace:
    catalogue = "\n".join(f"  {name:5}{settings.about}" for name, (settings, _) in workloads.CATALOGUE.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"workloads:\n{catalogue}\n\nexamples:\n"
        "  python benchmarks/speed.py --workloads w1 --peers loop,bespoke --repeats 3    a quick look\n"
        "  python benchmarks/speed.py --workloads w1,w3 --peers bespoke --before ../earlier\n"
        "  python benchmarks/speed.py --population --output docs/speed.md                the published tables",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--workloads",
        type=choice_of(list(workloads.CATALOGUE)),
        default=list(workloads.CATALOGUE),
        metavar="NAMES",
        help="separated by commas (default: all of them)",
    )
    parser.add_argument(
        "--peers",
        type=choice_of(list(CONTESTANTS)),
        default=list(CONTESTANTS),
        metavar="NAMES",
        help=f"separated by commas, of {', '.join(CONTESTANTS)} (default: all; `{REFERENCE}` always takes part)",
    )
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="turns for each peer (default: 10)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=REPOSITORY / ".cache" / "speed",
        metavar="DIR",
        help="keeps environments, workloads and the peers' logs (default: .cache/speed in the repository)",
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="DIR",
        help=f"an earlier checkout of this project takes part as `{BEFORE}`: has bespoke become slower since?",
    )
    parser.add_argument(
        "--population", action="store_true", help="also measure how rounds depend on the size of the population"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="put the tables into this page, not to stdout")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number here")
    return parser.parse_args()


def displayed_command() -> str:
    """The command as given, without the options that name places on this machine."""
    arguments = sys.argv[1:]
    for option in ("--before", "--cache", "--json", "--output"):
        while option in arguments:
            at = arguments.index(option)
            del arguments[at : at + 2]
        arguments = [argument for argument in arguments if not argument.startswith(f"{option}=")]
    return shlex.join(["python", "benchmarks/speed.py", *arguments])


def main() -> None:
    arguments = parse_arguments()
    # An ended benchmark must not leave peers behind: make the signal an exception, so that `finally` is reached.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    cache = arguments.cache.resolve()
    peers = [name for name in CONTESTANTS if name in arguments.peers or name == REFERENCE]
    if arguments.before:
        CONTESTANTS[BEFORE] = replace(CONTESTANTS[OURS], checkout=arguments.before.resolve())
        peers.append(BEFORE)
    report = Report({}, displayed_command(), arguments.repeats)
    for name in arguments.workloads:
        report.results[name] = Race(name, peers, cache).run(arguments.repeats)
    found = speed_tables(report)
    if arguments.population:
        found.append(population.table(population.measure(arguments.cache)))
    if arguments.output:
        sections.put(arguments.output, INTRODUCTION, found)
    else:
        print("\n\n".join(found))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"machine": machine(), **asdict(report)}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
