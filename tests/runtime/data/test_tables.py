"""Tables of tokens: what is read is what was written, and what jobs share is encoded once."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.config.job import Job
from tlora_fx.errors import (
    ChatTemplateError,
    DataFileError,
    EnvironmentVariableWrong,
    MalformedRowError,
)
from tlora_fx.host import environment
from tlora_fx.runtime.data import encode_data
from tlora_fx.runtime.data.encode_data import encode_once, tables_folder, tokens_of_data
from tlora_fx.runtime.data.encoding import TextEncoder
from tlora_fx.runtime.data.samples import JobData, load_job_data
from tlora_fx.runtime.data.tables import (
    Cut,
    Sample,
    SampleTable,
    TokenRow,
    digest_of,
    record_batch,
)

ROWS = [{"prompt": "1+" * n, "completion": "ab" * (n % 3 + 1)} for n in range(1, 9)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(environment.CACHE, str(tmp_path / "cache"))


@pytest.fixture
def encoded(monkeypatch):
    """Counts the rows that are encoded."""
    rows, encode = [], TextEncoder.encode_rows

    def counted(self, some, draft):
        rows.extend(some)
        return encode(self, some, draft)

    monkeypatch.setattr(TextEncoder, "encode_rows", counted)
    return rows


def write(path: Path, rows: list[Any] = ROWS) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def load(path: Path, tokenizer: Any, **fields: Any) -> JobData:
    data = {"path": str(path), **fields.pop("data", {})}
    made = Job(name="a", base={"model": "m"}, lora={"r": 2}, data=data, **fields)
    return load_job_data(made, tokenizer)


@st.composite
def token_rows(draw):
    """A sequence with trained runs that are in order and do not touch; some are final."""
    ids = draw(st.lists(st.integers(0, 99), max_size=9))
    edges = draw(st.lists(st.integers(0, len(ids)), unique=True, max_size=6).map(sorted))
    return TokenRow(ids, edges[: len(edges) // 2 * 2], final=draw(st.booleans()))


def plain_sample(row: TokenRow, max_length: int, whole: bool) -> Sample:
    """A sample as lists make it."""
    trained = [whole and not row.final] * len(row.ids)
    for start, stop in zip(row.spans[::2], row.spans[1::2], strict=True):
        trained[start:stop] = [True] * (stop - start)
    labels = [i if on else -100 for i, on in zip(row.ids, trained, strict=True)]
    return Sample(tuple(row.ids[:max_length]), tuple(labels[:max_length]))


@given(rows=st.lists(token_rows(), max_size=12), max_length=st.integers(1, 10), whole=st.booleans())
def test_samples_are_those_of_plain_lists(rows, max_length, whole):
    """Also in several batches of a file; so are lengths, counts of targets, and the digest."""
    batches = [record_batch(rows[start : start + 5]) for start in range(0, len(rows), 5)]
    table = encode_once((), lambda counts: batches, lambda counts: True)
    samples = SampleTable(table, np.arange(len(table)), Cut(max_length, whole))
    expected = [plain_sample(row, max_length, whole) for row in rows]

    assert list(samples) == expected
    assert list(samples[1:]) == expected[1:]
    assert samples.lengths.tolist() == [len(sample.input_ids) for sample in expected]
    for first in (0, 1):
        counted = sum(label != -100 for sample in expected for label in sample.labels[first:])
        assert samples.targets(first).sum() == counted
    assert samples.digest() == digest_of(expected) == plain_digest(expected)
    backwards = samples.take(np.arange(len(samples))[::-1])
    assert backwards.digest() == plain_digest(expected[::-1])
    some = samples.take(np.arange(len(samples))[1::2])
    assert some.digest() == plain_digest(expected[1::2])


def plain_digest(samples: list[Sample]) -> str:
    """The digest that checkpoints of 0.1.0 have."""
    ends, ids, labels = array("q"), array("i"), array("i")
    for sample in samples:
        ids.extend(sample.input_ids)
        labels.extend(sample.labels)
        ends.append(len(ids))
    digest = hashlib.sha256(len(samples).to_bytes(8, "little"))
    for numbers in (ends, ids, labels):
        digest.update(numbers)
    return digest.hexdigest()[:32]


def test_jobs_that_differ_in_cuts_share_a_table(make_tokenizer, tmp_path, encoded):
    """Lengths, seeds, batches, packing and what is trained are no reason to encode again."""
    tokenizer, path = make_tokenizer(), write(tmp_path / "a.jsonl")
    changes = [
        {}, {"max_length": 4}, {"seed": 3}, {"data": {"loss_on": "all"}}, {"packing": True},
        {"eval_split": 0.25}, {"completion_only_loss": False},
    ]  # fmt: skip
    kept = [load(path, tokenizer, **each) for each in changes]

    assert len(encoded) == len(ROWS)
    assert len({id(each.samples.table) for each in kept}) == 1


def test_a_table_outlives_its_process(make_tokenizer, tmp_path, encoded):
    """An equal file under another name is not encoded again; `datasets` opens what is kept."""
    first = load(write(tmp_path / "a.jsonl"), make_tokenizer())
    digest = first.digest
    del first
    again = load(write(tmp_path / "b.jsonl"), make_tokenizer())

    assert len(encoded) == len(ROWS)
    assert again.digest == digest
    [file] = tables_folder().glob("*/tokens.arrow")
    assert len(Dataset.from_file(str(file))) == len(ROWS)


@pytest.mark.parametrize("change", ["rows", "tokenizer", "columns", "method", "template"])
def test_other_tokens_are_encoded_anew(make_tokenizer, tmp_path, encoded, change):
    """By content: a file's rows, a tokenizer, and what a job reads rows as."""
    path, tokenizer, fields = write(tmp_path / "a.jsonl"), make_tokenizer(), {}
    load(path, tokenizer)
    if change == "rows":
        path = write(path, ROWS[1:])
    if change == "tokenizer":
        tokenizer.add_special_tokens({"eos_token": "b"})
    if change == "columns":
        fields = {"data": {"columns": {"prompt": "completion", "completion": "prompt"}}}
    if change == "method":
        path = write(path, [{**row, "chosen": "a", "rejected": "b"} for row in ROWS])
        fields = {"method": "dpo"}
    if change == "template":
        tokenizer.chat_template = "{{ messages }}"
    before = len(encoded)
    load(path, tokenizer, **fields)

    assert len(encoded) > before


