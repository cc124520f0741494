"""Compiled layers of a trainer of clients' models; the log has after which cycle they took over.

By that, what runs again after a kill runs as it ran: as compiled code, or as before.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tlora_fx.runtime.group_step import GroupStep
from tlora_fx.runtime.rounds.compiled_layers import CompiledLayers, LoggedNotes
from tlora_fx.training.log import LAYERS, ONCE_COMPILED, TOOK_OVER, CommandLog
from tlora_fx.training.records import Command

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LogRecord:
    """A record in a log, with when the take-over began and how long it took.

    began   by the log's clock, as its cycles
    """

    log: CommandLog
    began: float

    def read(self) -> int | None:
        """See `TakeOverRecord`; the last cycle where a start without compiled layers came between.

        Their pieces run again, so layers are compiled before.
        """
        facts = self.log.facts()
        if (said := facts.get(TOOK_OVER)) is not None:
            return int(said["cycle"])
        return self.log.last_cycle() if facts.get(ONCE_COMPILED) else None

    def write(self, rounds: int) -> None:
        """See `TakeOverRecord`."""
        seconds = self.log.now() - self.began
        self.log.tell({TOOK_OVER: {"cycle": rounds, "began": self.began, "seconds": seconds}})


class LoggedLayers:
    """The layers of a step that runs the cycles of a log.

    state   as of `CompiledLayers`
    """

    def __init__(self, log: CommandLog, step: GroupStep) -> None:
        self.log, self.step, self._record = log, step, LogRecord(log, log.now())
        self._layers = CompiledLayers(
            step, self._record, callback=LoggedNotes(logger), unit="cycle", fixed_slots=True
        )
        self._told = ""
        past = log.facts().get(ONCE_COMPILED, [])
        self._past = [(after, until) for after, until in past if log.runs_again(after, until)]
        log.tell({ONCE_COMPILED: self._past})
        self._layers.begin(log.last_cycle())
        if self.state == "compiled" and log.facts().get(TOOK_OVER) is None:
            assert self._layers.after is not None
            self._record.write(self._layers.after)
        self._tell()

    @property
    def state(self) -> str:
        """See `CompiledLayers`."""
        return self._layers.state

    def look(self) -> None:
        """Let compiled layers take over if they are there; between two cycles."""
        if self.state == "compiling":
            self._record.began = self.log.now()
            self._layers.look(self.log.last_cycle())
        self._tell()

    def plain_pieces(self, command: Command) -> int:
        """How many pieces of an answered command ran without compiled layers; its first ones.

        0 where all run without them.
        """
        if self.state != "compiled":
            return 0
        return sum(not self._ran_compiled(cycle) for cycle in self.log.cycles_of(command))

    def runs_otherwise(self, command: Command) -> bool:
        """Whether compiled layers ran an answered command, and there are none to run it again."""
        if self.state == "compiled":
            return False
        return any(self._ran_compiled(cycle) for cycle in self.log.cycles_of(command))

    def _ran_compiled(self, cycle: int) -> bool:
        after = self._layers.after if self.state == "compiled" else None
        if after is not None and cycle > after:
            return True
        return any(begin < cycle <= end for begin, end in self._past)

    def as_before(self) -> AbstractContextManager[None]:
        """Inside, layers run as before they were compiled."""
        return self.step.uncompiled()

    def close(self) -> None:
        """End the process that compiles, if there is one."""
        self._layers.close()

    def _tell(self) -> None:
        if self.state == self._told:
            return
        facts: dict[str, object] = {LAYERS: self.state}
        said = self.log.facts().get(TOOK_OVER)
        if self.state in ("off", "failed") and said is not None:
            # What runs from now on runs as before it.
            self._past.append((int(said["cycle"]), self.log.last_cycle()))
            facts |= {TOOK_OVER: None, ONCE_COMPILED: self._past}
        self.log.tell(facts)
        self._told = self.state
