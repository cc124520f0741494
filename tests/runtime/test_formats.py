"""What data sets of other tools become: Alpaca, ShareGPT, OpenAI's messages, CSV, text, pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.config.job import Job
from tlora_fx.errors import (
    DataFileError,
    JobError,
    MalformedRowError,
    MissingColumnError,
    TloraError,
)
from tlora_fx.runtime.data.samples import JobData, load_job_data, packed

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "number"}}}]
#: Prints tools and calls, and leaves out whatever else but users and assistants say.
TALKING = (
    "{% if tools %}{{ tools[0].function.name }}.{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant', 'tool') %}"
    "<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.a }}"
    "{% endfor %}{% if m.role == 'assistant' %}</s>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def job(path: Path, data: dict[str, Any] | None = None, **fields: Any) -> Job:
    """A job over a data file."""
    spec = {"path": str(path), **(data or {})}
    return Job(name="a", base={"model": "m"}, lora={"r": 2}, data=spec, **fields)


def written(folder: Path, *rows: object) -> Path:
    """A file of these rows, or of this text."""
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def shown(tokenizer: Any, data: JobData) -> list[str]:
    """The samples, with the tokens that are trained in brackets."""
    samples = []
    for sample in data.samples:
        tokens = tokenizer.convert_ids_to_tokens(list(sample.input_ids))
        pairs = zip(tokens, sample.labels, strict=True)
        samples.append("".join(t if label < 0 else f"[{t}]" for t, label in pairs))
    return samples


def test_an_alpaca_row_is_one_exchange(make_tokenizer: Any, tmp_path: Path) -> None:
    """Its input follows the instruction; a chat template renders it, where there is one."""
    rows = {"instruction": "a", "input": "b", "output": "c"}, {"instruction": "a", "output": "d"}
    path, plain, chat = written(tmp_path, *rows), make_tokenizer(), make_tokenizer(TALKING)

    data = load_job_data(job(path), plain)
    assert shown(plain, data) == ["a\n\nb\n\n[c][</s>]", "a\n\n[d][</s>]"]
    assert data.report.layout.startswith("read as alpaca (instruction, input, output)")
    talked = shown(chat, load_job_data(job(path), chat))
    assert talked[0] == "<|user|>a\n\nb<|assistant|>[c][</s>]"


def test_sharegpt_is_read_as_messages(make_tokenizer: Any, tmp_path: Path) -> None:
    """from and value are role and content; human is the user, gpt the assistant."""
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    tokenizer = make_tokenizer(TALKING)
    data = load_job_data(job(written(tmp_path, {"conversations": turns})), tokenizer)

    assert shown(tokenizer, data) == ["<|user|>a<|assistant|>[b][</s>]"]
    assert "sharegpt" in data.report.layout


def test_tools_and_their_calls_reach_the_template(make_tokenizer: Any, tmp_path: Path) -> None:
    """OpenAI writes arguments as JSON in a text; templates want the object."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
    ]
    tokenizer = make_tokenizer(TALKING)
    for tools in (TOOLS, json.dumps(TOOLS)):
        path = written(tmp_path, {"messages": messages, "tools": tools})
        [text] = shown(tokenizer, load_job_data(job(path), tokenizer))
        plain = text.replace("[", "").replace("]", "")
        assert plain == "add.<|user|>a<|assistant|>add 1</s><|user|>2<|assistant|>b</s>"
        assert text.endswith("<|assistant|>[b][</s>]")


@pytest.mark.parametrize(
    ("role", "reason"),
    [
        ("system", "leaves out what the role 'system' says"),
        ("asistant", "did you mean 'assistant'"),
    ],
)
def test_a_role_that_the_template_does_not_know_is_refused(
    make_tokenizer: Any, tmp_path: Path, role: str, reason: str
) -> None:
    """A template that passes over a turn would train another conversation."""
    messages = [{"role": role, "content": "a"}, {"role": "user", "content": "b"}]
    path = written(tmp_path, {"messages": [*messages, {"role": "assistant", "content": "c"}]})

    with pytest.raises(MalformedRowError, match=reason):
        load_job_data(job(path), make_tokenizer(TALKING))


