"""Run the command by which a user judges graphs."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

HOLE = "{}"


class Outcome(NamedTuple):
    """Result of a command.

    command   as the shell was given it
    code      below 0: a signal ended it
    output    all that it printed
    """

    command: str
    code: int
    output: str


def run_check(command: str, subject: Path, variables: Mapping[str, str] | None = None) -> Outcome:
    """Run a command in the shell.

    subject     the file or folder for which {} stands in the command
    variables   of its environment, besides those of this process
    """
    command = command.replace(HOLE, shlex.quote(str(subject)))
    process = subprocess.run(  # noqa: S602  (a check is a shell command, as its user wrote it)
        command,
        shell=True,
        env={**os.environ, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return Outcome(command, process.returncode, process.stdout.decode(errors="replace"))
