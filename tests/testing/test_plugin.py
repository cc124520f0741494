"""The pytest plugin for accepted texts, run as a package of somebody else's would."""

from __future__ import annotations

import pytest

from tests import fresh

CONFTEST = 'pytest_plugins = ["tlora_fx.testing.plugin"]\n'
TEST = """
def test_text(golden):
    golden("one/text.txt", "hello\\n")
"""


@pytest.fixture
def tests(tmp_path):
    """A folder of tests with its own golden folder."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_text.py").write_text(TEST)
    (tmp_path / "golden").mkdir()
    return tmp_path


def run(folder, *options):
    """Run pytest there; its exit status and what it prints."""
    done = fresh.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, cwd=folder)
    return done.returncode, done.stdout


def test_a_text_is_accepted_once_and_compared_then(tests):
    """Missing: fails; --accept: written; equal: passes; other: fails and names the file."""
    assert "look at the text, then --accept it" in run(tests)[1]
    assert run(tests, "--accept")[0] == 0
    assert run(tests)[0] == 0

    file = tests / "golden" / "one" / "text.txt"
    file.write_text("something else\n")
    status, told = run(tests)
    assert status == 1
    assert "see pytest --accept" in told