def test_trl_names_what_is_trained(make_tokenizer: Any, tmp_path: Path) -> None:
    """completion_only_loss and assistant_only_loss mean what they mean in TRL."""
    tokenizer = make_tokenizer(TALKING)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat = written(tmp_path, {"messages": turns})
    [whole] = load_job_data(job(chat, assistant_only_loss=False), tokenizer).samples
    assert min(whole.labels) >= 0
    with pytest.raises(MissingColumnError, match="write assistant_only_loss: true"):
        load_job_data(job(chat, completion_only_loss=True), tokenizer)
    pairs = written(tmp_path, {"prompt": "a", "completion": "b"})
    [whole] = load_job_data(job(pairs, completion_only_loss=False), tokenizer).samples
    assert min(whole.labels) >= 0


@pytest.mark.parametrize(("suffix", "comma"), [(".csv", ","), (".tsv", "\t")])
def test_a_table_of_text_has_rows_by_line(
    make_tokenizer: Any, tmp_path: Path, suffix: str, comma: str
) -> None:
    """Numbers and NA stay text; a quoted field may hold line breaks; a short row names its line."""
    path = tmp_path / f"rows{suffix}"
    path.write_text(f'prompt{comma}completion\n"a\nb"{comma}42\nc{comma}NA\nd\n')
    tokenizer = make_tokenizer()

    with pytest.raises(MalformedRowError) as caught:
        load_job_data(job(path), tokenizer)
    assert caught.value.facts["file"] == f"{path}:5"
    skipping = job(path, {"skip_bad_rows": True})
    assert shown(tokenizer, load_job_data(skipping, tokenizer)) == [
        "a\nb[4][2][</s>]",
        "c[N][A][</s>]",
    ]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("rows.csv", "prompt;completion\na;b\n", "by semicolons: save it with commas"),
        ("rows.csv", "prompt;completion\na, c;b\n", "by semicolons: save it with commas"),
        ("rows.csv", "prompt\tcompletion\na\tb\n", "by tabs: name it .tsv"),
        ("rows.csv", "prompt|completion\na|b\n", "by vertical bars: save it with commas"),
        ("rows.tsv", "prompt,completion\na,b\n", "by commas: name it .csv"),
    ],
)
@pytest.mark.parametrize("columns", [{}, {"columns": {"prompt": "promt", "completion": "c"}}])
def test_a_table_with_other_separators_is_told(
    make_tokenizer: Any, tmp_path: Path, name: str, text: str, told: str, columns: dict[str, Any]
) -> None:
    """In place of a column that is like all of them together."""
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises((MissingColumnError, MalformedRowError)) as caught:
        load_job_data(job(path, columns), make_tokenizer())
    assert f"the file is separated {told}" in str(caught.value)
    assert "did you mean" not in str(caught.value)


def test_each_line_of_a_text_file_is_a_sample(make_tokenizer: Any, tmp_path: Path) -> None:
    """Blank lines are none."""
    path = tmp_path / "lines.txt"
    path.write_text("ab\n\ncd\n")
    tokenizer = make_tokenizer()

    assert shown(tokenizer, load_job_data(job(path), tokenizer)) == ["[a][b][</s>]", "[c][d][</s>]"]


@pytest.mark.parametrize(
    ("name", "content", "encoding"),
    [
        ("a.csv", "text\nGrüße\n".encode("cp1252"), "cp1252"),
        ("a.csv", "text\nab\n".encode("utf-16"), "utf-16"),
        ("a.jsonl", '{"text": "ab"}\n'.encode("utf-16"), "utf-16"),
        ("a.txt", "日本語の文章です。これは試験です。\n".encode("shift_jis"), "shift_jis"),
    ],
)
def test_another_encoding_is_named(
    make_tokenizer: Any, tmp_path: Path, name: str, content: bytes, encoding: str
) -> None:
    """With what converts the file."""
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(TloraError) as caught:
        load_job_data(job(path), make_tokenizer())
    assert encoding in str(caught.value)


