"""Streams, sockets and logs of a service that listens on a real port."""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import socket
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.conftest import as_scheduled, job_file, listen
from tlora_fx.server import app, connections
from tlora_fx.server.connections import ConnectionLimits
from tlora_fx.server.ledger import User
from tlora_fx.server.log_lines import TextLines
from tlora_fx.server.service import MAX_STREAMS

#: After which a test gives up.
SECONDS = 600
QUICK = ConnectionLimits(
    connections=4, head_bytes=4096, head_seconds=2, body_bytes=1000, body_seconds=2,
    answer_seconds=2,
)  # fmt: skip
SHA256 = hashlib.sha256(b"").hexdigest()
GET = b"GET /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPLOAD = f"PUT /api/v1/files/{SHA256} HTTP/1.1\r\nHost: localhost\r\n".encode()


@contextmanager
def listening(service, limits=None):
    """The address of a service that answers; it has ended afterwards."""
    with limited(service, limits) as (address, _):
        yield address


@contextmanager
def limited(service, limits=None):
    """Such an address, and what gives the connections that come from now on other limits."""
    server, address, thread = listen(service, limits)

    def change(limits):
        server.config.http_protocol_class.limits = limits

    try:
        yield address, change
    finally:
        service.ending = server.should_exit = True
        thread.join(SECONDS)


def connected(address, *parts):
    """A connection on which these bytes were sent."""
    there = urlsplit(address)
    connection = socket.create_connection((there.hostname, there.port), SECONDS)
    with suppress(ConnectionError):  # the service may have closed it already
        for part in parts:
            connection.sendall(part)
    return connection


def until(true):
    """Wait until something is true."""
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def read_to_the_end(connection):
    """All that comes until the service closes the connection."""
    content = b""
    try:
        while part := connection.recv(1 << 16):
            content += part
    except ConnectionResetError:
        pass
    return content


@pytest.fixture
def log():
    """The text log of the service, as stderr would have it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextLines())
    loggers = [logging.getLogger(name) for name in ("tlora_fx.server", "uvicorn.error")]
    for logger in loggers:
        logger.addHandler(handler)
    loggers[0].setLevel(logging.INFO)
    yield stream
    for logger in loggers:
        logger.removeHandler(handler)
    loggers[0].setLevel(logging.NOTSET)


@pytest.mark.parametrize("path", ["/api/v1/stream", "/api/v1/jobs/a/logs?follow=true"])
def test_a_revoked_token_ends_its_streams_and_no_others(asked, path):
    """Events and followed logs end; those of another user go on."""
    it = asked()
    tokens = {name: it.add(name) for name in ("alice", "bob")}
    for name in tokens:
        it.submit(job_file("a"), user=name)
    as_scheduled(it.folder, [("alice.a", "bob.a")])
    it.refresh()
    with listening(it.service) as address:
        streams = {}
        for name, token in tokens.items():
            client = httpx.Client(
                base_url=address, timeout=SECONDS, headers={"Authorization": f"Bearer {token}"}
            )
            streams[name] = client.stream("GET", path)
        with streams["alice"] as alice, streams["bob"] as bob:
            of_bob, of_alice = bob.iter_raw(), alice.iter_raw()
            next(of_bob), next(of_alice)
            it.service.store.revoke("alice")
            rest = b"".join(of_alice)

            assert not rest.count(b"\nevent: ")
            until(lambda: it.service.streams == {"alice": 0, "bob": 1})
            it.service.store.want(app.User("bob"), "a", "pause")
            if path.endswith("stream"):
                it.refresh()
                assert b"paus" in next(chunk for chunk in of_bob if b"paus" in chunk)


def test_a_stream_without_a_token_ends_once_tokens_are_required(asked):
    """The first user closes a run also to those who watch it already."""
    it = asked()
    it.submit(job_file("a"))
    it.refresh()
    with (
        listening(it.service) as address,
        httpx.stream("GET", f"{address}/api/v1/stream", timeout=SECONDS) as stream,
    ):
        chunks = stream.iter_raw()
        next(chunks)
        it.add("alice")

        assert b"event: jobs" not in b"".join(chunks)


def test_a_user_has_a_bounded_number_of_streams(asked, monkeypatch):
    """One more is refused, and another user's is not; a closed one gives its turn back."""
    monkeypatch.setattr("tlora_fx.server.service.MAX_STREAMS", 1)
    it = asked()
    headers = {name: {"Authorization": f"Bearer {it.add(name)}"} for name in ("alice", "bob")}
    for name in headers:
        it.submit(job_file("a"), user=name)
    it.refresh()
    with listening(it.service) as address:
        path = f"{address}/api/v1/stream"
        with httpx.stream("GET", path, headers=headers["alice"], timeout=SECONDS) as stream:
            chunks = stream.iter_raw()
            next(chunks)
            refused = httpx.get(path, headers=headers["alice"], timeout=SECONDS)
            with httpx.stream("GET", path, headers=headers["bob"], timeout=SECONDS) as other:
                assert other.status_code == 200

        assert (refused.status_code, refused.json()["code"]) == (429, "T0984")
        while it.service.streams["alice"]:
            time.sleep(0.01)
        with httpx.stream("GET", path, headers=headers["alice"], timeout=SECONDS) as stream:
            assert stream.status_code == 200


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((), id="nothing"),
        pytest.param((b"GET / HT",), id="half-a-line"),
        pytest.param((b"GET / HTTP/1.1\r\nHost: localhost\r\nX:",), id="half-a-head"),
        pytest.param((GET, b"GET / HT"), id="half-a-second-head"),
        pytest.param((UPLOAD, b"Content-Length: 100000\r\n\r\n", b"x" * 10), id="slow-upload"),
        pytest.param(
            (UPLOAD, b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nhel"), id="slow-chunk"
        ),
        pytest.param(
            (b"POST /api/v1/submissions HTTP/1.1\r\nHost: localhost\r\n",
             b"Content-Type: application/json\r\nContent-Length: 900\r\n\r\n{"),
            id="slow-submission",
        ),
        pytest.param(
            (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n",),
            id="answered-before-its-body",
        ),
    ],
)  # fmt: skip
def test_a_connection_that_waits_for_its_client_is_closed(asked, parts):
    """Before a head, within one, and within a body; the service keeps nothing of it."""
    it = asked()
    with limited(it.service, QUICK) as (address, change):
        connection = connected(address, *parts)
        read_to_the_end(connection)
        change(ConnectionLimits())

        assert httpx.get(f"{address}/api/v1/jobs", timeout=SECONDS).status_code == 200
    assert not list(it.service.store.folder.glob("uploads/*/*"))


