"""Of many cases of one claim, some are tried in each run of the tests; `make slow` tries all.

Of the suites that `large.txt` names, a run tries one third of all cases. The commit chooses it, so
that a run can be repeated, and commits together try all. `TLORA_FX_SAMPLE=0`, `1`, `2` or `all`
says otherwise.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import pytest

HERE = Path(__file__).parent
VARIABLE = "TLORA_FX_SAMPLE"
ALL = "all"
LARGE = frozenset(
    line for line in (HERE / "large.txt").read_text().splitlines() if not line.startswith("#")
)
Third = Literal["0", "1", "2", "all"]


def third_of(environment: dict[str, str]) -> Third:
    """Which third of large suites a run tries; without git the first."""
    match environment.get(VARIABLE):
        case None:
            words = ["git", "-C", str(HERE), "rev-parse", "HEAD"]
            try:
                done = subprocess.run(words, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                return "0"
            found = int(done.stdout, 16) % 3 if done.returncode == 0 else 0
            return "012"[found]  # type: ignore[return-value]
        case "0" | "1" | "2" | "all" as said:
            return said
        case other:
            raise pytest.UsageError(f"{VARIABLE} is 0, 1, 2 or {ALL}, not {other!r}")


THIRD = third_of(dict(os.environ))
# Workers, and processes with an interpreter of their own, try the same.
os.environ[VARIABLE] = THIRD


def is_tried(name: str, third: Third) -> bool:
    """Whether a case is of a third.

    name   FILE::TEST[CASE], the file below this folder
    """
    if third == ALL or name.partition("::")[0] not in LARGE:
        return True
    return zlib.crc32(name.encode()) % 3 == int(third)


def sampled(cases: Iterable[Any], one_of: int = 3) -> list[Any]:
    """Parameters of a test: one of so many is quick, the others are marked `slow`.

    cases   names, or tuples of several parameters
    """
    parameters = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marks = [pytest.mark.slow] if number % one_of else []
        parameters.append(pytest.param(*values, marks=marks))
    return parameters
