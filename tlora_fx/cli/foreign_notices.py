"""Leave out what other libraries log, at their import, about parts that nobody asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

#: By logger, what the messages have in them: kernels for other GPUs, and one library's use of
#: what another will drop.
NOTICES = {
    "torchao": "Failed to load ",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
}


@contextmanager
def without_foreign_notices() -> Iterator[None]:
    """Inside, these messages are not logged; every other one of the same loggers is."""
    filters = [(logging.getLogger(name), _Without(part)) for name, part in NOTICES.items()]
    for logger, left_out in filters:
        logger.addFilter(left_out)
    try:
        yield
    finally:
        for logger, left_out in filters:
            logger.removeFilter(left_out)


class _Without(logging.Filter):
    """Passes every message but those with a certain part."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def filter(self, record: logging.LogRecord) -> bool:
        return self.part not in record.getMessage()
