"""Plain values with lines out of YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlora_fx.config.job_file import Located, read_yaml
from tlora_fx.errors import JobFileMissingError, JobFileSyntaxError


def read(folder: Path, text: str) -> Located:
    """Read YAML text."""
    path = folder / "a.yaml"
    path.write_text(text)
    return read_yaml(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-4", 2e-4),
        ("1.5", 1.5),
        (".inf", float("inf")),
        ("-3", -3),
        ("010", 10),
        ("0x1f", 31),
        ("yes", "yes"),
        ("no", "no"),
        ("true", True),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'2e-4'", "2e-4"),
        ("~", None),
        ("", None),
        ("!!str 3", "3"),
    ],
)
def test_scalars_follow_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    """Numbers in e-notation are numbers; words and dates are text."""
    found = read(tmp_path, f"a: {text}").value["a"]

    assert found == value
    assert type(found) is type(value)


def test_each_value_knows_its_line(tmp_path: Path) -> None:
    """Keys and list items have lines from one; what has none gets that of its holder."""
    located = read(tmp_path, "a:\n  b: 1\nc:\n  - 2\n  - d: 3\n")

    assert located.line(("a", "b")) == 2
    assert located.line(("c", 1, "d")) == 5
    assert located.line(("c", 1, "missing", "x")) == 5
    assert located.line(("missing",)) == 1


def test_anchors_and_merges_are_read(tmp_path: Path) -> None:
    """What stands in a mapping wins over what is merged into it."""
    text = "a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\nc: {<<: [{z: 1}, {z: 2}]}"

    assert read(tmp_path, text).value == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": {"z": 1},
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3", "a.yaml:3"),
        ("a: 1\nb: 2\na: 3", "'a' stands twice, first in line 1"),
        ("a: !!python/object/apply:os.system [x]", "python/object/apply:os.system' is not read"),
        ("a: !thing 3", "the tag '!thing' is not read"),
        ("a: !!set {x}", "'!!set' is not read"),
        ("a: !!int x", "a whole number cannot be read"),
        ("a: !!float x", "'x' is no float"),
        ("a: !!bool x", "'x' is no bool"),
        ("a: &a [*a]", "an alias stands inside what it names"),
        ("a: [1, 2", "no YAML"),
        ("a: 1\n  b: 2", "a.yaml:2"),
        ("a: *b", "undefined alias"),
        ("a: 1\n---\nb: 2", "more than one document"),
        ("[1]: 2", "no YAML|no plain text"),
        ("a: {<<: 3}", "'<<' merges mappings only"),
        ("", "empty"),
        ("# nothing", "empty"),
        ("a: \x00", "no YAML"),
        ("[" * 5000, "nested too deeply|no YAML"),
    ],
)
def test_what_is_not_read_is_told_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    """Only plain values are read, and each refusal says where."""
    with pytest.raises(JobFileSyntaxError, match=said):
        read(tmp_path, text)


def test_a_small_file_cannot_unfold_into_a_large_one(tmp_path: Path) -> None:
    """Aliases of aliases are counted as what they stand for."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]

    with pytest.raises(JobFileSyntaxError, match="unfolds into more than 100000 values"):
        read(tmp_path, "\n".join(lines))


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    """A missing file, a folder and bytes that are no text each have their words."""
    (tmp_path / "latin").write_bytes(b"a: \xe9")

    with pytest.raises(JobFileMissingError, match="No such file"):
        read_yaml(tmp_path / "none")
    with pytest.raises(JobFileMissingError, match="regular file"):
        read_yaml(tmp_path)
    with pytest.raises(JobFileSyntaxError, match="not UTF-8"):
        read_yaml(tmp_path / "latin")
