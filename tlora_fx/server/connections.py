"""Limits on what a connection may hold and how long it may wait.

uvicorn closes a connection that idles between two requests, and h11 bounds a request's head. The
number of connections, the time for a head, the pace of a body and the pace at which a client takes
its answer are bounded here.
"""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 5\r\n"
    b"Connection: close\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of the connections of a service.

    connections      open at a time
    head_bytes       size of a request's line and headers
    head_seconds     from a new connection, or the first byte of a later request, to the end of
                     its headers
    body_bytes       bytes of a body that must come in each `body_seconds`
    body_seconds     length of that window
    answer_seconds   for which a client may take nothing of its answer
    idle_seconds     between two requests; longer than clients keep theirs, so that no client
                     sends a request into a connection that is being closed
    """

    connections: int = 512
    head_bytes: int = 32 << 10
    head_seconds: float = 10.0
    body_bytes: int = 10 << 10
    body_seconds: float = 10.0
    answer_seconds: float = 60.0
    idle_seconds: int = 75


def make_server(
    app: ASGIApp, limits: ConnectionLimits | None = None, **options: Any
) -> uvicorn.Server:
    """A server of an application, with limits on its connections.

    options   of uvicorn.Config
    """
    limits = limits or ConnectionLimits()
    protocol = type("LimitedProtocol", (_LimitedProtocol,), {"limits": limits})
    return uvicorn.Server(
        uvicorn.Config(
            app, http=protocol, ws="none", access_log=False, log_config=None,
            timeout_keep_alive=limits.idle_seconds,
            h11_max_incomplete_event_size=limits.head_bytes, **options,
        )
    )  # fmt: skip


class _LimitedProtocol(H11Protocol):
    """One connection. h11 and not httptools, which bounds neither headers nor trailers."""

    limits: ClassVar[ConnectionLimits]

    #: Begin of the phase, or in a body of the window, on the loop's clock.
    _since = 0.0
    #: In the window of a body.
    _bytes = 0
    #: Whether a byte of the next request's head has come.
    _head_begun = False
    _stalled: float | None = None
    _closing: float | None = None
    _timer: TimerHandle | None = None

    @property
    def _phase(self) -> Literal["head", "body", "answer", "idle"]:
        cycle = self.cycle
        if cycle is None:
            return "head"
        if not cycle.response_complete:
            return "body" if cycle.more_body else "answer"
        # What remains of a body that was answered early is bounded as a head is.
        return "head" if self._head_begun or cycle.more_body else "idle"

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Keep a connection, or turn it away where there are too many."""
        if len(self.connections) >= self.limits.connections and not self._make_room():
            transport.write(_FULL)
            transport.close()
            return
        super().connection_made(transport)
        self._since = self.loop.time()
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        if self._timer is not None:
            self._timer.cancel()
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what the client sends."""
        if self._timer is None or self.transport.is_closing():
            return
        phase = self._phase
        if phase == "idle":
            self._since = self.loop.time()
        if phase == "body":
            self._bytes += len(data)
        else:
            self._head_begun = True
        super().data_received(data)

    def handle_events(self) -> None:
        """Begin the request whose head is whole, and read on in its body."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._since, self._bytes = self.loop.time(), 0
            # The begin of the next head may have come with this request.
            self._head_begun = bool(self.conn.trailing_data[0])

    def pause_writing(self) -> None:
        """The client takes its answer more slowly than it is written."""
        super().pause_writing()
        self._stalled = self.loop.time()

    def resume_writing(self) -> None:
        """The client has taken what was written."""
        super().resume_writing()
        self._stalled = None

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for a request; False: none waits."""
        waiting = [
            (known._phase == "idle", known._since, id(known), known)
            for known in self.connections
            if isinstance(known, _LimitedProtocol) and known._phase in ("head", "idle")
        ]
        if not waiting:
            return False
        *_, oldest = min(waiting)
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True

    def _look_later(self) -> None:
        limits = self.limits
        seconds = min(limits.head_seconds, limits.body_seconds, limits.answer_seconds) / 10
        self._timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        if self._expired(self.loop.time()):
            self.transport.abort()
        else:
            self._look_later()

    def _expired(self, now: float) -> bool:
        limits = self.limits
        if self.transport.is_closing():
            self._closing = now if self._closing is None else self._closing
            return now - self._closing > limits.answer_seconds
        if self._stalled is not None:
            return now - self._stalled > limits.answer_seconds
        phase = self._phase
        if phase == "answer":
            self._since = now  # A head that came meanwhile has its time from here on.
        if phase == "head":
            return now - self._since > limits.head_seconds
        if phase == "body":
            if self.flow.read_paused:  # The service is slow, and not the client.
                self._since, self._bytes = now, 0
            elif now - self._since > limits.body_seconds:
                slow = self._bytes < limits.body_bytes
                self._since, self._bytes = now, 0
                return slow
        return False
