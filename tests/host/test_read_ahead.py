"""Files are read into the page cache by a thread, where that brings something."""

from __future__ import annotations

import pytest

from tlora_fx.host import read_ahead as module
from tlora_fx.host.read_ahead import ReadAhead, read_ahead


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two files, each of more than one call."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(module, "MIN_BYTES", 4000)
    made = [tmp_path / "a", tmp_path / "b"]
    for file in made:
        file.write_bytes(bytes(2500))
    return made


def machine(folder, free):
    """/proc of a machine with so much free memory, in kB."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable: {free} kB\n")
    (folder / "proc/self/cgroup").write_text("")
    return folder


def test_every_byte_is_read(files, tmp_path):
    """Of all files, one after the other."""
    thread = read_ahead(files, machine(tmp_path / "root", 100))

    thread.join(600)
    assert thread.done_bytes == 5000


def test_files_that_do_not_fit_into_free_memory_are_left(files, tmp_path):
    """Their first pages would be gone before anybody asks for them."""
    assert read_ahead(files, machine(tmp_path / "root", 4)) is None


def test_small_files_are_left(files, tmp_path):
    """They are read as fast when they are needed."""
    assert read_ahead(files[:1], machine(tmp_path / "root", 100)) is None


def test_a_file_that_has_gone_is_no_error(files, tmp_path):
    """Whoever loads it says so; the others are read."""
    assert read_ahead([*files, tmp_path / "gone"]) is None
    thread = ReadAhead([tmp_path / "gone", files[0]])

    thread.run()
    assert thread.done_bytes == 2500
