"""The code of every tested architecture is the accepted one: `make check` shows what changed.

`make dumps ACCEPT=--accept` accepts a change, which git then shows.
"""

from __future__ import annotations

import re

import pytest

from tests.models import FAMILIES, base_of, mixed_jobs
from tlora_fx.compiler import run_passes
from tlora_fx.model.source import group_source

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", FAMILIES)
def test_the_code_is_the_accepted_one(family, golden, tmp_path):
    """Of three jobs on it."""
    base = base_of(tmp_path, family, "float32")

    code = group_source(run_passes(mixed_jobs(base, FAMILIES[family].targets)), family)

    golden(f"dumps/{family}.txt", re.sub(r"[ \t]+\n", "\n", code))