def test_a_bad_row_of_a_kept_table_is_refused_by_who_skips_none(make_tokenizer, tmp_path):
    """As it is when the file is read: by file and line, also under another name."""
    tokenizer, rows = make_tokenizer(), [*ROWS[:2], {"prompt": 3, "completion": "b"}]
    skipping = load(write(tmp_path / "a.jsonl", rows), tokenizer, data={"skip_bad_rows": True})
    assert skipping.report.bad_rows == 1
    path = write(tmp_path / "b.jsonl", rows)

    with pytest.raises(MalformedRowError, match=rf"{path}:3"):
        load(path, tokenizer)


def test_chats_whose_turns_are_not_found_are_whole_for_who_trains_all(make_tokenizer, tmp_path):
    """Rows that are bad for one job are not for another."""
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m['content'] if m['role'] == 'user' else 'B' }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write(tmp_path / "a.jsonl", 3 * [{"messages": chat}])
    skips, whole = {"skip_bad_rows": True}, {"loss_on": "all", "skip_bad_rows": True}

    assert load(path, tokenizer, data=whole).report.bad_rows == 0
    with pytest.raises(ChatTemplateError):
        load(path, tokenizer)
    with pytest.raises(Exception, match="bad"):
        load(path, tokenizer, data=skips)
    assert load(path, tokenizer, data=whole).report.bad_rows == 0


LEFT_OUT = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "a", "weight": 0},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "b"},
]


@pytest.mark.parametrize("order", [("all", "completion"), ("completion", "all")])
def test_a_turn_of_weight_0_is_trained_by_nobody(make_tokenizer, tmp_path, order):
    """Neither by a job that trains all tokens, whichever of both reads the data first."""
    tokenizer = make_tokenizer("{% for m in messages %}{{ m['content'] }}</s>{% endfor %}")
    path = write(tmp_path / "a.jsonl", [{"messages": LEFT_OUT}])
    trained = {}
    for loss_on in order:
        [sample] = load(path, tokenizer, data={"loss_on": loss_on}).samples
        pairs = zip(sample.input_ids, sample.labels, strict=True)
        trained[loss_on] = [tokenizer.decode([i]) for i, label in pairs if label != -100]

    assert trained == {"completion": ["b", "</s>"], "all": ["1", "</s>", "2", "</s>", "b", "</s>"]}


def test_a_full_disk_is_our_own_error(make_tokenizer, tmp_path, monkeypatch, caplog):
    """Where neither the cache nor a temporary folder can be written."""

    def full(path, batches):
        list(batches)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(encode_data, "write_batches", full)

    with pytest.raises(DataFileError, match="No space left"):
        load(write(tmp_path / "a.jsonl"), make_tokenizer())
    assert "tokens cannot be kept" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "no counts", "wrong counts"])
