"""The battery that every method of bespoke goes through, for methods of your own: `check_method`."""

from bespoke.testing.check import CheckFailed, check_method

__all__ = ["CheckFailed", "check_method"]
