"""Print verdicts on mixes: `python -m tests.silence.mixes FIRST [LAST]`, by seeds."""

from __future__ import annotations

import collections
import logging
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from tests import traced_once
from tests.silence.mixes.verdict import judge


def main(first: int, last: int) -> None:
    """One line a mix and one a job, and the counts of verdicts at the end."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    traced_once.install()
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, last + 1):
            began = time.process_time()
            try:
                mix, verdicts = judge(seed, Path(folder))
            except Exception:  # noqa: BLE001  (the other seeds are tried all the same)
                counts["alone"] += 1
                sys.stdout.write(f"seed {seed}: {traceback.format_exc()}\n")
                continue
            sys.stdout.write(f"{mix} ({time.process_time() - began:.1f} s)\n")
            for name, verdict in verdicts.items():
                counts[verdict.outcome] += 1
                counts[f"{mix.kinds[name]} {verdict.outcome}"] += 1
                sys.stdout.write(f"  {name} {mix.kinds[name]:<9} {verdict}\n")
            sys.stdout.flush()
    for outcome, count in sorted(counts.items()):
        sys.stdout.write(f"{count:5d}  {outcome}\n")


main(int(sys.argv[1]), int(sys.argv[-1]))
