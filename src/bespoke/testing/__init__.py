"""`check_method`: the tests that all methods of bespoke pass, for methods of your own."""

from bespoke.testing.check import CheckFailed, check_method

__all__ = ["CheckFailed", "check_method"]
