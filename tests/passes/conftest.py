"""The kinds of jobs that tests of passes name."""

from tests.traced import KINDS

__all__ = ["KINDS"]
