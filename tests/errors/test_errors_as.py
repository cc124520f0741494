"""Errors of others that are raised as ours."""

from __future__ import annotations

import pytest

from tlora_fx.errors import DumpNotWritable, errors_as


def test_an_error_of_the_disk_is_raised_as_ours(tmp_path):
    """With the facts before its text, the help behind, and itself as the cause."""
    path = tmp_path / "gone" / "graph.txt"
    with (
        pytest.raises(DumpNotWritable) as caught,
        errors_as(DumpNotWritable, "it cannot be written", file=path, help="free space"),
    ):
        path.write_text("")

    assert caught.value.facts == {
        "file": str(path),
        "found": f"[Errno 2] No such file or directory: '{path}'",
    }
    assert caught.value.help == "free space"
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize("kinds", [(StopIteration, KeyError), (Exception,)])
def test_other_kinds_are_named(kinds):
    """Also the one that ends generators."""
    with (
        pytest.raises(DumpNotWritable) as caught,
        errors_as(DumpNotWritable, "it cannot be read", *kinds, named=True),
    ):
        next(iter(()))

    assert caught.value.facts == {"found": "StopIteration: "}


def test_an_error_that_nobody_expects_stays():
    """It is a mistake of ours."""
    with (
        pytest.raises(ZeroDivisionError),
        errors_as(DumpNotWritable, "it cannot be read", OSError, ValueError),
    ):
        raise ZeroDivisionError
