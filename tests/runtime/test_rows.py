"""Reading rows from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tlora_fx.config.job import DataSpec
from tlora_fx.errors import DataFileError
from tlora_fx.runtime.data.rows import read_rows
from tlora_fx.runtime.data.text_files import DataRow

ROWS = [{"text": "a"}, {"text": "é"}]


def rows(path: Path | str) -> list[DataRow]:
    """All rows of a file."""
    return list(read_rows(DataSpec(path=str(path)), "a"))


def test_json_lines_know_their_line(tmp_path: Path) -> None:
    """Blank lines and a byte order mark are no rows, and lines are counted from one."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "\xc3\xa9"}')

    assert rows(path) == [DataRow(f"{path}:1", ROWS[0]), DataRow(f"{path}:3", ROWS[1])]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{'text': 1}", "no JSON: Expecting property name"),
        (b'"text"', "the row is no object but str"),
        (b'{"text": "\xff"}', "no JSON: no UTF-8 at byte 10"),
        (b"[" * 100_000, "no JSON: nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "no JSON: Exceeds the limit"),
    ],
)
def test_each_bad_line_has_its_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    """A bad line is a row without fields; the next line is read."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b'\n{"text": "a"}')

    bad, good = rows(path)
    assert bad.where == f"{path}:1"
    assert bad.reason.startswith(reason)
    assert good.fields == ROWS[0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (json.dumps(ROWS), "no object but list; a file of one list is named .json"),
        (json.dumps(ROWS, indent=1), "; a file of one list is named .json"),
        (json.dumps(ROWS[0], indent=1), "; an object stands in one line: jq -c . FILE"),
        ('[{"text": "a"}', "; a file of one list is named .json"),
        ('{"text": "a"', ""),
    ],
)
def test_json_of_another_shape_says_how_to_write_its_lines(
    tmp_path: Path, content: str, reason: str
) -> None:
    """One list of all rows, or objects over several lines, are what people call .jsonl too."""
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    bad = rows(path)[0].reason

    assert bad.endswith(reason)
    assert bool(reason) == (";" in bad)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_compressed_file_that_is_none_says_what_to_do(tmp_path: Path, name: str) -> None:
    """Whether it was cut off, or is plain text."""
    (tmp_path / name).write_text('{"text": "a"}')

    with pytest.raises(DataFileError) as caught:
        rows(tmp_path / name)
    suffix = Path(name).suffix
    assert caught.value.help == (
        f"copy or write it again; if it is not compressed, take {suffix} off its name"
    )


def test_a_json_file_holds_a_list_of_rows(tmp_path: Path) -> None:
    """Rows of a list are counted from one."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS))

    assert rows(path) == [DataRow(f"{path}: row {n}", row) for n, row in enumerate(ROWS, 1)]


@pytest.mark.parametrize("content", ['{"text": "a"}', '[{"text": ]'])
def test_a_json_file_that_is_no_list_is_refused(tmp_path: Path, content: str) -> None:
    """One object, or broken JSON, names the file."""
    path = tmp_path / "a.json"
    path.write_text(content)

    with pytest.raises(DataFileError, match=r"a\.json"):
        rows(path)


def test_parquet_gives_the_same_rows(tmp_path: Path) -> None:
    """Parquet rows have the columns of the file."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)

    assert [row.fields for row in rows(path)] == ROWS


@pytest.mark.parametrize(("name", "told"), [("trian.jsonl", "'train.jsonl'"), ("z", "starts at")])
def test_a_missing_file_is_told_with_the_one_that_was_meant(tmp_path: Path, name: str, told: str):
    """Where one beside it has nearly its name."""
    (tmp_path / "train.jsonl").write_text("{}\n")

    with pytest.raises(DataFileError, match=told):
        rows(tmp_path / name)


@pytest.mark.parametrize("content", [b"no parquet", b"", b"PAR1", b"PAR1PAR1", b"PAR1 and PAR1"])
def test_a_broken_parquet_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """Bytes that are no Parquet name the file."""
    path = tmp_path / "a.parquet"
    path.write_bytes(content)

    with pytest.raises(DataFileError, match="no Parquet that can be read"):
        rows(path)


def test_what_only_looks_like_parquet_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """By its first and last bytes, with what to do."""
    path = tmp_path / "a.parquet"
    path.write_bytes(b'{"prompt": "a"}')

    with pytest.raises(DataFileError, match=r"expected +PAR1 at its beginning(?s:.*)\.jsonl"):
        rows(path)


def test_reading_parquet_leaves_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a name with stars and brackets a pattern."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "[a] *.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)

    assert [row.fields for row in rows(path)] == ROWS
    assert not (tmp_path / "cache").exists()


def test_a_data_set_of_the_hub_has_rows_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its split is the job's; one that cannot be loaded is an error with its reason."""
    import datasets

    def load(name: str, split: str) -> list[Any]:
        if split != "train":
            raise ValueError("no such split")
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load)

    assert rows("someone/data") == [DataRow(f"someone/data: row {n}", ROWS[n - 1]) for n in (1, 2)]
    with pytest.raises(DataFileError, match="no such split"):
        list(read_rows(DataSpec(path="someone/data", split="test"), "a"))


@pytest.mark.parametrize("split", ["test", "train[:1]"])
@pytest.mark.parametrize("path", ["a.jsonl", "*.jsonl"])
def test_a_file_has_no_split(tmp_path: Path, path: str, split: str) -> None:
    """It would be trained on whole, and unsaid."""
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')

    with pytest.raises(DataFileError, match="a file has no split"):
        list(read_rows(DataSpec(path=str(tmp_path / path), split=split), "a"))
    with pytest.raises(DataFileError, match="rows have no split"):
        list(read_rows(DataSpec(rows=[{"text": "x"}], split=split), "a"))


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("none.jsonl", "does not exist"),
        ("./none", "does not exist"),
        ("folder", "is a folder"),
        ("a.xlsx", "files of type '.xlsx' are not read"),
    ],
)
def test_what_is_no_data_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, what: str
) -> None:
    """A path is never taken for a hub id."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.xlsx").touch()

    with pytest.raises(DataFileError, match=what):
        rows(path)
