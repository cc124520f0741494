"""The same rows give the same tokens, whatever kind of file holds them."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tlora_fx.config.job import DataSpec, Job
from tlora_fx.errors import DataFileError
from tlora_fx.runtime.data.rows import data_files, read_rows
from tlora_fx.runtime.data.samples import load_job_data
from tlora_fx.runtime.identity import describe_jobs

Rows = Sequence[Mapping[str, Any]]
#: Prints tools by their keys, whose order a columnar file does not keep.
TALKING = (
    "{% for t in tools or [] %}{{ t | dictsort }}{% endfor %}"
    "{% for m in messages %}{{ 'S:' if m.role == 'system' else '<|user|>' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | dictsort }}{% endfor %}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
)


def lines_of(rows: Rows) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows)


def as_jsonl(folder: Path, rows: Rows) -> Path:
    (folder / "rows.jsonl").write_bytes(lines_of(rows))
    return folder / "rows.jsonl"


def as_json(folder: Path, rows: Rows) -> Path:
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


def as_gz(folder: Path, rows: Rows) -> Path:
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines_of(rows)))
    return folder / "rows.jsonl.gz"


def as_zst(folder: Path, rows: Rows) -> Path:
    with pyarrow.CompressedOutputStream(str(folder / "rows.jsonl.zst"), "zstd") as file:
        file.write(lines_of(rows))
    return folder / "rows.jsonl.zst"


def as_parquet(folder: Path, rows: Rows) -> Path:
    pyarrow.parquet.write_table(table_of(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def as_saved(folder: Path, rows: Rows) -> Path:
    datasets.Dataset(table_of(rows)).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def as_splits(folder: Path, rows: Rows) -> Path:
    table = datasets.Dataset(table_of(rows))
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(folder / "splits"))
    return folder / "splits"


def as_pattern(folder: Path, rows: Rows) -> Path:
    half = len(rows) // 2
    (folder / "parts").mkdir(exist_ok=True)
    (folder / "parts" / "1.jsonl").write_bytes(lines_of(rows[:half]))
    (folder / "parts" / "2.jsonl.gz").write_bytes(gzip.compress(lines_of(rows[half:]), mtime=0))
    return folder / "parts" / "*"


def as_csv(folder: Path, rows: Rows) -> Path:
    """Of rows that have a value in each column, all of text but for JSON."""
    out = io.StringIO(newline="")
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, restval="")
    writer.writeheader()
    for row in rows:
        plain = {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()}
        writer.writerow(plain)
    (folder / "rows.csv").write_text(out.getvalue(), newline="")
    return folder / "rows.csv"


def table_of(rows: Rows) -> pyarrow.Table:
    """As a columnar file has them: each column in each row, each key in each object."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.table({name: pyarrow.array([row.get(name) for row in rows]) for name in names})


WRITERS: tuple[Callable[[Path, Rows], Path], ...] = (
    as_json, as_gz, as_zst, as_parquet, as_saved, as_splits, as_pattern,
)  # fmt: skip

text = st.text("abcdef", min_size=1, max_size=4)
turn = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": text}, optional={"name": text}
)
chat = st.builds(
    lambda asked, turns: [{"role": "user", "content": asked}, *turns],
    text,
    st.lists(turn, min_size=1, max_size=2),
)
tool = st.fixed_dictionaries({"name": text}, optional={"a": text, "b": st.integers(0, 9)})
beside = {"system": text, "history": st.lists(st.lists(text, min_size=2, max_size=2), max_size=2)}
FORMATS = {
    "alpaca": st.fixed_dictionaries(
        {"instruction": text, "output": text}, optional={"input": text, **beside}
    ),
    "messages": st.fixed_dictionaries(
        {"messages": chat}, optional={"tools": st.lists(tool, max_size=2), **beside}
    ),
    "prompt-completion": st.fixed_dictionaries({"prompt": text, "completion": text}),
    "text": st.fixed_dictionaries({"text": text}),
    "preference": st.fixed_dictionaries(
        {"chosen": text.map("g".__add__), "rejected": text.map("h".__add__)},
        optional={"prompt": text},
    ),
}


def job_of(path: Path, **fields: Any) -> Job:
    return Job(name="a", base={"model": "m"}, lora={"r": 2}, data={"path": str(path)}, **fields)


def tokens(path: Path, tokenizer: Any, method: str = "sft") -> list[Any]:
    """All samples of a file."""
    return list(load_job_data(job_of(path, method=method), tokenizer).samples)


