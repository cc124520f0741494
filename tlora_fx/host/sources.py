"""Hashes of source files: what is kept of one version of the code must not serve another."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def source_of(module: str) -> str:
    """A hash of the file of an imported module, "" where it has none."""
    try:
        return hashlib.sha256(Path(inspect.getfile(sys.modules[module])).read_bytes()).hexdigest()
    except (OSError, TypeError, KeyError):
        return ""


@functools.cache
def own_source(*rooms: str) -> str:
    """A hash of tlora_fx's own source files.

    rooms     folders of the package to read; none: the whole package
    """
    known = hashlib.sha256()
    parts = [PACKAGE / room for room in rooms] or sorted(PACKAGE.iterdir())
    for part in parts:
        # Some rooms are links in a checkout, which rglob does not follow.
        for path in [part] if part.suffix == ".py" else sorted(part.resolve().rglob("*.py")):
            known.update(f"{path.name} ".encode())
            known.update(path.read_bytes())
    return known.hexdigest()
