"""The samples of a job and the order of its steps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.config.job import Job
from tlora_fx.errors import ChatTemplateError, EmptyDataError, MalformedRowError, NoTargetsError
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample, load_job_data

GSM8K = Path(__file__).parents[2] / "../shared/data/gsm8k/train.jsonl"


def job(path: str | Path = "train.jsonl", data: dict[str, Any] | None = None, **fields: Any) -> Job:
    """A job over a data file."""
    source = {"path": str(path), **(data or {})}
    return Job(name="a", base={"model": "m"}, lora={"r": 2}, data=source, **fields)


def numbered(count: int, **fields: Any) -> JobData:
    """The data of a job whose samples hold their own number."""
    samples = [Sample((number, number), (-100, number)) for number in range(count)]
    return JobData(job(**fields), samples, DataReport())


def numbers(step: list[list[Sample]]) -> list[int]:
    """The numbers of the samples of a step."""
    return [sample.input_ids[0] for batch in step for sample in batch]


def write(folder: Path, *rows: object) -> Path:
    """A JSONL file; text stands as it is."""
    path = folder / "train.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines))
    return path


@given(
    count=st.integers(1, 60),
    batch=st.integers(1, 9),
    accumulation=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_an_epoch_takes_every_sample_once(
    count: int, batch: int, accumulation: int, seed: int, epoch: int, shuffle: bool
) -> None:
    """The steps of an epoch hold each sample once, in full micro-batches but for the last."""
    data = numbered(
        count,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        seed=seed,
        shuffle=shuffle,
    )
    first = epoch * data.steps_per_epoch
    steps = [data.step(step) for step in range(first, first + data.steps_per_epoch)]

    sizes = [len(micro) for step in steps for micro in step]
    assert Counter(n for step in steps for n in numbers(step)) == Counter(range(count))
    assert all(len(step) == accumulation for step in steps[:-1])
    assert all(size == batch for size in sizes[:-1])
    assert 1 <= sizes[-1] <= batch


@given(asked=st.lists(st.integers(0, 40), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_a_step_does_not_depend_on_the_steps_before_it(asked: list[int], seed: int) -> None:
    """Steps asked for in any order are those of a data set that is asked for one alone."""
    data = numbered(7, per_device_train_batch_size=2, seed=seed)

    for step in asked:
        assert data.step(step) == numbered(7, per_device_train_batch_size=2, seed=seed).step(step)


def test_each_epoch_has_an_order_of_its_own() -> None:
    """Steps beyond an epoch go round with a new shuffle."""
    data = numbered(50, per_device_train_batch_size=50, max_steps=3)

    assert len({tuple(numbers(data.step(step))) for step in range(3)}) == 3


def test_the_seed_of_a_job_shuffles_it() -> None:
    """Two seeds give two orders, and one seed always the same."""
    first, again, other = (numbered(50, seed=seed).step(0) for seed in (1, 1, 2))

    assert first == again != other


def test_a_job_that_does_not_shuffle_keeps_the_order_of_its_file() -> None:
    """shuffle: false takes samples as they stand, in each epoch."""
    data = numbered(4, shuffle=False, per_device_train_batch_size=3)

    assert [numbers(data.step(step)) for step in range(3)] == [[0, 1, 2], [3], [0, 1, 2]]


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"per_device_train_batch_size": 4}, 3),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, 3),
        ({"per_device_train_batch_size": 4, "num_train_epochs": 2.5}, 8),
        ({"per_device_train_batch_size": 4, "max_steps": 7}, 7),
    ],
)
def test_steps_are_counted_as_the_trainer_of_transformers_does(
    fields: dict[str, Any], steps: int
) -> None:
    """Ten samples make as many optimizer steps as transformers would make of them."""
    assert numbered(10, **fields).steps == steps


def test_labels_are_ids_where_a_token_is_trained(make_tokenizer: Any, tmp_path: Path) -> None:
    """Labels are not shifted and -100 on the prompt."""
    path = write(tmp_path, {"prompt": "a", "completion": "b"})
    data = load_job_data(job(path), make_tokenizer())

    [sample] = data.samples
    assert sample.labels == (-100, *sample.input_ids[1:])
    assert data.report.lines()[:2] == [
        "1 sample, 3 tokens, 2 trained",
        "read as prompt-completion (prompt, completion); trained on completions",
    ]


def test_long_samples_are_truncated_and_counted(make_tokenizer: Any, tmp_path: Path) -> None:
    """A sample is cut at max_length; one without a target left is dropped; both are counted."""
    path = write(
        tmp_path,
        {"prompt": "ab", "completion": "cdef"},
        {"prompt": "abcdef", "completion": "g"},
        {"prompt": "a", "completion": "b"},
    )
    data = load_job_data(job(path, max_length=4), make_tokenizer())

    assert [len(sample.input_ids) for sample in data.samples] == [4, 3]
    assert (data.report.rows, data.report.truncated) == (3, 2)
    assert data.report.dropped_without_target == 1


def test_a_lone_first_token_is_no_target(make_tokenizer: Any, tmp_path: Path) -> None:
    """A text of one token has nothing before it that could predict it."""
    path = write(tmp_path, {"text": "a"}, {"text": "ab"})
    data = load_job_data(job(path), make_tokenizer(eos_token=None))

    assert data.report.dropped_without_target == 1
    assert data.report.target_tokens == 1
    assert "no end-of-sequence token" in data.report.lines()[-1]


def test_columns_are_mapped(make_tokenizer: Any, tmp_path: Path) -> None:
    """Our names stand for those of the file."""
    path = write(tmp_path, {"question": "a", "answer": "b"})
    columns = {"columns": {"prompt": "question", "completion": "answer"}}

    assert len(load_job_data(job(path, columns), make_tokenizer()).samples) == 1


def test_a_malformed_row_is_named(make_tokenizer: Any, tmp_path: Path) -> None:
    """The error names file, line, job and reason."""
    path = write(tmp_path, {"text": "ab"}, "", '{"text": ')

    with pytest.raises(MalformedRowError) as caught:
        load_job_data(job(path), make_tokenizer())
    assert caught.value.facts["file"] == f"{path}:3"
    assert caught.value.facts["job"] == "a"
    assert "Expecting value at column 10" in caught.value.facts["found"]


def test_malformed_rows_are_skipped_on_request(make_tokenizer: Any, tmp_path: Path) -> None:
    """skip_bad_rows counts rows that are no JSON, no object, or lack a value."""
    path = write(tmp_path, "{", "3", {"text": "ab"}, {"txt": "ab"}, {"text": None})
    data = load_job_data(job(path, {"skip_bad_rows": True}), make_tokenizer())

    assert (data.report.rows, data.report.bad_rows, data.report.samples) == (5, 4, 1)
    assert data.report.first_bad_rows[1] == f"{path}:2: the row is no object but int"
    assert "4 of 5 bad rows skipped" in data.report.lines()


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_data_is_refused(make_tokenizer: Any, tmp_path: Path, content: str) -> None:
    """A file without rows names itself."""
    with pytest.raises(EmptyDataError, match="no rows"):
        load_job_data(job(write(tmp_path, content)), make_tokenizer())


def test_data_of_bad_rows_alone_is_refused(make_tokenizer: Any, tmp_path: Path) -> None:
    """Skipping all rows leaves nothing to train on."""
    path = write(tmp_path, "{", "[")

    with pytest.raises(EmptyDataError, match="all rows of the data are bad"):
        load_job_data(job(path, {"skip_bad_rows": True}), make_tokenizer())


def test_data_without_completions_is_refused(make_tokenizer: Any, tmp_path: Path) -> None:
    """Empty completions leave no token to train on."""
    path = write(tmp_path, {"prompt": "a", "completion": ""})

    with pytest.raises(NoTargetsError, match="none of 1 samples") as caught:
        load_job_data(job(path), make_tokenizer())
    told = "give completions or turns of an assistant, or set loss_on: all in the job's data"
    assert caught.value.help == told
    assert "max_length" not in caught.value.facts


def test_data_whose_completions_are_all_cut_away_says_so(
    make_tokenizer: Any, tmp_path: Path
) -> None:
    """A longer sequence would have kept them."""
    path = write(tmp_path, {"prompt": "a" * 9, "completion": "b"})

    with pytest.raises(NoTargetsError, match="none of 1 samples") as caught:
        load_job_data(job(path, max_length=4), make_tokenizer())
    assert caught.value.facts["max_length"] == "4"
    assert caught.value.facts["found"] == "1 of 1 samples are longer than max_length"
    assert caught.value.help.startswith("raise max_length, ")


def test_messages_need_a_chat_template(make_tokenizer: Any, tmp_path: Path) -> None:
    """A tokenizer without a template is told before any row is read."""
    path = write(tmp_path, {"messages": [{"role": "user", "content": "a"}]})

    with pytest.raises(ChatTemplateError, match="no chat template"):
        load_job_data(job(path), make_tokenizer())


def test_a_template_that_hides_turns_names_the_row(
    make_tokenizer: Any, templates: dict[str, str], tmp_path: Path
) -> None:
    """The error says which row the template changes, and what to do."""
    roles = ("user", "assistant", "user", "assistant")
    path = write(tmp_path, {"messages": [{"role": role, "content": "ab"} for role in roles]})

    with pytest.raises(ChatTemplateError) as caught:
        load_job_data(job(path), make_tokenizer(templates["shortening"]))
    assert caught.value.facts["file"] == f"{path}:1"
    assert "loss_on: all" in caught.value.help


@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K is not beside the repository")
def test_gsm8k_loads_whole(make_tokenizer: Any) -> None:
    """All 7473 rows of GSM8K become samples that end with the end token."""
    columns = {"columns": {"prompt": "question", "completion": "answer"}}
    tokenizer = make_tokenizer()
    data = load_job_data(job(GSM8K, columns, max_length=4096), tokenizer)

    assert (data.report.rows, data.report.samples, data.report.truncated) == (7473, 7473, 0)
    assert data.samples[0].labels[-1] == tokenizer.eos_token_id
