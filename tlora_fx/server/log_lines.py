"""Logs of a service on stderr, as text or as lines of JSON.

What a request holds is shown with controls spelled out: one record is one line that moves no
cursor. The lines of a traceback are indented, so that none can pass for a record.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from tlora_fx.errors import printable

#: How the last line of a job's log that is followed ends, where the log ends before its job: the
#: client knows it by that, so that clients of other versions depend on it.
SERVICE_ENDING, TOKEN_GONE = "; the service is ending", ": the token is no longer accepted"


class TextLines(logging.Formatter):
    """A line of text for each record, and an indented line for each one of its traceback."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging names it)
        """The line of a record, on which a terminal obeys nothing."""
        jobs = getattr(record, "jobs", None)
        text = super().formatMessage(record) + (f"  {jobs}" if jobs else "")
        return printable(text.replace("\n", "\\n"))

    def formatException(self, ei: object) -> str:  # noqa: N802
        """The traceback of a record."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"  {printable(line)}" for line in text.split("\n"))


class JsonLines(logging.Formatter):
    """A line of JSON for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, message, and what comes with it."""
        known = logging.makeLogRecord({}).__dict__.keys() | {"message", "asctime"}
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **{key: value for key, value in record.__dict__.items() if key not in known},
        }
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def log_to_stderr(kind: str) -> None:
    """Log the service to stderr.

    kind   text or json
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else TextLines())
    for name in ("tlora_fx.server", "tlora_fx.training", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO if name.startswith("tlora") else logging.WARNING)
        logger.addHandler(handler)
        logger.propagate = False