def test_without_a_token_no_body_is_read(asked):
    """The refusal comes before the body, so that strangers cannot hold connections with theirs."""
    it = asked()
    it.add("alice")
    head = (
        b"POST /api/v1/submissions HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: a\r\n"
        b"Content-Type: application/json\r\nContent-Length: 900\r\n\r\n{"
    )
    with listening(it.service) as address:
        assert connected(address, head).recv(12) == b"HTTP/1.1 401"


@pytest.fixture
def clock(monkeypatch):
    """The seconds that connections see, how many bytes they had, and when they looked at both."""
    found = SimpleNamespace(seconds=0.0, bytes=0, looks=0)

    class Loop:
        """An event loop with another clock."""

        def __init__(self, loop):
            self._loop = loop

        def __getattr__(self, name):
            return getattr(self._loop, name)

        def time(self):
            return found.seconds

    class Clocked(connections._LimitedProtocol):
        """A connection on that clock."""

        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self.loop = Loop(self.loop)

        def data_received(self, data):
            super().data_received(data)
            found.bytes += len(data)

        def _look(self):
            super()._look()
            found.looks += 1

    monkeypatch.setattr(connections, "_LimitedProtocol", Clocked)
    return found


def test_an_upload_at_a_fair_pace_outlives_the_window(asked, clock):
    """A body that takes many windows is taken, as long as enough comes in each."""
    it, content = asked(), b"x" * 40_000

    def slowly():
        for start in range(0, len(content), 5000):
            yield content[start : start + 5000]
            while clock.bytes < start + 5000:
                time.sleep(0.01)
            clock.seconds += 1.5
            looks = clock.looks
            while clock.looks == looks:
                time.sleep(0.01)

    with listening(it.service, QUICK) as address:
        sha256 = hashlib.sha256(content).hexdigest()
        path = f"{address}/api/v1/files/{sha256}"
        answer = httpx.put(path, content=slowly(), timeout=SECONDS)

    assert (answer.status_code, answer.json()["bytes"]) == (201, len(content))


def test_a_client_that_takes_nothing_of_its_answer_is_cut(asked):
    """Its stream is no longer counted; the service has not to keep what it would have sent."""
    it = asked()
    it.submit(job_file("a"))
    as_scheduled(it.folder, [("a",)])
    row = '{"step": 1, "loss": 2.0, "tokens": 10, "seconds": 0.1}\n'
    (it.folder / "a" / "metrics.jsonl").write_text(row * 400_000)
    request = b"GET /api/v1/jobs/a/logs HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with listening(it.service, ConnectionLimits(answer_seconds=2)) as address:
        connection = connected(address, request)
        connection.recv(1)
        while it.service.streams["local"]:
            time.sleep(0.01)

        assert not read_to_the_end(connection).endswith(b"0\r\n\r\n")


def test_a_head_that_is_too_large_is_refused(asked):
    """Whether its line, one header, or many are."""
    it = asked()
    many = b"".join(b"X-%d: y\r\n" % number for number in range(2000))
    with listening(it.service, ConnectionLimits(head_bytes=4096)) as address:
        for head in (b"GET /" + b"a" * 9000, b"GET / HTTP/1.1\r\nX: " + b"a" * 9000,
                     b"GET / HTTP/1.1\r\n" + many):  # fmt: skip
            assert read_to_the_end(connected(address, head)).startswith(b"HTTP/1.1 400 ")


