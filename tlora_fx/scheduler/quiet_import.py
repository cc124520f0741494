"""Import heavy packages without what they log about parts that they do not find."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def without_warnings() -> Iterator[None]:
    """Inside, nothing below an error is logged, whoever logs it."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


def quiet_import(*names: str) -> None:
    """Import packages; mistakes are raised and errors logged as ever.

    PEFT looks for every library of quantised weights, and each of them tells which of its own
    parts this machine lacks.
    """
    with without_warnings():
        for name in names:
            import_module(name)
