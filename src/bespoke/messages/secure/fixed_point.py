"""Fixed point modulo 2^64: numbers become integer multiples of 2^-bits, so that masks cancel exactly in the sum.

A value x becomes round(x 2^bits) modulo 2^64, negative values by their complement. Each value is rounded once, so the
error of the sum of n values is at most n 2^-(bits+1); the sum becomes a float64. It is right if the true sum is within
+-2^(63-bits). A client refuses values beyond 2^(62-bits) / n, so that n clients cannot leave this range together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bespoke.messages.secure.refused import Overflow

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]
MODULUS_BITS = 64


@dataclass(frozen=True)
class FixedPoint:
    """Numbers with `bits` binary digits behind the point, for sums over at most `clients` clients."""

    bits: int
    clients: int

    @property
    def limit(self) -> float:
        """The largest size of a value that a client may send."""
        return float(2.0 ** (MODULUS_BITS - 2 - self.bits) / self.clients)

    def error(self, clients: int) -> float:
        """The largest error of the sum of so many clients' values."""
        return float(clients * 2.0 ** -(self.bits + 1))

    def encode(self, values: Floats) -> Words:
        within = np.abs(values) <= self.limit  # false for NaN, too
        if not within.all():
            place = int(np.flatnonzero(~within)[0])
            value = float(values[place])
            raise Overflow(
                f"the value {value:g} is beyond {self.limit:g}, the largest that each of {self.clients} clients may "
                f"send with secure.bits = {self.bits}: their sum could overflow; use fewer bits, or clip",
                place, value, self.limit,
            )  # fmt: skip
        whole: Words = np.rint(np.ldexp(values, self.bits)).astype(np.int64).view(np.uint64)
        return whole

    def decode(self, total: Words) -> Floats:
        values: Floats = np.ldexp(total.view(np.int64).astype(np.float64), -self.bits)
        return values
