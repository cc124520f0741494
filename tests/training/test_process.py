"""The trainer's process: one at a time runs the commands of a log."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from tests.training.clients import Client, engine
from tlora_fx.training import process
from tlora_fx.training.log import WAITING, CommandLog
from tlora_fx.training.process import run_commands


@pytest.fixture
def begun(tmp_path):
    """A trainer that was told to begin: when it is ready, and when it is to end."""
    own, ready, ended = engine(), threading.Event(), threading.Event()
    for member in list(own.step.members.values()):
        own.step.release(member.job.name)

    def begin():
        args = (CommandLog(tmp_path), own, tmp_path / "bell", ready.set, ended)
        threads.append(threading.Thread(target=run_commands, args=args))
        threads[0].start()
        return ready, ended

    threads = []
    yield begin
    ended.set()
    threads[0].join()


def test_a_trainer_begins_once_the_one_before_it_has_ended(tmp_path, begun):
    """That of a killed service ends its cycle first; two would write over each other."""
    log = CommandLog(tmp_path)
    client = Client(log)
    with log.held(threading.Event()):
        ready, _ = begun()
        assert not ready.wait(0.5)
        assert log.answer(client.user, client.created) is None
    assert ready.wait(600)
    while log.answer(client.user, client.created) is None:
        threading.Event().wait(0.01)

    assert client.result(client.created)["model_id"] == client.model


def test_what_the_trainer_before_said_last_does_not_stay(tmp_path, begun):
    """That nobody finds a place was true of its own device."""
    log = CommandLog(tmp_path)
    with log.held(threading.Event()):
        ready, _ = begun()
        assert not ready.wait(0.5)
        log.tell({WAITING: ["s:train:0"]})
    assert ready.wait(600)

    assert log.facts()[WAITING] == []


def test_a_trainer_that_waits_can_be_ended(tmp_path, begun):
    log = CommandLog(tmp_path)
    with log.held(threading.Event()):
        ready, ended = begun()
        ended.set()
        assert ready.wait(600)


def test_a_trainer_outlives_a_disk_that_takes_no_deletions(tmp_path, begun, monkeypatch):
    """A process that begins again would load the base each minute while the disk is full."""
    full = threading.Event()

    def prune(log, before):
        full.set()
        raise OSError(errno.ENOSPC, "database or disk is full")

    monkeypatch.setattr(CommandLog, "prune", prune)
    monkeypatch.setattr(process, "TIDY_SECONDS", 0.0)
    log = CommandLog(tmp_path)
    client = Client(log)
    begun()
    assert full.wait(600)
    number = client.optim_step()
    end = time.monotonic() + 60
    while log.answer(client.user, number) is None and time.monotonic() < end:
        threading.Event().wait(0.01)

    assert log.answer(client.user, number) is not None
