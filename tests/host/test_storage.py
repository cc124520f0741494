"""A disk that is full: what must be freed, writes that wait, lines that are whole."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tlora_fx.errors import CheckpointError
from tlora_fx.host import storage
from tlora_fx.host.durable import replace_file
from tlora_fx.host.storage import append, is_full, missing_bytes, os_errors, until_there_is_room

MIB = 1 << 20
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("free", "whole", "missing"),
    [(40, 10_000, 0), (32, 10_000, 0), (30, 10_000, 2), (0, 10_000, 32), (10, 100, 0), (4, 100, 1)],
)
def test_a_run_keeps_a_part_of_its_disk_free(tmp_path, monkeypatch, free, whole, missing):
    """32 MiB, or a twentieth of a small disk; sizes are MiB."""
    disk = SimpleNamespace(f_bavail=free, f_blocks=whole, f_frsize=MIB)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)

    assert missing_bytes(tmp_path) == missing * MIB


def refusing(times, error=FULL):
    """A write that the disk takes after some tries, and how often it was tried."""
    tries = []

    def write():
        tries.append(1)
        if len(tries) <= times:
            raise error
        return "written"

    return write, tries


def test_a_write_waits_for_room_where_it_may(monkeypatch):
    """However our own error wraps what the disk said."""
    monkeypatch.setattr(storage, "WAIT_SECONDS", 0.0)
    wrapped = CheckpointError("it is not written")
    wrapped.__cause__ = FULL
    for error in (FULL, wrapped):
        write, tries = refusing(3, error)
        with storage.waits_for_room():
            assert until_there_is_room(write) == "written"
        assert len(tries) == 4


@pytest.mark.parametrize("error", [FULL, OSError(errno.EROFS, "read-only")])
def test_other_writes_fail_at_once(error):
    """Those of processes that do not wait, and those that no free space helps."""
    write, tries = refusing(1, error)
    with pytest.raises(OSError, match=error.strerror):
        until_there_is_room(write)
    if not is_full(error):
        with storage.waits_for_room(), pytest.raises(OSError, match=error.strerror):
            until_there_is_room(refusing(1, error)[0])
    assert len(tries) == 1


def test_a_replaced_file_waits_for_room(tmp_path, monkeypatch):
    """Until then the old file is whole."""
    path, plain, tries = tmp_path / "a", os.fsync, []
    replace_file(path, b"old")

    def sync(handle):
        tries.append(path.read_bytes())
        if len(tries) < 3:
            raise FULL
        plain(handle)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(storage, "WAIT_SECONDS", 0.0)
    with storage.waits_for_room():
        replace_file(path, b"new")

    assert tries[:3] == [b"old"] * 3
    assert path.read_bytes() == b"new"


class Filling:
    """A file on a disk that takes some bytes and no more."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def fileno(self):
        return self.file.fileno()

    def write(self, line):
        if not self.room:
            raise FULL
        done = self.file.write(line[: self.room])
        self.room -= done
        return done


@pytest.mark.parametrize("room", range(7))
def test_a_line_is_appended_whole_or_not_at_all(tmp_path, room):
    """A part of it would spoil the next one."""
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as file:
        append(file, b"one\n")
        if room < 4:
            with pytest.raises(OSError, match="No space"):
                append(Filling(file, room), b"two\n")
        else:
            append(Filling(file, room), b"two\n")
        append(file, b"three\n")

    assert path.read_bytes() == (b"one\nthree\n" if room < 4 else b"one\ntwo\nthree\n")


@contextmanager
def files_of_at_most(size):
    """Inside, no file of this process may become larger; that fails as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_tokens(folder):
    vocabulary = {f"word{each}": each for each in range(1000)}
    Tokenizer(WordLevel(vocabulary, unk_token="word0")).save(str(folder / "tokenizer.json"))


def save_tensors(folder):
    save_file({"x": torch.zeros(10_000)}, folder / "x.safetensors")


@pytest.mark.parametrize("save", [save_tokens, save_tensors])
def test_a_file_that_a_library_in_rust_cannot_write_is_an_os_error(tmp_path, save):
    """It raises a class of its own; who waits for room, or tells of a full disk, knows OSError."""
    refused = pytest.raises(OSError, match="too large")
    with refused as told, files_of_at_most(8192), os_errors(tmp_path):
        save(tmp_path)

    assert told.value.errno == errno.EFBIG
    assert told.value.filename == str(tmp_path)


def test_other_errors_stay_what_they_are(tmp_path):
    """Also one of this name."""
    for error in (ValueError("os error 28"), PermissionError(13, "x"), KeyError("(os error x)")):
        with pytest.raises(type(error)) as told, os_errors(tmp_path):
            raise error
        assert told.value is error
