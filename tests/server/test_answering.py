"""The process that answers requests is replaced when it dies, at the same address."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import contextmanager
from functools import partial

import pytest

from tlora_fx.errors import BaseFileDamaged, ServiceRefused
from tlora_fx.server import answering
from tlora_fx.server.answering import Answering, listen

SECONDS = 600.0


def answer_with_pid(sockets, parent):
    """Tell each that connects the number of this process."""
    parent.send(True)
    while not parent.poll():
        sockets[0].settimeout(0.05)
        try:
            connection, _ = sockets[0].accept()
        except TimeoutError:
            continue
        with connection:
            connection.sendall(str(os.getpid()).encode())


def end_at_once(sockets, parent):
    """Never answer."""


def refuse_later(folder, sockets, parent):
    """Answer the first time, and after that send an error."""
    begun = folder / "begun"
    if begun.exists():
        parent.send(BaseFileDamaged("a file is gone", file="x"))
    else:
        begun.touch()
        parent.send(True)


def refuse(sockets, parent):
    """Send an error in place of an answer."""
    parent.send(BaseFileDamaged("a file is gone", file="x"))


def asked(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


@contextmanager
def answering_on_a_port(say):
    sockets = listen("127.0.0.1", 0)
    kept = Answering(answer_with_pid, sockets, say)
    try:
        kept.start()
        yield kept, sockets[0].getsockname()[1]
    finally:
        kept.close()


def test_a_process_that_is_killed_is_replaced_at_the_same_port(monkeypatch):
    """Twice; whoever connects in between is answered by the next, and each death is told."""
    monkeypatch.setattr(answering, "PAUSE_SECONDS", 0.2)
    monkeypatch.setattr(answering, "STEADY_SECONDS", SECONDS)  # a busy machine starts it slowly
    deaths, seen = [], []
    with answering_on_a_port(deaths.append) as (kept, port):
        for count in range(1, 4):
            with asked(port) as connection:
                end = time.monotonic() + SECONDS
                connection.settimeout(0.05)
                said = b""
                while not said and time.monotonic() < end:
                    kept.keep()
                    try:
                        said = connection.recv(16)
                    except TimeoutError:
                        continue
            seen.append(int(said))
            if count < 3:
                os.kill(seen[-1], signal.SIGKILL)
                while len(deaths) < count and time.monotonic() < end:
                    kept.keep()

    assert len(set(seen)) == 3
    told = "the process that answers requests died (killed by SIGKILL); the next starts in"
    assert deaths == [f"{told} 0.2 s", f"{told} 0.4 s"]


def test_a_process_ends_with_the_run(monkeypatch):
    """Once it is let go of."""
    monkeypatch.setattr(answering, "END_SECONDS", SECONDS)
    with answering_on_a_port(print) as (kept, port), asked(port) as connection:
        pid = int(connection.recv(16))
        kept.close()

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_port_that_is_taken_is_refused():
    """With where it was to listen."""
    [taken] = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]

    with taken, pytest.raises(ServiceRefused, match=f"127.0.0.1:{port}"):
        listen("127.0.0.1", port)


def test_a_host_that_nobody_knows_is_refused():
    """As a port that is taken."""
    with pytest.raises(ServiceRefused, match=r"nowhere\.invalid"):
        listen("nowhere.invalid", 0)


def test_all_addresses_of_a_host_have_one_port():
    """So that each client finds it."""
    sockets = listen("localhost", 0)
    ports = {each.getsockname()[1] for each in sockets}
    for each in sockets:
        each.close()

    assert len(ports) == 1


def test_a_process_that_never_answers_is_refused_at_the_start():
    """It would be replaced for ever."""
    kept = Answering(end_at_once, listen("127.0.0.1", 0), print)

    with pytest.raises(ServiceRefused, match="ended at its start"):
        kept.start()
    kept.close()


def test_the_error_of_a_process_is_raised_at_the_start():
    """As it is, with its code and facts."""
    kept = Answering(refuse, [], print)
    try:
        with pytest.raises(BaseFileDamaged, match="a file is gone") as caught:
            kept.start()
    finally:
        kept.close()
    assert caught.value.facts == {"file": "x"}


def test_the_error_of_a_later_process_is_told(tmp_path, monkeypatch):
    """In place of how it exited."""
    monkeypatch.setattr(answering, "PAUSE_SECONDS", 0.01)
    deaths = []
    kept = Answering(partial(refuse_later, tmp_path), [], deaths.append)
    try:
        kept.start()
        end = time.monotonic() + SECONDS
        while len(deaths) < 2 and time.monotonic() < end:
            kept.keep()
            time.sleep(0.01)
    finally:
        kept.close()
    assert "a file is gone" not in deaths[0]
    assert "died (error[T0257] a file is gone);" in deaths[1]
