"""The page of all errors."""

from __future__ import annotations

import pickle
import subprocess
import sys

from tlora_fx import errors
from tlora_fx.errors import __main__


def classes(root: type[errors.TloraError] = errors.TloraError) -> list[type[errors.TloraError]]:
    """All classes below `root` that tlora-fx itself has."""
    below = [kind for child in root.__subclasses__() for kind in (child, *classes(child))]
    return [kind for kind in below if kind.__module__.startswith(f"{errors.__name__}.")]


def test_each_error_has_a_code_of_its_own() -> None:
    """No two mistakes share a code, and each class says what it means."""
    codes = [kind.code for kind in classes()]

    assert errors.DataFileError.code in codes
    assert len(codes) == len(set(codes))
    assert all(kind.__doc__ for kind in classes())


def test_errors_travel_between_processes() -> None:
    """Each comes out with its facts, its help and its notes, told once."""
    for kind in classes():
        error = kind("what went wrong", file="a.csv", found=3, help="do this")
        error.add_note("in pass four")
        other = pickle.loads(pickle.dumps(error))

        assert (type(other), str(other), other.facts) == (kind, str(error), error.facts)
        assert other.__notes__ == ["in pass four"]


def test_the_page_has_every_error() -> None:
    """Each class has its heading, in the order of codes."""
    page = __main__.page()
    headings = [f"## {kind.code} {kind.__name__}" for kind in classes()]

    assert all(heading in page for heading in headings)
    assert [line for line in page.splitlines() if line in headings] == sorted(headings)


def test_the_page_is_printed_by_its_command() -> None:
    """`python -m tlora_fx.errors` prints it."""
    command = [sys.executable, "-m", "tlora_fx.errors"]

    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("# Errors\n")
    assert "did you mean 'learning_rate'?" in printed
