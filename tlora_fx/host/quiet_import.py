"""Import packages without the warnings about what this machine lacks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module

#: By logger, what the messages have in them: kernels for other GPUs, one library's use of what
#: another will drop, and a damaged file that our own error tells of.
NOTICES = {
    "torchao": "Failed to load ",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "datasets.packaged_modules.parquet.parquet": "Failed to read",
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
}


@contextmanager
def without_foreign_notices() -> Iterator[None]:
    """Inside, these messages are not logged; every other one of the same loggers is."""
    filters = [(logging.getLogger(name), partial(_lacks, part)) for name, part in NOTICES.items()]
    for logger, left_out in filters:
        logger.addFilter(left_out)
    try:
        yield
    finally:
        for logger, left_out in filters:
            logger.removeFilter(left_out)


def _lacks(part: str, record: logging.LogRecord) -> bool:
    return part not in record.getMessage()


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


class ImportInThread:
    """Imports a package in a thread, while others work; begun by `start`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._error: Exception | None = None

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name=f"import-{self._name}").start()

    def require(self) -> None:
        """Raise what went wrong, if it is known by now."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with without_foreign_notices():
                import_module(self._name)
        except Exception as error:  # noqa: BLE001  (whatever a library raises)
            self._error = error
