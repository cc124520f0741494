"""Times as people write them: 60s, 5m, 1h."""

from __future__ import annotations

import re

import typer

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|)")
_UNIT = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str, option: str) -> float:
    """The seconds of a time above 0; without a unit they are seconds.

    raises    typer.BadParameter, which names the option
    """
    match = _DURATION.fullmatch(text.strip())
    found = float(match[1]) * _UNIT[match[2]] if match else 0.0
    if not found:
        raise typer.BadParameter(f"{option} is a time, such as 60s or 5m; not {text!r}")
    return found
