"""Futures of the process that answers HTTP: they wait for answers that the trainer writes."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from tlora_fx.training.log import CommandLog
from tlora_fx.training.records import Answer

logger = logging.getLogger(__name__)
#: A client's patience is 45 s.
WAIT_SECONDS = 25.0
#: Between tries to reach a trainer that is starting, and looks at the log without one.
RETRY_SECONDS = 0.2


class Futures:
    """Waits for answers, by the trainer's bell; without one by looking.

    socket    of the bell
    seconds   that a request waits at most
    """

    def __init__(self, log: CommandLog, socket: Path, seconds: float = WAIT_SECONDS) -> None:
        self.log, self.socket, self.seconds = log, socket, seconds
        self._waiting: dict[int, set[asyncio.Event]] = defaultdict(set)
        self._bell: asyncio.StreamWriter | None = None

    def ring(self) -> None:
        """Tell the trainer that there are new commands; called on the event loop."""
        if self._bell is not None:
            with suppress(OSError, RuntimeError):
                self._bell.write(b"\n")

    async def wait(self, user: str, number: int) -> Answer | None:
        """Answer of a command, None where it takes longer; raises RequestGone."""
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        end = loop.time() + self.seconds
        # Before the first look: an answer that comes between is not missed.
        self._waiting[number].add(came)
        try:
            while (answer := self.log.answer(user, number)) is None:
                left = end - loop.time()
                if left <= 0:
                    return None
                with suppress(TimeoutError):
                    pause = left if self._bell is not None else min(RETRY_SECONDS, left)
                    await asyncio.wait_for(came.wait(), pause)
                came.clear()
            return answer
        finally:
            self._waiting[number].discard(came)
            if not self._waiting[number]:
                del self._waiting[number]

    def queue_state(self, number: int) -> dict[str, str]:
        """How a client is told what its command waits for."""
        if self._bell is None:
            reason = "no trainer runs at the moment, and one is started"
        elif self.log.waits_for_place(number):
            reason = "it waits for a place in memory until requests of others are done"
        else:
            return {"queue_state": "active"}
        return {"queue_state": "paused_capacity", "queue_state_reason": reason}

    async def listen(self) -> None:
        """Hear the trainer, whenever there is one, until cancelled."""
        while True:
            with suppress(OSError):
                reader, self._bell = await asyncio.open_unix_connection(str(self.socket))
                # Commands may have been written while nobody heard.
                self.ring()
                self._wake_all()
                while line := await reader.readline():
                    for came in self._waiting.get(int(line), ()):
                        came.set()
            if self._bell is not None:
                logger.warning("the trainer is gone; requests wait for the next one")
                self._bell.close()
                self._bell = None
                self._wake_all()
            await asyncio.sleep(RETRY_SECONDS)

    def _wake_all(self) -> None:
        for events in self._waiting.values():
            for came in events:
                came.set()
