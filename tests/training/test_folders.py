"""Copies of versions, which whoever answers HTTP makes in several threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from tlora_fx.training import folders
from tlora_fx.training.folders import copy_version


def test_a_copy_that_is_asked_for_twice_at_once_is_whole(tmp_path, monkeypatch):
    """A client whose first request takes long sends it again."""
    names = [f"{at}.safetensors" for at in range(4)]
    (tmp_path / "version").mkdir()
    for name in names:
        (tmp_path / "version" / name).write_text(name)
    link = folders.link_or_copy

    def slowly(source, target):
        time.sleep(0.01)
        link(source, target)

    monkeypatch.setattr(folders, "link_or_copy", slowly)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(copy_version, tmp_path, "version", "s:train:0", "a") for _ in range(4)]

    [copy] = {each.result() for each in asked}
    assert sorted(each.name for each in (tmp_path / copy).iterdir()) == names
