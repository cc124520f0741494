"""Processes that are forked from one that has imported everything are what was asked for."""

from __future__ import annotations

import atexit
import gc
import json
import socket
import subprocess
import sys
import tempfile

import pytest

from tests import forked

TOLD = """
import json, os, sys
print(json.dumps([sys.argv, os.environ["OWN"], os.getcwd(), sys.stdin.read(), __name__]))
print("beside", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One that has imported nothing more; a word in its memory comes with each fork."""
    folder = tmp_path_factory.mktemp("server")

    def imports() -> None:
        sys.imported_before = True
        sys.kept = tempfile.TemporaryDirectory(dir=folder)
        atexit.register(sys.kept.cleanup)
        gc.freeze()

    made = forked.Server(folder, imports)
    yield made
    made.close()


def test_a_fork_has_the_words_variables_files_and_end_of_an_interpreter(server, tmp_path):
    """Also its folder; what it prints comes out where it was asked to."""
    ended = subprocess.run(
        [server.client, "-u", "-c", TOLD, "word"],
        input="given", env={"OWN": "variable"}, cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip

    assert ended.returncode == 7, ended.stderr
    assert json.loads(ended.stdout) == [
        ["-c", "word"], "variable", str(tmp_path), "given", "__main__",
    ]  # fmt: skip
    assert ended.stderr == "beside\n"


def test_a_fork_finds_imported_what_the_server_has_imported(server):
    """Two forks at once do not meet."""
    code = "import sys; print(sys.imported_before); sys.imported_before = 'mine'"
    words = [server.client, "-c", code]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]

    assert [each.communicate()[0] for each in both] == ["True\n", "True\n"]


def test_a_fork_takes_nothing_away_that_the_server_has_made(server):
    """Temporary folders of a library are there for the next fork."""
    code = "import os, sys; print(os.path.exists(sys.kept.name))"
    words = [server.client, "-c", code]

    assert [subprocess.check_output(words, text=True) for _ in range(2)] == ["True\n", "True\n"]


def test_a_fork_that_fails_says_why(server):
    """As an interpreter does."""
    ended = subprocess.run(
        [server.client, "-c", "raise ValueError('wrong')"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: wrong\n")


def test_a_fork_may_leave_at_once(server):
    """Its own forks leave for themselves alone."""
    code = "import os; os.fork() or os._exit(5); os.wait(); os._exit(3)"

    assert subprocess.run([server.client, "-c", code], check=False).returncode == 3


@pytest.mark.parametrize("sent", [b"", (99).to_bytes(8, "little") + b"{"])
def test_a_client_that_ends_before_it_has_asked_ends_no_others(server, sent):
    """Such as one that was killed."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(server.client.parent / "forks"))
        link.sendall(sent)
    words = [server.client, "-c", "print(1)"]
    ended = subprocess.run(words, stdout=subprocess.PIPE, timeout=600, check=True)

    assert ended.stdout == b"1\n"
