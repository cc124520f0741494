"""Tests of passes and operators: small models, equivalence, check files, accepted texts.

    from tlora_fx.testing import around, assert_equivalent, small_base, small_job

    def test_my_pass_keeps_numbers(tmp_path):
        base = small_base(tmp_path)
        before, after = around([small_job("a", base)], "my-pass@after:fuse-backbone")
        assert_equivalent(before, after)

The pytest fixture `golden` and check files (`checks.py`) come with
`pytest_plugins = ["tlora_fx.testing.plugin"]`, and need `pip install 'tlora-fx[testing]'`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tlora_fx.testing.checks import check_text, run_check_file
    from tlora_fx.testing.equivalence import around, assert_equivalent, small_base, small_job
    from tlora_fx.testing.operators import operator_tests

_HOMES = {"check_text": "checks", "run_check_file": "checks", "operator_tests": "operators"}
__all__ = [
    "around",
    "assert_equivalent",
    "check_text",
    "operator_tests",
    "run_check_file",
    "small_base",
    "small_job",
]


def __getattr__(name: str) -> Any:
    """Import when used: a session of pytest that only takes the plugin does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    home = _HOMES.get(name, "equivalence")
    return getattr(import_module(f"{__name__}.{home}"), name)
