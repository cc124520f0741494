"""Formats of what tlora-fx writes: each file says its format and the version that wrote it.

A version reads all formats up to its own. What a newer version wrote in a newer format is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tlora_fx.errors import NewerFormat
from tlora_fx.host.version import __version__


def stamp(format: int) -> dict[str, Any]:
    """Entries of a JSON object that say its format, and that this version wrote it."""
    return {"format": format, "version": __version__}


def require_known(what: str, place: Path | str, format: int, *, known: int, version: str) -> None:
    """Refuse a newer format than this version knows.

    what      that has the format, such as "the checkpoint"
    place     its file or folder
    known     the newest format that this version reads
    version   of tlora-fx that wrote it; "" where it does not say
    raises    NewerFormat
    """
    if format > known:
        raise NewerFormat(
            f"{what} was written by a newer version of tlora-fx",
            path=place,
            expected=f"format {known} at most, by tlora-fx {__version__}",
            found=f"format {format}" + (f", by tlora-fx {version}" if version else ""),
            help="upgrade tlora-fx; nothing was changed",
        )


def require_known_stamp(what: str, place: Path | str, content: object, *, known: int) -> None:
    """Refuse a JSON object whose stamp has a newer format; without a stamp it has the first.

    raises    NewerFormat
    """
    if isinstance(content, dict) and isinstance(format := content.get("format"), int):
        version = str(content.get("version", ""))
        require_known(what, place, format, known=known, version=version)


def read_object(path: Path) -> dict[str, Any] | None:
    """The object of a JSON file; None where there is none."""
    try:
        read = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None
