"""Print a table of verdicts: `python -m tests.silence auto|packed [PART OF A NAME]`."""

from __future__ import annotations

import collections
import logging
import sys
import time

import torch

from tests.silence.oracle import Form, judge
from tests.silence.written import NASTY, RIGHT


def main(form: Form, wanted: str) -> None:
    """One line a base, and the counts of verdicts at the end."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    counts: collections.Counter[str] = collections.Counter()
    for group, cases in {**RIGHT, **NASTY}.items():
        for name, make in cases.items():
            if wanted not in f"{group}: {name}":
                continue
            began = time.process_time()
            try:
                verdict = judge(make, form)
            except Exception as error:  # noqa: BLE001  (the base does not train alone either)
                sys.stdout.write(f"{group:<13} {name:<34} alone   {type(error)} {error}\n")
                continue
            seconds = time.process_time() - began
            counts[f"{verdict.form} {verdict.outcome}"] += 1
            sys.stdout.write(f"{group:<13} {name:<34} {verdict} ({seconds:.1f} s)\n")
            sys.stdout.flush()
    for outcome, count in sorted(counts.items()):
        sys.stdout.write(f"{count:5d}  {outcome}\n")


main(sys.argv[1], " ".join(sys.argv[2:]))  # type: ignore[arg-type]
