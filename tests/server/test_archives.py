"""Archives of the folders of jobs, as they are sent."""

from __future__ import annotations

import io
import os
import shutil
import tarfile

import pytest

from tlora_fx.server import archives
from tlora_fx.server.archives import packed


def test_what_is_sent_is_the_files_of_the_folder_though_it_is_removed(tmp_path, monkeypatch):
    """All but hidden ones, of any size, in several pieces."""
    monkeypatch.setattr(archives, "CHUNK_BYTES", 700)
    folder = tmp_path / "a"
    (folder / "tensorboard").mkdir(parents=True)
    (folder / ".hidden").write_bytes(b"no")
    files = {f"{size}": os.urandom(size) for size in (0, 1, 511, 512, 513, 2000)}
    files["x" * 200] = b"long"
    for name, content in files.items():
        (folder / name).write_bytes(content)
    size, content = packed(folder, "alice.a")
    shutil.rmtree(folder)
    sent = b"".join(content)

    assert len(sent) == size
    with tarfile.open(fileobj=io.BytesIO(sent)) as tar:
        assert {member.name: tar.extractfile(member).read() for member in tar} == {
            f"alice.a/{name}": content for name, content in files.items()
        }


def test_a_file_that_becomes_shorter_breaks_the_answer_off(tmp_path):
    """Nobody takes the rest for the file."""
    file = tmp_path / "weights"
    file.write_bytes(b"w" * 1000)
    _, content = packed(tmp_path, "a")
    os.truncate(file, 10)

    with pytest.raises(OSError, match="shorter"):
        list(content)