def test_half_open_connections_shut_nobody_out(asked):
    """The one that has waited longest makes room for one that asks."""
    it = asked()
    limits = ConnectionLimits(connections=4)
    with listening(it.service, limits) as address:
        opened = [connected(address, b"GET / HT") for _ in range(20)]

        assert httpx.get(f"{address}/api/v1/jobs", timeout=SECONDS).status_code == 200
        assert [read_to_the_end(connection) for connection in opened[:16]] == [b""] * 16


def test_a_connection_above_the_limit_is_turned_away(asked):
    """With 503 while all others are being answered; once one has ended there is room again."""
    it = asked()
    it.submit(job_file("a"))
    it.refresh()
    stream = b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with listening(it.service, ConnectionLimits(connections=2)) as address:
        watching = [connected(address, stream) for _ in range(2)]
        for connection in watching:
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert read_to_the_end(connected(address)).startswith(b"HTTP/1.1 503 ")
        watching[0].close()
        while it.service.streams["local"] > 1:
            time.sleep(0.01)

        assert httpx.get(f"{address}/api/v1/jobs", timeout=SECONDS).status_code == 200


@pytest.mark.parametrize("framing", [b"Content-Length: 100000", b"Transfer-Encoding: chunked"])
def test_a_cut_upload_is_one_line_of_the_log(asked, log, framing):
    """Without a traceback, and nothing of it is kept."""
    it = asked()
    with listening(it.service) as address:
        connection = connected(address, UPLOAD, framing, b"\r\n\r\n", b"400\r\n" + b"x" * 500)
        while not list(it.service.store.folder.glob("uploads/*/*")):
            time.sleep(0.01)
        connection.close()
        while not log.getvalue():
            time.sleep(0.01)

    [line] = log.getvalue().splitlines()
    assert line.split(" ", 2)[2].strip() == (
        f"PUT /api/v1/files/{SHA256} 499: the client closed the connection"
    )
    assert not list(it.service.store.folder.glob("uploads/*/*"))


def test_a_cut_submission_is_one_line_of_the_log(asked, log):
    """Its body is read before anything else of it."""
    it = asked()
    head = (
        b"POST /api/v1/submissions HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: a\r\n"
        b"Content-Type: application/json\r\nContent-Length: 900\r\n\r\n{"
    )
    with listening(it.service) as address:
        connected(address, head).close()
        while not log.getvalue():
            time.sleep(0.01)

    [line] = log.getvalue().splitlines()
    assert " POST /api/v1/submissions 4" in line


def test_a_text_log_obeys_no_request(asked, log):
    """Controls and ends of lines in a path are spelled out, also without a token."""
    it = asked()
    it.add("alice")
    path = "%1b[2J%0a2026-01-01 00:00:00,000 PUT /forged 201%0d%e2%80%ae%c2%9b%E2%80%A8"
    assert it.ask("POST", f"/api/v1/{path}").status_code in (401, 404, 405)

    [line] = log.getvalue().splitlines()
    assert "\\x1b[2J\\n2026" in line
    assert line.isprintable()


@pytest.mark.parametrize(("jobs", "end"), [(["a"], "formed  ['a']"), ([], "formed")])
def test_a_line_of_a_text_log_names_the_jobs_that_there_are(log, jobs, end):
    """And nothing behind it where there are none."""
    logging.getLogger("tlora_fx.server").error("formed", extra={"jobs": jobs})

    [line] = log.getvalue().splitlines()
    assert line.endswith(end)


def test_a_traceback_in_a_text_log_passes_for_no_record(log):
    """Its lines are indented, and what an error quotes is spelled out."""
    try:
        raise ValueError("a\n2026-01-01 00:00:00,000 PUT /forged 201\x1b[2J")
    except ValueError:
        logging.getLogger("tlora_fx.server").exception("a request failed")

    first, *others = log.getvalue().splitlines()
    assert first.rstrip().endswith("a request failed")
    assert all(line.startswith("  ") and line.isprintable() for line in others)
    assert "\\x1b[2J" in others[-1]


def test_a_stream_that_is_never_sent_does_not_count(asked):
    """It has no end, at which it would be counted off."""
    service = asked().service
    user = User("alice")

    async def nothing():
        yield b""

    for _ in range(MAX_STREAMS + 1):
        app.CountedStream(app.Caller(user, service, None), nothing(), "text/plain")
    service.take_stream(user)

    assert service.streams == {"alice": 1}


def test_streams_that_are_asked_for_at_once_are_counted_too(asked, monkeypatch):
    """No more than a user may have, however fast the requests come; ended ones count no longer."""
    monkeypatch.setattr("tlora_fx.server.service.MAX_STREAMS", 3)
    it = asked()

    async def ask(client, statuses):
        async with client.stream("GET", "/api/v1/stream") as answer:
            statuses.append(answer.status_code)
            while len(statuses) < 20:
                await asyncio.sleep(0.01)

    async def burst(address):
        statuses = []
        async with httpx.AsyncClient(base_url=address, timeout=SECONDS) as client:
            await asyncio.gather(*(ask(client, statuses) for _ in range(20)))
        return statuses

    with listening(it.service) as address:
        statuses = asyncio.run(burst(address))
        until(lambda: not any(it.service.streams.values()))

    assert sorted(statuses) == [200] * 3 + [429] * 17
