"""What an explanation holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["lowered", "as it is", "not targeted", "inside", "around"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A pattern that was tried on a branch.

    what      what it looks for: "a frozen linear", "a plain LoRA branch"
    fits      whether it does
    pattern   the pattern as text; of several the one that came nearest
    held      its conditions that hold, in order
    wanted    the condition that does not hold: what would make it match
    why       what is there instead
    node      where, as "block.node = operator"
    source    the line of model code that the node comes from
    """

    what: str
    fits: bool
    pattern: str
    held: tuple[str, ...]
    wanted: str = ""
    why: str = ""
    node: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """What one job has at a module.

    state      "lowered"; "as it is": its own nodes run; "not targeted"; "inside": the module lies
               in one of which the job trains a copy; "around": its adapters sit on modules inside
    told       why, and the numbers of the adapter, as one phrase
    attempts   the patterns that were tried
    """

    job: str
    state: State
    told: str
    attempts: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of one module of the base.

    module     its path
    kind       its class and sizes
    node       the node that was asked for, as "block.node = operator", "" where a module was
    others     how many other modules the name fits as well
    jobs       an answer for each job
    dropouts   what became of the dropouts at the module
    sharing    what all jobs share there, and what not
    layers     which layers share its code, and why others do not
    """

    module: str
    kind: str
    node: str
    others: int
    jobs: tuple[JobAnswer, ...]
    dropouts: tuple[str, ...]
    sharing: tuple[str, ...]
    layers: tuple[str, ...]
