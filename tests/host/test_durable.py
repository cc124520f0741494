"""Files that several processes write at once are whole for whoever reads them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tlora_fx.host.durable import link_or_copy, replace_shared_file, write_output


def test_writers_of_one_name_do_not_meet(tmp_path):
    """Each content is whole, no writer fails, and nothing else is left."""
    path, failed, read = tmp_path / "kept", [], set()

    def write(letter):
        try:
            for _ in range(60):
                replace_shared_file(path, letter * 5000)
                read.add(path.read_bytes())
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failed
    assert read <= {letter * 5000 for letter in (b"a", b"b", b"c")}
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_output_gets_a_folder_of_its_own(tmp_path):
    """A user need not make it."""
    write_output(tmp_path / "new" / "folder" / "file", b"new")

    assert (tmp_path / "new" / "folder" / "file").read_bytes() == b"new"


def test_output_goes_through_a_link_to_the_file_behind_it(tmp_path):
    """The link stays one."""
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    write_output(tmp_path / "link", b"new")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_output_into_a_pipe_is_written_and_the_pipe_stays(tmp_path):
    """A device or a pipe is nothing that a file may take the place of."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, b"new")

    assert pipe.is_fifo()
    assert os.read(reader, 9) == b"new"
    os.close(reader)


def test_output_named_as_standard_output_is_printed(capfd):
    """`--csv /dev/stdout` leaves /dev as it is."""
    write_output(Path("/dev/stdout"), b"a,b\n")

    assert capfd.readouterr().out == "a,b\n"
    assert Path("/dev/stdout").is_symlink()


def test_a_link_never_writes_into_a_file_that_is_there(tmp_path):
    """That one may have other names, whose content would change too."""
    for name in ("new", "old"):
        (tmp_path / name).write_text(name)
    link_or_copy(tmp_path / "old", tmp_path / "target")

    with pytest.raises(FileExistsError):
        link_or_copy(tmp_path / "new", tmp_path / "target")

    assert (tmp_path / "old").read_text() == "old"
