"""`tlora-fx` itself: its own options, and what other libraries say meanwhile."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from tests import fresh
from tlora_fx import __version__
from tlora_fx.cli import NOTICES, main, without_foreign_notices


@pytest.mark.parametrize("words", [["--version"], ["--version", "plan"]])
def test_the_version_is_said_without_a_command(words, capsys):
    """And nothing else happens."""
    with pytest.raises(SystemExit) as end:
        main(words)

    assert not end.value.code
    assert capsys.readouterr().out.strip() == __version__


def test_the_module_says_its_version_too():
    """`python -m tlora_fx --version`, as a user starts it."""
    told = fresh.run("-m", "tlora_fx", "--version")

    assert (told.returncode, told.stdout.strip()) == (0, __version__), told.stderr


def test_importing_peft_says_nothing():
    """In an interpreter of its own, which imports PEFT and transformers anew."""
    code = (
        "from tlora_fx.cli import without_foreign_notices\n"
        "with without_foreign_notices():\n"
        "    import peft, transformers.models.llama.modeling_llama\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert told.stderr == ""


@pytest.mark.parametrize("name", NOTICES)
def test_other_messages_of_the_same_libraries_are_told(name):
    """And all of them again afterwards."""
    logger, seen = logging.getLogger(name), logging.Handler()
    told = []
    seen.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(seen)
    try:
        with without_foreign_notices():
            logger.warning("a notice: %s", NOTICES[name])
            logger.warning("something else")
        logger.warning("later: %s", NOTICES[name])
    finally:
        logger.removeHandler(seen)

    assert told == ["something else", f"later: {NOTICES[name]}"]
