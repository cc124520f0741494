"""Within these limits a reader answers, whatever it reads."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Seconds of the processor, so that a busy machine does not count, and of the clock, for a reader
#: that waits for something. No reader comes near them on any machine, unless it goes on for ever.
CPU_SECONDS = 20.0
WALL_SECONDS = 600.0
BYTES = 500 << 20


class TooSlow(BaseException):
    """No reader catches this."""


@contextmanager
def limited() -> Iterator[None]:
    """Inside, at most `CPU_SECONDS` and 500 MB more than before."""

    def stop(number: int, frame: object) -> None:
        raise TooSlow(f"more than {CPU_SECONDS} s ({signal.Signals(number).name})")

    before = {each: signal.signal(each, stop) for each in (signal.SIGPROF, signal.SIGALRM)}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, hard))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for each, handler in before.items():
            signal.signal(each, handler)
