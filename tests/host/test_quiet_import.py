"""A package is imported while others work, and a mistake of it is told."""

from __future__ import annotations

import sys
import threading

import pytest

from tlora_fx.host.quiet_import import NOTICES, ImportInThread


def imported(tmp_path, monkeypatch, name, text):
    """An import of a module with this text, after it has ended."""
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    later = ImportInThread(name)
    later.require()
    later.start()
    for thread in threading.enumerate():
        if thread.name == f"import-{name}":
            thread.join()
    return later


def test_a_package_is_there_afterwards(tmp_path, monkeypatch):
    """Nothing is raised."""
    imported(tmp_path, monkeypatch, "module_that_works", "VALUE = 3").require()

    assert sys.modules.pop("module_that_works").VALUE == 3


def test_what_an_import_raises_is_raised_where_it_is_asked_for(tmp_path, monkeypatch):
    """Not in the thread alone."""
    later = imported(tmp_path, monkeypatch, "module_that_fails", "raise OSError('no library')")

    with pytest.raises(OSError, match="no library"):
        later.require()


def test_an_import_in_a_thread_shows_no_foreign_notice(tmp_path, monkeypatch, caplog):
    """Other messages of the same logger are shown."""
    name, notice = next(iter(NOTICES.items()))
    text = f"import logging\nlog = logging.getLogger({name!r})\n"
    text += f"log.warning({notice!r})\nlog.warning('something else')\n"
    imported(tmp_path, monkeypatch, "module_that_warns", text).require()

    assert [record.getMessage() for record in caplog.records] == ["something else"]
