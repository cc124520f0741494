"""Import packages without the warnings about what this machine lacks."""

from __future__ import annotations

import logging
from importlib import import_module


def quiet_import(*names: str) -> None:
    """Import packages; mistakes are raised and errors logged as ever.

    PEFT looks for every library of quantised weights, and each of them warns of its own parts that
    are missing.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        for name in names:
            import_module(name)
    finally:
        logging.disable(before)
