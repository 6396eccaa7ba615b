"""A host on another machine: it answers bytes with bytes, and takes its rows from nobody."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from bespoke.errors import UserError
from bespoke.federation.calls import OPERATIONS, Call, serve
from bespoke.federation.host import Host
from bespoke.federation.opening import Opening
from bespoke.federation.processes import RemoteLost
from bespoke.federation.wire import LIMIT, bound, decode_call, encode_answer
from bespoke.federation.work import ClientWork

NOT_HERE = frozenset({"move", "personal"})  # rows that come and go are one machine's; personal models do not leave


class Site:
    """Serves calls that come as bytes, whatever brings them.

    `work_of` makes a stage's work of an opening and of this place's own rows (bespoke.experiment.opening). The last
    answer is kept: a message that comes twice, because its answer was lost, is answered with the same bytes and not
    carried out again.
    """

    def __init__(
        self,
        host: Host,
        work_of: Callable[[Opening], ClientWork],
        limit: int = LIMIT,
        allowed: Collection[str] = frozenset(OPERATIONS) - NOT_HERE,
        failed: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        """`failed`: told of what goes wrong here and is no user's mistake; the other side hears its name alone."""
        self.host, self.work_of, self.limit, self.allowed, self.failed = host, work_of, limit, allowed, failed
        self.last: tuple[bytes, bytes] | None = None  # digest of a message, and what it was answered

    def answer(self, message: bytes) -> bytes:
        """The answer to a message; a refusal, if that is what there is to say."""
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
