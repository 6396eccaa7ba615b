"""The cost of secure sums: one round of ten clients with 1.2 million numbers each, two of which drop out. Writes a
table in docs/security.md.

    python benchmarks/secure.py [--numbers 1200000] [--clients 10] [--dropping 2] [--repeats 3] [--dry]

Clients and server run one after the other in this process and exchange bytes. Times are process times of one core,
medians over the repeats. Takes a quarter of a minute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bespoke.cli.exit_codes import program
from bespoke.messages.secure.client import Client
from bespoke.messages.secure.keys import Identity
from bespoke.messages.secure.server import Server, terms_for
from bespoke.storage import write_text

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
BEGIN, END = "<!-- secure table -->", "<!-- end -->"
BITS = 32


@dataclass
class Measured:
    """One round: seconds by step, of a client or of the server; bytes of a client that stays."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    masked_bytes: int = 0
    other_bytes: int = 0
    received_bytes: int = 0
    error: float = 0.0

    def timed(self, step: str, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.process_time()
        found = call(*arguments)
        self.seconds.setdefault(step, []).append(time.process_time() - began)
        return found


def measure(clients: int, dropping: int, numbers: int, number: int) -> Measured:
    """A round in which the last `dropping` clients never send their numbers."""
    identities = {f"site {i}": Identity() for i in range(clients)}
    directory = {name: identity.public for name, identity in identities.items()}
    members = [Client(name, identity, directory) for name, identity in identities.items()]
    values = [np.random.default_rng([number, i]).standard_normal(numbers).astype(np.float32) for i in range(clients)]
    terms = terms_for(number, list(identities), numbers, threshold=0.6, least=3, bits=BITS)
    server, found = Server(terms, directory), Measured()
    staying = range(clients - dropping)

    keys = [found.timed("keys", member.keys, terms.to_bytes()) for member in members]
    roster = found.timed("server passes on", server.roster, keys)
    shares = [found.timed("shares", member.shares, roster) for member in members]
    boxes = found.timed("server passes on", server.inboxes, shares)
    for i in staying:
        message = found.timed("masking", members[i].masked, boxes[i], values[i].astype(np.float64))
        found.masked_bytes = len(message)
        found.timed("server adds", server.add, message)
    survivors = server.survivors()
    consents = [found.timed("consent", members[i].consent, survivors) for i in staying]
    consented = found.timed("server passes on", server.consents, consents)
    revealed = [found.timed("reveal", members[i].reveal, consented) for i in staying]
    total = found.timed("unmasking", server.total, revealed)
    exact = np.sum([values[i].astype(np.float64) for i in staying], axis=0)
    found.error = float(np.abs(total - exact).max())
    found.other_bytes = sum(len(sent[0]) for sent in (keys, shares, consents, revealed))
    found.received_bytes = len(terms.to_bytes()) + len(roster) + len(boxes[0]) + len(survivors) + len(consented)
    return found


def table(rounds: list[Measured], numbers: int) -> str:
    """Medians over the rounds, as a table."""

    def seconds(step: str, together: bool = False) -> str:
        each = [sum(r.seconds[step]) if together else median(r.seconds[step]) for r in rounds]
        if median(each) >= 0.01:
            return f"{median(each):.2f} s"
        return f"{1000 * median(each):.1f} ms" if median(each) >= 1e-4 else "below 0.1 ms"

    one = rounds[0]
    bound = (len(one.seconds["masking"])) * 2.0 ** -(BITS + 1)
    rows = [
        ("a client: keys, and shares for the others", f"{seconds('keys')} + {seconds('shares')}"),
        ("a client: masking its numbers", seconds("masking")),
        ("a client: consenting and revealing", f"{seconds('consent')} + {seconds('reveal')}"),
        ("the server: adding up masked numbers as they arrive", seconds("server adds", True)),
        ("the server: unmasking the sum", seconds("unmasking")),
        ("a client sends: masked numbers", f"{one.masked_bytes / 1e6:.2f} MB"),
        ("a client sends: everything else", f"{one.other_bytes / 1e3:.1f} kB"),
        ("a client receives besides the model", f"{one.received_bytes / 1e3:.1f} kB"),
        ("largest error of the sum (bound)", f"{max(r.error for r in rounds):.1e} ({bound:.1e})"),
    ]
    return "\n".join(["| what | cost |", "|---|---|", *(f"| {what} | {cost} |" for what, cost in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=1_200_000)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--dropping", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="print the table and leave the page as it is")
    asked = parser.parse_args()
    rounds = [measure(asked.clients, asked.dropping, asked.numbers, number) for number in range(asked.repeats)]
    said = f"{asked.clients} clients, {asked.dropping} of them dropping out, {asked.numbers:,} numbers each."
    made = f"{said}\n\n{table(rounds, asked.numbers)}"
    print(made)
    if not asked.dry:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        write_text(PAGE, f"{before}{BEGIN}\n{made}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    program(main)