def test_a_damaged_table_is_made_anew(make_tokenizer, tmp_path, encoded, damage):
    """Nothing is trained on half of it."""
    path, tokenizer = write(tmp_path / "a.jsonl"), make_tokenizer()
    digest = load(path, tokenizer).digest
    [folder] = [each for each in tables_folder().iterdir() if each.is_dir()]
    file, counts = folder / "tokens.arrow", folder / "rows.json"
    if damage == "cut":
        os.truncate(file, file.stat().st_size // 2)
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "other":
        file.write_bytes(b"no arrow" * 99)
    elif damage == "no counts":
        counts.unlink()
    else:
        counts.write_text('{"rows": 3, "columns": []')
    for kept in folder.glob("*.digest"):
        kept.unlink()

    assert load(path, tokenizer).digest == digest
    assert len(encoded) == 2 * len(ROWS)


def test_the_oldest_tables_are_removed(make_tokenizer, tmp_path, monkeypatch, encoded):
    """What was read lately stays."""
    tokenizer = make_tokenizer()
    paths = [write(tmp_path / f"{n}.jsonl", ROWS[n:]) for n in range(3)]
    for path in paths[:2]:
        load(path, tokenizer)
    sizes = [file.stat().st_size for file in tables_folder().rglob("*") if file.is_file()]
    os.utime(next(tables_folder().glob("*/tokens.arrow")).parent, (1, 1))
    load(paths[0], tokenizer)
    monkeypatch.setenv(environment.DATA_CACHE, str(1.2 * sum(sizes) / 2**30))
    load(paths[2], tokenizer)

    assert len([folder for folder in tables_folder().iterdir() if folder.is_dir()]) == 2


def test_no_table_is_kept_where_none_may_be(make_tokenizer, tmp_path, monkeypatch):
    """By the variable, or where the folder cannot be written; a wrong variable is refused."""
    path, tokenizer = write(tmp_path / "a.jsonl"), make_tokenizer()
    monkeypatch.setenv(environment.DATA_CACHE, "0")
    digest = load(path, tokenizer).digest
    assert not tables_folder().exists()
    monkeypatch.delenv(environment.DATA_CACHE)
    (tmp_path / "file").touch()
    monkeypatch.setenv(environment.CACHE, str(tmp_path / "file"))
    assert load(path, tokenizer).digest == digest
    monkeypatch.setenv(environment.DATA_CACHE, "lots")
    with pytest.raises(EnvironmentVariableWrong, match="lots"):
        load(path, tokenizer)


def test_a_stream_is_read_as_far_as_the_steps_need(make_tokenizer, tmp_path, monkeypatch):
    """Rows behind the last one that is needed may be bad."""
    rows = [*ROWS[:5], {"prompt": 1, "completion": ""}]
    fields = {"max_steps": 2, "per_device_train_batch_size": 2}
    tokenizer, path = make_tokenizer(), write(tmp_path / "a.jsonl", rows)
    made = Job(name="a", base={"model": "m"}, lora={"r": 2}, data={"path": str(path)}, **fields)
    table = tokens_of_data(made, tokenizer, limit=4)

    assert len(table) == table.counts.rows == 4


@pytest.fixture
def many(monkeypatch):
    """A few rows are many, which two processes encode."""
    monkeypatch.setattr(encode_data, "CHUNK_ROWS", 2)
    monkeypatch.setattr(encode_data, "FEW_ROWS", 4)
    monkeypatch.setattr(encode_data, "usable_cpus", lambda: 2)
    return monkeypatch


def test_processes_encode_what_one_does(make_tokenizer, tmp_path, many):
    """In the order of the rows, bad ones counted; also when processes die at work."""
    rows = [*ROWS, {"prompt": 3, "completion": "b"}, *ROWS]
    path, tokenizer = write(tmp_path / "a.jsonl", rows), make_tokenizer()
    many.setenv(environment.DATA_CACHE, "0")
    digests = []
    for change in ("none", "processes", "dying"):
        many.setattr(encode_data, "FEW_ROWS", 99 if change == "none" else 4)
        if change == "dying":
            many.setattr(encode_data, "_asked", dying(encode_data._asked))
        loaded = load(path, tokenizer, data={"skip_bad_rows": True})
        digests.append((loaded.digest, *loaded.report.lines()))

    assert digests[0] == digests[1] == digests[2]
    assert f"{path}:9: " in str(digests[0])


def encoders() -> list[str]:
    """Processes of this one that encode."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            command = (folder / "cmdline").read_text()
            if int(parent) == os.getpid() and "import serve" in command:
                found.append(command)
    return found


def dying(asked):
    """Each process is killed before its first answer."""

    def kill_first(process, chunk):
        process.kill()
        return asked(process, chunk)

    return kill_first


def test_a_bad_row_among_many_is_named(make_tokenizer, tmp_path, many):
    """By its line, and no process is left."""
    rows = [*ROWS, {"prompt": 3, "completion": "b"}, *ROWS]
    path = write(tmp_path / "a.jsonl", rows)

    with pytest.raises(MalformedRowError, match=rf"{path}:9"):
        load(path, make_tokenizer())
    assert not encoders()
