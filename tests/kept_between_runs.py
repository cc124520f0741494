"""Traced graphs and results of probes, kept from one test run to the next.

They lie in $TLORA_FX_TEST_TRACES, else in `tlora-fx-tests` of the user's cache folder. Their names
are hashes of all that decides them: the base, the jobs, tlora_fx's own code and all versions. So no
run reads what other code made, and what is old is removed.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

KEPT = ("traces", "probes")
KEPT_DAYS = 30


def link(cache: Path) -> Path:
    """Let a run's own cache folder read and write what is kept; returns the folder that is kept."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tlora-fx-tests"
    folder = Path(os.environ.get("TLORA_FX_TEST_TRACES") or home).absolute()
    cache.mkdir(parents=True)
    try:
        for name in KEPT:
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = cache  # nothing can be kept here
    if folder != cache:
        for name in KEPT:
            (cache / name).symlink_to(folder / name)
        _remove_old(folder)
    return folder


def _remove_old(folder: Path) -> None:
    """Remove results of probes that nobody needed lately; traces have a limit of their own."""
    oldest = time.time() - KEPT_DAYS * 86_400
    for path in (folder / "probes").iterdir():
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()
