"""Check files, and checks of texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlora_fx.errors import GraphFileNotReadable
from tlora_fx.testing import check_text, run_check_file

CSE = Path(__file__).parents[1] / "passes" / "checks" / "cse.tfx"
TEXT = "a = one()\nb = two(a)\nc = three(b)\n"


@pytest.mark.parametrize(
    "checks",
    [
        "# CHECK: [[A:\\w+]] = one\n# CHECK: two([[A]])",
        "# CHECK: one\n# CHECK-NEXT: two\n# CHECK-NOT: four",
        "# CHECK-DAG: three\n# CHECK-DAG: one",
    ],
    ids=["capture", "next-and-not", "any-order"],
)
def test_a_text_that_fits_passes(checks):
    """Captures, order, absence."""
    check_text(TEXT, checks)


@pytest.mark.parametrize(
    ("checks", "told"),
    [
        ("# CHECK: [[A:\\w+]] = one\n# CHECK: three([[A]])", "three"),
        ("# CHECK: two\n# CHECK: one", "one"),
        ("# CHECK: one\n# CHECK-NOT: two\n# CHECK: three", "two"),
        ("no checks", "No check strings"),
    ],
    ids=["capture", "order", "not", "none"],
)
def test_a_text_that_does_not_fit_is_told(checks, told):
    """With the check, and the text."""
    with pytest.raises(AssertionError, match=told) as caught:
        check_text(TEXT, checks)

    assert TEXT in str(caught.value)


def test_a_check_file_whose_pass_does_nothing_fails(tmp_path):
    """The checks are of what comes out."""
    file = tmp_path / "cse.tfx"
    file.write_text(CSE.read_text().replace("# RUN: cse", "# RUN: dce"))

    with pytest.raises(AssertionError, match=r"cse\.tfx:\d+"):
        run_check_file(file)


def test_a_wrong_graph_is_told_with_its_line(tmp_path):
    """As of any graph file."""
    file = tmp_path / "cse.tfx"
    file.write_text(CSE.read_text().replace("aten.sin.default(x)", "aten.sin.default(y)", 1))

    with pytest.raises(GraphFileNotReadable, match=r"line +12"):
        run_check_file(file)


def test_the_example_of_the_docstring_passes(tmp_path):
    """As it stands."""
    import tlora_fx.testing.checks as module

    lines = module.__doc__.split("\n\n")[2].splitlines()
    file = tmp_path / "example.tfx"
    file.write_text("\n".join(line.removeprefix("    ") for line in lines))

    run_check_file(file)