def test_a_pair_is_two_samples_behind_each_other(make_tokenizer: Any, tmp_path: Path) -> None:
    """The chosen one first, with one prompt; a batch counts pairs."""
    rows = [{"prompt": "a", "chosen": letter, "rejected": "z"} for letter in "bcd"]
    tokenizer = make_tokenizer()
    data = load_job_data(
        job(written(tmp_path, *rows), method="dpo", per_device_train_batch_size=2), tokenizer
    )

    assert shown(tokenizer, data)[:2] == ["a[b][</s>]", "a[z][</s>]"]
    assert (data.report.samples, data.steps) == (3, 2)
    assert [len(batch) for batch in data.step(0)] == [4]


def test_a_shared_start_is_the_prompt_of_a_pair(make_tokenizer: Any, tmp_path: Path) -> None:
    """Conversations without a prompt of their own part where they differ."""
    asked = {"role": "user", "content": "a"}
    sides = {
        name: [asked, {"role": "assistant", "content": letter}]
        for name, letter in (("chosen", "b"), ("rejected", "c"))
    }
    tokenizer = make_tokenizer(TALKING)
    data = load_job_data(job(written(tmp_path, sides), method="dpo"), tokenizer)

    start = "<|user|>a<|assistant|>"
    assert shown(tokenizer, data) == [f"{start}[b][</s>]", f"{start}[c][</s>]"]


def test_preferences_need_a_method(make_tokenizer: Any, tmp_path: Path) -> None:
    """Whoever brings pairs is told how to train them, and what a method cannot have."""
    path = written(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"})

    with pytest.raises(MissingColumnError, match="method: dpo"):
        load_job_data(job(path), make_tokenizer())
    for fields in ({"packing": True}, {"completion_only_loss": True}):
        with pytest.raises(JobError, match="needs method sft"):
            job(path, method="dpo", **fields)
    with pytest.raises(JobError, match="'beta' needs method"):
        job(path, beta=0.2)


def test_a_stream_is_read_as_far_as_the_steps_go(
    make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set of the hub that never ends gives as many samples as the steps take."""
    import datasets

    read = []

    def load(name: str, *, split: str, streaming: bool) -> Any:
        for number in range(10**9):
            read.append(number)
            yield {"text": "ab"}

    monkeypatch.setattr(datasets, "load_dataset", load)
    spec = {"streaming": True}
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    data = load_job_data(job(Path("someone/data"), spec, max_steps=2, **sizes), make_tokenizer())

    assert (len(data.samples), data.steps_per_epoch) == (12, 2)
    assert len(read) == 12
    with pytest.raises(JobError, match="needs 'max_steps'"):
        job(Path("someone/data"), spec)


def test_broken_json_names_its_column(make_tokenizer: Any, tmp_path: Path) -> None:
    """The column is that of the line, not one on the line behind it."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "ab"}\n{"text": \n{"text": "ab"}\n')

    with pytest.raises(MalformedRowError, match="Expecting value at column 10") as caught:
        load_job_data(job(path), make_tokenizer())
    assert caught.value.facts["file"] == f"{path}:2"


def test_a_table_that_names_a_column_twice_is_refused(make_tokenizer: Any, tmp_path: Path) -> None:
    """One would hide the other."""
    path = tmp_path / "rows.csv"
    path.write_text("text,text\na,b\n")

    with pytest.raises(DataFileError, match="names the column 'text' twice"):
        load_job_data(job(path), make_tokenizer())


@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=60), length=st.integers(16, 40))
def test_packing_keeps_every_sample_whole_and_no_sequence_too_long(
    lengths: list[int], length: int
) -> None:
    """Each sample stands in one sequence; no two sequences could be one."""
    bins = packed(lengths, length)

    sizes = sorted(sum(lengths[index] for index in own) for own in bins)
    assert sorted(index for own in bins for index in own) == list(range(len(lengths)))
    assert sizes[-1] <= length
    assert len(sizes) == 1 or sizes[0] + sizes[1] > length


def test_batches_count_packed_sequences(make_tokenizer: Any, tmp_path: Path) -> None:
    """Samples that share a sequence are in one micro-batch, each by itself."""
    path = written(tmp_path, *({"text": "a" * size} for size in (7, 3, 4, 2)))
    data = load_job_data(
        job(path, packing=True, max_length=8, per_device_train_batch_size=1), make_tokenizer()
    )

    assert data.units == [(0,), (2, 3), (1,)]
    assert data.steps == 3
    assert "packed into 3 sequences" in data.report.lines()[-1]
