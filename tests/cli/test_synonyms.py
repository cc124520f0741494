"""An unknown command gets the one that its user wants, or none."""

from __future__ import annotations

import pytest

from tlora_fx.cli import COMMANDS
from tlora_fx.cli.arguments.synonyms import SYNONYMS, suggested


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ("finetune", "train"), ("fine_tune", "train"), ("Train", "train"), ("trian", "train"),
        ("fientune", "train"), ("infer", "generate"), ("export", "merge"), ("status", "watch"),
        ("convert", "import"), ("srve", "serve"), ("zebra", None), ("help", "--help"),
        ("delete", None), ("download", None), ("x", None),
    ],
)  # fmt: skip
def test_an_unknown_command_gets_the_one_that_is_wanted(asked, wanted):
    """A synonym, a misspelling, or nothing."""
    assert suggested(asked, COMMANDS) == wanted


def test_a_synonym_names_a_command_and_is_none():
    """Each leads to what there is."""
    assert set(SYNONYMS.values()) <= {*COMMANDS, "--help", "--version"}
    assert not set(SYNONYMS) & set(COMMANDS)
