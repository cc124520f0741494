"""Files that several processes write at once are whole for whoever reads them."""

from __future__ import annotations

import threading

from tlora_fx.host.durable import replace_shared_file


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
