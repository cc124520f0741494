"""Whatever a file holds, its reader succeeds or raises our own error, quickly and in little memory.

`make fuzz` tries 20,000 cases; `make test` a few of each kind.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.files import NAMES, emptied, kind_of
from tests.fuzz.limits import limited
from tlora_fx.errors import TloraError

#: Cases of each kind.
CASES = int(os.environ.get("TLORA_FX_FUZZ_CASES", "20"))
#: Reading one takes a tenth of a second.
SLOW = {"parquet": 10, "saved": 4}


@pytest.mark.parametrize("name", NAMES)
def test_every_reader_answers_whatever_it_reads(name, tmp_path, monkeypatch):
    """Our own error or success, in bounded time and 500 MB."""
    monkeypatch.setenv("TLORA_FX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "good").mkdir()
    (tmp_path / "cases").mkdir()
    kind = kind_of(name, tmp_path / "good")
    folders = emptied(tmp_path / "cases")
    whole = next(folders)
    kind.good(whole)
    kind.read(whole)

    @settings(
        max_examples=max(1, CASES // SLOW.get(name, 1)),
        database=None,
        derandomize="TLORA_FX_FUZZ_CASES" not in os.environ,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=True,
    )
    @given(case=kind.cases)
    def answers(case):
        folder = next(folders)
        case(folder)
        with warnings.catch_warnings(), limited(), suppress(TloraError):
            warnings.simplefilter("ignore")
            kind.read(folder)

    answers()
