"""The page of all errors."""

from __future__ import annotations

import subprocess
import sys

from tlora_fx import error_page, errors


def classes(root: type[errors.TloraError] = errors.TloraError) -> list[type[errors.TloraError]]:
    """All classes below `root` that tlora-fx itself has."""
    below = [kind for child in root.__subclasses__() for kind in (child, *classes(child))]
    return [kind for kind in below if kind.__module__ == errors.__name__]


def test_each_error_has_a_code_of_its_own() -> None:
    """No two mistakes share a code, and each class says what it means."""
    codes = [kind.code for kind in classes()]

    assert len(codes) == len(set(codes))
    assert all(kind.__doc__ for kind in classes())


def test_the_page_has_every_error() -> None:
    """Each class has its heading, in the order of codes."""
    page = error_page.page()
    headings = [f"## {kind.code} {kind.__name__}" for kind in classes()]

    assert all(heading in page for heading in headings)
    assert [line for line in page.splitlines() if line in headings] == sorted(headings)


def test_the_page_is_printed_by_its_command() -> None:
    """`python -m tlora_fx.errors` prints it."""
    command = [sys.executable, "-m", "tlora_fx.errors"]

    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("# Errors\n")
    assert "did you mean 'learning_rate'?" in printed
