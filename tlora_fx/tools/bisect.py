"""What judges a state: a command of the user's, or the numbers that it computes."""

from __future__ import annotations

import os
import shlex
import subprocess
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from tlora_fx.bisect.search import Verdict
from tlora_fx.bisect.states import State
from tlora_fx.errors import BisectFails
from tlora_fx.graph_file import Document

VARIABLE = "TLORA_FX_STATE"
HOLE = "{}"
CANNOT_TELL = 125
SHELLS_OWN = {126: "it may not be executed", 127: "there is no such command"}


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict, and what was said with it."""

    verdict: Verdict
    told: str = ""
    output: str = ""


class Check(ABC):
    """Judges a state.

    needs_folder    whether the state is to be written first
    """

    needs_folder: bool = False

    def begin(self, start: Document) -> None:  # noqa: B027  (a command needs none)
        """States are made from these traced graphs from now on."""

    @abstractmethod
    def judge(self, state: State, folder: Path) -> Judged:
        """The verdict on a state.

        folder    holds the state, where the check needs one
        raises    BisectFails where there can be none on any state
        """


class CommandCheck(Check):
    """A command of the user's: exit 0 is good, 1 to 124 bad, 125 cannot tell, the rest stops.

    command    for the shell; {} stands for the state's folder, which is in TLORA_FX_STATE too
    """

    needs_folder = True

    def __init__(self, command: str) -> None:
        self.command = command

    def judge(self, state: State, folder: Path) -> Judged:
        """Run the command in the working folder."""
        asked = self.command.replace(HOLE, shlex.quote(str(folder)))
        ran = subprocess.run(  # noqa: S602  (a check is a shell command, as its user wrote it)
            asked,
            shell=True,
            env={**os.environ, VARIABLE: str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        output = ran.stdout.decode(errors="replace")
        code = ran.returncode
        if code < 0 or code > CANNOT_TELL:
            raise BisectFails(
                "the check cannot be run",
                command=asked,
                found=f"exit {code}: {SHELLS_OWN.get(code, 'a signal ended it')}",
                output=output[-2000:].rstrip() or None,
                help="a check exits with 0 for good, 1 to 124 for bad, 125 where it cannot tell",
            )
        verdict: Verdict = "good" if code == 0 else "skip" if code == CANNOT_TELL else "bad"
        return Judged(verdict, f"exit {code}", output)
