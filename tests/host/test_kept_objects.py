"""Results are kept between processes, and a damaged file costs no more than to find them again."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tlora_fx.host import kept_objects
from tlora_fx.host.environment import CACHE, DATA_CACHE, TRACE_CACHE
from tlora_fx.host.kept_objects import KeptObjects, longest_unused

KEPT = KeptObjects("things", "a thing")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path))


def test_an_object_is_found_under_its_key_alone():
    """And no object where nothing was written."""
    KEPT.write("a", {"n": [1, None, "ä"]})

    assert KEPT.read("a") == {"n": [1, None, "ä"]}
    assert KEPT.read("b") is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"digest": "", "kept": {}}', "cut", "moved"])
def test_what_is_not_as_it_was_written_counts_as_not_there(damage):
    """A file under another key's name, too."""
    KEPT.write("a", {"n": 1})
    path = KEPT.folder / "a.json"
    text = path.read_text()
    if damage == "moved":
        path.rename(KEPT.folder / "b.json")
    else:
        path.write_text(text[:-3] if damage == "cut" else damage)

    assert KEPT.read("b" if damage == "moved" else "a") is None


def test_objects_of_another_format_count_as_not_there():
    """Their keys may be the same."""
    KEPT.write("a", {"n": 1})

    assert KeptObjects("things", "a thing", format=2).read("a") is None


def test_what_was_used_longest_ago_makes_room(monkeypatch):
    """To read an object is to use it."""
    kept = KeptObjects("traces", "a trace", variable=TRACE_CACHE)
    for at, key in enumerate("abc"):
        kept.write(key, {"text": "x" * 1000})
        os.utime(kept.folder / f"{key}.json", (at, at))
    kept.read("a")
    monkeypatch.setenv(TRACE_CACHE, str(3500 / 2**20))
    kept.write("d", {"text": "x" * 1000})

    assert [key for key in "abcd" if kept.read(key) is not None] == ["a", "c", "d"]


@pytest.fixture
def looks(monkeypatch):
    """How often a process looks through a folder."""
    count, scandir = Counter(), os.scandir

    def counted(folder):
        count[folder] += 1
        return scandir(folder)

    monkeypatch.setattr(kept_objects.os, "scandir", counted)
    return count


def test_many_small_objects_are_written_after_one_look(looks):
    """None where the folder has no largest size."""
    traces = KeptObjects("traces", "a trace", variable=TRACE_CACHE)
    for kept in (traces, KEPT):
        for key in "abcdefgh":
            kept.write(key, {})

    assert looks == {traces.folder: 1}


def test_what_others_write_is_seen_once_a_part_is_written(looks, monkeypatch):
    """A process knows of its own objects alone until it looks again."""
    kept = KeptObjects("traces", "a trace", variable=TRACE_CACHE)
    monkeypatch.setenv(TRACE_CACHE, str(64_000 / 2**20))
    kept.write("a", {"text": "x" * 600})
    (kept.folder / "others.json").write_bytes(bytes(64_000))
    os.utime(kept.folder / "others.json", (0, 0))
    kept.write("b", {})
    assert (kept.folder / "others.json").exists()
    kept.write("c", {"text": "x" * 900})

    assert looks == {kept.folder: 2}
    assert [path.name for path in sorted(kept.folder.iterdir())] == ["a.json", "b.json", "c.json"]


def test_a_full_folder_has_room_for_some_objects_again(looks, monkeypatch):
    """Else a process would look before each."""
    kept = KeptObjects("traces", "a trace", variable=TRACE_CACHE)
    monkeypatch.setenv(TRACE_CACHE, str(64_000 / 2**20))
    kept.folder.mkdir(parents=True)
    for at in range(128):
        (kept.folder / f"{at}.json").write_bytes(bytes(500))
        os.utime(kept.folder / f"{at}.json", (at, at))
    for key in "abcdefg":
        kept.write(key, {})

    assert looks == {kept.folder: 1}
    assert sum(path.stat().st_size for path in kept.folder.iterdir()) <= 64_000


def test_an_object_that_is_larger_than_the_cache_is_not_kept(monkeypatch):
    """Nor is anything where the size is 0."""
    kept = KeptObjects("data", "data", variable=DATA_CACHE)
    monkeypatch.setenv(DATA_CACHE, "0")
    kept.write("a", {})

    assert kept.max_bytes == 0
    assert not kept.folder.exists()


def test_a_disk_that_refuses_costs_nothing(tmp_path, monkeypatch):
    """A file stands where the cache would."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE, str(tmp_path / "file"))
    KEPT.write("a", {"n": 1})

    assert KEPT.read("a") is None


def test_folders_are_as_large_as_their_files(tmp_path):
    """The newest is kept, however large it is."""
    for at, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(100))
        os.utime(tmp_path / name, (at, at))

    assert [*longest_unused(tmp_path.iterdir(), 50, keep=tmp_path / "new")] == [tmp_path / "old"]
