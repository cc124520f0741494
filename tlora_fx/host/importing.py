"""Import libraries without looking for garbage meanwhile.

What modules are made of stays. Python's collector looks through all of it again and again while
they are imported: of torch, transformers and tlora_fx that is a fifth of the CPU time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from tlora_fx.host.phases import phase


@contextmanager
def importing() -> Iterator[None]:
    """Inside, modules are imported: a phase of the start, in which nothing is collected."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with phase("imports"):
            yield
    finally:
        if enabled:
            gc.enable()


def keep_imported() -> None:
    """Let later collections pass over all that is there now.

    Only of a process that has no data yet: garbage among it would stay, too.
    """
    gc.freeze()