@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data())
@settings(
    max_examples=3,
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_reader_gives_the_same_tokens(
    make_tokenizer: Any, tmp_path_factory: Any, format: str, data: st.DataObject
) -> None:
    """Of rows that have some of their optional keys."""
    rows = data.draw(st.lists(FORMATS[format], min_size=2, max_size=5))
    folder, tokenizer = tmp_path_factory.mktemp("rows"), make_tokenizer(TALKING)
    method = "dpo" if format == "preference" else "sft"
    expected = tokens(as_jsonl(folder, rows), tokenizer, method)

    # A table of text has an empty prompt where a pair has none.
    writers = WRITERS if format == "preference" else (*WRITERS, as_csv)
    for write in writers:
        assert tokens(write(folder, rows), tokenizer, method) == expected, write.__name__


def test_fillers_are_dropped_and_nulls_of_lists_stay(tmp_path: Path) -> None:
    """Arrow gives each object the keys of all; JSON lines keep what stands in a row."""
    rows = [{"a": {"x": 1}, "l": [None, "b"]}, {"a": {"y": [{"z": 1}, {}]}, "l": None}]
    read = [row.fields for row in read_rows(DataSpec(path=str(as_parquet(tmp_path, rows))), "a")]
    assert read == rows

    explicit = [{"a": {"x": None}}]
    path = as_jsonl(tmp_path, explicit)
    assert [row.fields for row in read_rows(DataSpec(path=str(path)), "a")] == explicit


def test_a_split_of_a_saved_folder_is_the_jobs(tmp_path: Path) -> None:
    """One that is not there is told with those that are."""
    path = str(as_splits(tmp_path, [{"text": "a"}]))

    assert len(list(read_rows(DataSpec(path=path, split="test"), "a"))) == 1
    with pytest.raises(DataFileError, match="no split 'dev'") as caught:
        list(read_rows(DataSpec(path=path, split="dev"), "a"))
    assert caught.value.facts["found"] == "train, test"


def test_a_saved_folder_names_no_files_of_others(tmp_path: Path) -> None:
    """Its list of files is somebody else's text."""
    path = as_saved(tmp_path, [{"text": "a"}])
    state = json.loads((path / "state.json").read_text())
    state["_data_files"] = [{"filename": "../../secret.arrow"}]
    (path / "state.json").write_text(json.dumps(state))

    with pytest.raises(DataFileError, match="lists no files of its own"):
        list(read_rows(DataSpec(path=str(path)), "a"))


def test_files_of_a_pattern_follow_each_other_by_name(tmp_path: Path) -> None:
    """Each row knows its file; a pattern without files is refused."""
    path = as_pattern(tmp_path, [{"text": "a"}, {"text": "b"}])
    rows = list(read_rows(DataSpec(path=str(path)), "a"))
    names = ["1.jsonl", "2.jsonl.gz"]

    assert [row.where for row in rows] == [f"{tmp_path}/parts/{name}:1" for name in names]
    assert [each.name for each in data_files(DataSpec(path=str(path)), "a")] == names
    with pytest.raises(DataFileError, match="no data file has such a name"):
        list(read_rows(DataSpec(path=f"{tmp_path}/none*.jsonl"), "a"))


@pytest.mark.parametrize("write", [as_jsonl, as_pattern, as_saved])
def test_a_checkpoint_knows_the_content_of_all_files(
    make_tokenizer: Any, tmp_path: Path, write: Callable[[Path, Rows], Path]
) -> None:
    """Other rows in one of them are another content; the same rows are the same."""
    digests = []
    for number, last in enumerate("bbc"):
        (tmp_path / str(number)).mkdir()
        job = job_of(write(tmp_path / str(number), [{"text": "a"}, {"text": last}]))
        data = {"a": load_job_data(job, make_tokenizer())}
        digests.append(describe_jobs([job], data)["data"]["a"]["file"])

    assert digests[0] is not None
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("write", [as_gz, as_zst])
@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b"no " + b, lambda b: b[:40] + bytes(9) + b[49:]]
)
def test_a_damaged_compressed_file_is_refused(
    tmp_path: Path, write: Callable[[Path, Rows], Path], damage: Callable[[bytes], bytes]
) -> None:
    """Cut off, of another kind, or broken inside."""
    path = write(tmp_path, [{"text": str(number) * 50} for number in range(50)])
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(DataFileError, match="cannot be read") as caught:
        list(read_rows(DataSpec(path=str(path)), "a"))
    assert caught.value.facts["path"] == str(path)


def test_compressed_parquet_is_refused(tmp_path: Path) -> None:
    """It is compressed inside."""
    (tmp_path / "a.parquet.gz").write_bytes(b"")
    with pytest.raises(DataFileError, match=r"type '\.parquet\.gz' are not read"):
        list(read_rows(DataSpec(path=str(tmp_path / "a.parquet.gz")), "a"))
