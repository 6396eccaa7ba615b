"""A host on another machine. It answers bytes with bytes, and its rows are its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from bespoke.errors import RemoteLost, UserError
from bespoke.federation.calls import OPERATIONS, Call, serve
from bespoke.federation.host import Host
from bespoke.federation.opening import Opening
from bespoke.federation.wire import LIMIT, bound, decode_call, encode_answer
from bespoke.federation.work import ClientWork

NOT_HERE = frozenset({"move", "personal"})  # changing rows need one machine; personal models stay here


class Site:
    """Serves calls that arrive as bytes over any transport.

    `work_of` makes a stage's work from an opening and this place's own rows (bespoke.experiment.opening). The site
    keeps its last answer. If a message arrives twice, because its answer was lost, the site sends the same bytes
    again and executes nothing.
    """

    def __init__(
        self,
        host: Host,
        work_of: Callable[[Opening], ClientWork],
        limit: int = LIMIT,
        allowed: Collection[str] = frozenset(OPERATIONS) - NOT_HERE,
        failed: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        """`failed` gets each exception that is not a user's mistake; the other side learns only its class name."""
        self.host, self.work_of, self.limit, self.allowed, self.failed = host, work_of, limit, allowed, failed
        self.last: tuple[bytes, bytes] | None = None  # digest of a message, and its answer

    def answer(self, message: bytes) -> bytes:
        """Answers a message, with a refusal if necessary."""
        seen = hashlib.blake2b(message).digest()
        if self.last is not None and self.last[0] == seen:
            return self.last[1]
        operation = ""
        try:
            call = decode_call(message, self.limit)
            operation = call.operation
            answer = encode_answer(operation, self.carry_out(call), self.limit)
        except (UserError, RemoteLost) as error:
            return encode_answer(operation, error)
        except Exception as error:
            self.failed(error)
            return encode_answer(operation, error)
        self.last = seen, answer
        return answer

    def carry_out(self, call: Call) -> Any:
        if call.operation not in self.allowed:
            raise UserError(f"this place does not carry out {call.operation!r}")
        values = {name: bound(value, self.host.population) for name, value in call.values.items()}
        if call.operation == "open":
            values["work"] = self.work_of(values["work"])
        return serve(self.host, replace(call, values=values))
