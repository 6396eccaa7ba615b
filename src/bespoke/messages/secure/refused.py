"""Errors of the protocol. Each is a UserError: the command ends with a sentence, not with a traceback."""

from __future__ import annotations

from bespoke.errors import UserError


class Refused(UserError):
    """A message or request that a client or the server does not accept. The refusal reveals nothing secret."""


class TooFew(Refused):
    """Fewer clients remain than the threshold or the least number, so there is no sum."""


class Overflow(Refused):
    """A value that is too large for the fixed point."""

    def __init__(self, message: str, place: int, value: float, limit: float) -> None:
        super().__init__(message)
        self.place, self.value, self.limit = place, value, limit  # place: of the value in the vector
