"""Columns that some rows have: read in whatever row they stand, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import UNMARKED
from tlora_fx.config.job import Job
from tlora_fx.errors import (
    ChatTemplateError,
    JobError,
    MalformedRowError,
    MissingColumnError,
    UnreadColumnError,
)
from tlora_fx.runtime.data.layout import WINDOW
from tlora_fx.runtime.data.samples import DataReport, load_job_data

#: Prints the names of tools before the messages.
WITH_TOOLS = "{% for t in tools or [] %}{{ t.function.name }}.{% endfor %}" + UNMARKED
TOOLS = [{"type": "function", "function": {"name": "add"}}]
ASKED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SYSTEM = UNMARKED.replace(
    "'<|' + m.role + '|>'", "'S:' if m.role == 'system' else '<|' + m.role + '|>'"
)

Shown = Callable[..., tuple[list[str], DataReport]]


@pytest.fixture
def shown(make_tokenizer: Any, tmp_path: Path) -> Shown:
    """Reads rows: the samples, trained tokens in brackets, and the report."""

    def show(
        *rows: object, template: str | None = None, data: dict[str, Any] | None = None, **job: Any
    ) -> tuple[list[str], DataReport]:
        path, tokenizer = tmp_path / "rows.jsonl", make_tokenizer(template)
        path.write_text("\n".join(map(json.dumps, rows)))
        spec = {"path": str(path), **(data or {})}
        loaded = load_job_data(
            Job(name="a", base={"model": "m"}, lora={"r": 2}, data=spec, **job), tokenizer
        )
        samples = []
        for sample in loaded.samples:
            tokens = tokenizer.convert_ids_to_tokens(list(sample.input_ids))
            pairs = zip(tokens, sample.labels, strict=True)
            text = "".join(t if label < 0 else f"[{t}]" for t, label in pairs)
            samples.append(text.replace("][", ""))
        return samples, loaded.report

    return show


def test_an_input_is_read_in_whatever_row_it_stands(shown: Shown) -> None:
    """Alpaca's first row has none."""
    samples, _ = shown(
        {"instruction": "a", "output": "b"}, {"instruction": "c", "input": "dog", "output": "d"}
    )

    assert samples[1] == "c\n\ndog\n\n[d</s>]"


def test_a_prompt_is_read_in_whatever_row_it_stands(shown: Shown) -> None:
    """The first pair has none."""
    samples, _ = shown(
        {"chosen": "Q: yes", "rejected": "Q: no"},
        {"prompt": "Q: b A:", "chosen": "y", "rejected": "n"},
        method="dpo",
    )

    assert samples[2] == "Q: b A:[y</s>]"


@pytest.mark.parametrize("before", [1, WINDOW + 1])
def test_tools_are_read_in_whatever_row_they_stand(shown: Shown, before: int) -> None:
    """Also behind the rows from which the format is found."""
    rows = [{"messages": ASKED}] * before
    samples, _ = shown(*rows, {"messages": ASKED, "tools": TOOLS}, template=WITH_TOOLS)

    assert samples[-1] == "add.<|user|>q<|assistant|>[a</s>]"


def test_columns_that_are_null_in_each_row_tell_no_format(shown: Shown) -> None:
    """Columnar files have a column in each row if one row of another file had it."""
    samples, _ = shown({"text": "a", "messages": None}, {"text": "b", "messages": None})

    assert samples == ["[a</s>]", "[b</s>]"]


def test_each_column_that_is_not_read_is_named_once(shown: Shown) -> None:
    """Also one of a later row."""
    _, report = shown({"text": "a", "id": 1}, {"text": "b", "id": 2, "source": "web"})

    assert "columns that are not read: id, source" in report.lines()


@pytest.mark.parametrize("name", ["weight", "mask", "loss_mask", "train", "label", "Loss-Weight"])
def test_a_column_that_looks_as_if_it_governed_is_refused(shown: Shown, name: str) -> None:
    """In whatever row it stands; null maps it to nothing, and then it is not read."""
    rows = [{"text": "a"}, {"text": "b", name: 0}]
    with pytest.raises(
        UnreadColumnError, match=f"'{name}' looks as if it said what is trained"
    ) as e:
        shown(*rows)
    assert str(e.value.facts["file"]).endswith("rows.jsonl:2")
    assert f"columns: {{{name}: null}}" in e.value.help

    samples, report = shown(*rows, data={"columns": {name: None}})
    assert (samples, report.unread) == (["[a</s>]", "[b</s>]"], ())


def test_a_governing_column_that_is_null_is_no_error(shown: Shown) -> None:
    """It says nothing of the row."""
    assert shown({"text": "a", "weight": None})[0] == ["[a</s>]"]


def test_rows_of_kto_are_refused_by_sft(shown: Shown) -> None:
    """Half of their completions are not wanted."""
    with pytest.raises(UnreadColumnError, match="rows are of KTO"):
        shown({"prompt": "a", "completion": "b", "label": False})


def test_labels_beside_preferences_are_not_refused(shown: Shown) -> None:
    """A pair says itself which of the two is wanted."""
    _, report = shown({"prompt": "a", "chosen": "b", "rejected": "c", "label": 1}, method="dpo")

    assert report.unread == ("label",)


def test_a_mapped_column_that_no_row_has_is_refused(shown: Shown) -> None:
    """A misspelled optional column would be left out in silence."""
    with pytest.raises(MissingColumnError, match="did you mean 'context'") as caught:
        shown(
            {"instruction": "a", "context": "b", "output": "c"},
            data={"columns": {"input": "contxt"}},
        )
    assert "no column 'contxt'" in caught.value.what


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": ASKED}, "S:sys<|user|>h<|assistant|>[i</s>]<|user|>q<|assistant|>[a</s>]"),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "S:sys<|user|>h<|assistant|>[i</s>]<|user|>q<|assistant|>[a</s>]",
        ),
        (
            {"instruction": "q", "output": "a"},
            "S:sys<|user|>h<|assistant|>[i</s>]<|user|>q<|assistant|>[a</s>]",
        ),
        (
            {"prompt": "q", "completion": "a"},
            "S:sys<|user|>h<|assistant|>i</s><|user|>q<|assistant|>[a</s>]",
        ),
        (
            {"prompt": ASKED[:1], "completion": ASKED[1:]},
            "S:sys<|user|>h<|assistant|>i</s><|user|>q<|assistant|>[a</s>]",
        ),
    ],
)
def test_a_system_and_a_history_stand_before_each_format(
    shown: Shown, row: dict[str, Any], expected: str
) -> None:
    """As in LLaMA-Factory, what a history's responses say is trained, but for a prompt's."""
    samples, _ = shown({**row, "system": "sys", "history": [["h", "i"]]}, template=SYSTEM)

    assert samples == [expected]


@pytest.mark.parametrize("asked", ["q", ASKED[:1]])
def test_a_system_stands_before_pairs(shown: Shown, asked: object) -> None:
    """Texts become turns of an exchange."""
    sides = {"chosen": "y", "rejected": "n"}
    if isinstance(asked, list):
        sides = {name: [{"role": "assistant", "content": text}] for name, text in sides.items()}  # type: ignore[misc]
    samples, _ = shown({"prompt": asked, "system": "s", **sides}, template=SYSTEM, method="dpo")

    assert samples == [f"S:s<|user|>q<|assistant|>[{each}</s>]" for each in "yn"]


def test_an_empty_system_is_none(shown: Shown) -> None:
    """LLaMA-Factory's files have it in each row; plain prompts stay plain."""
    samples, _ = shown({"prompt": "q", "completion": "a", "system": "", "history": []})

    assert samples == ["q[a</s>]"]


def test_a_system_needs_a_chat_template(shown: Shown) -> None:
    """Before a plain prompt it has no place."""
    with pytest.raises(ChatTemplateError):
        shown({"prompt": "q", "completion": "a", "system": "s"})


def test_a_first_system_behind_the_first_rows_is_refused(shown: Shown) -> None:
    """Plain prompts before it were no turns of a chat."""
    rows = [{"prompt": "q", "completion": "a"}] * (WINDOW + 1)
    with pytest.raises(MalformedRowError, match="none of the first rows has"):
        shown(*rows, {"prompt": "q", "completion": "a", "system": "s"}, template=SYSTEM)


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        ({"history": [["h"]]}, "turn 1 of the column 'history' is no pair"),
        ({"history": "h"}, "is no pair"),
        ({"system": 3}, "'system' holds int"),
        ({"loss_mask": [1]}, "not a 0 or 1 for each of 4 messages"),
        ({"loss_mask": [1, 1, 0, 1]}, "asks to train message 1"),
    ],
)
def test_columns_that_cannot_be_followed_are_refused(
    shown: Shown, beside: dict[str, Any], reason: str
) -> None:
    """With the row."""
    with pytest.raises(MalformedRowError, match=reason):
        shown({"messages": ASKED * 2, **beside}, template=SYSTEM)


def test_a_loss_mask_says_which_turns_are_trained(shown: Shown) -> None:
    """A 0 or 1 for each message; a history before them has its own turns."""
    row = {"messages": ASKED * 2, "loss_mask": [0, 0, 0, 1]}
    assert shown(row, template=SYSTEM)[0] == [
        "<|user|>q<|assistant|>a</s><|user|>q<|assistant|>[a</s>]"
    ]
    [text], _ = shown({**row, "system": "s", "history": [["h", "i"]]}, template=SYSTEM)
    assert text.startswith("S:s<|user|>h<|assistant|>[i</s>]<|user|>q<|assistant|>a")


def test_two_systems_of_a_row_are_refused(shown: Shown) -> None:
    """One would hide the other; the same twice is one."""
    own = [{"role": "system", "content": "s"}, *ASKED]
    assert shown({"messages": own, "system": "s"}, template=SYSTEM)[0][0].count("S:") == 1
    with pytest.raises(MalformedRowError, match="two systems"):
        shown({"messages": own, "system": "other"}, template=SYSTEM)
    columns = {"columns": {"system": None}}
    [text], _ = shown({"messages": own, "system": "other"}, template=SYSTEM, data=columns)
    assert text.startswith("S:s<")


def test_tokens_are_trained_as_they_are(shown: Shown) -> None:
    """No end is added, padding is dropped, and all of labels and masks count."""
    row = {"input_ids": [0, 4, 5, 6, 1], "labels": [-100, -100, 5, 6, 1]}
    samples, report = shown(row)
    assert samples == ["<s>a[bc</s>]"]
    assert report.layout == "read as tokens (input_ids, labels); trained on what labels say"

    masked = {**row, "completion_mask": [0, 0, 0, 1, 1], "attention_mask": [0, 1, 1, 1, 0]}
    assert shown(masked)[0] == ["ab[c]"]
    assert shown(row, data={"loss_on": "all"})[0] == shown({"input_ids": row["input_ids"]})[0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [4, 5], "labels": [5, 6]}, "labels are not shifted"),
        ({"input_ids": [4, 5], "labels": [4]}, "'labels' has 1 numbers"),
        ({"input_ids": [4, "b"]}, "no list of whole numbers"),
        ({"input_ids": []}, "'input_ids' is empty"),
        ({"input_ids": [4, -1]}, "is no token"),
        ({"input_ids": [4, 5, 6], "attention_mask": [1, 0, 1]}, "hides tokens"),
        ({"input_ids": [4, 5], "loss_mask": [1, 2]}, "not a 0 or 1"),
    ],
)
def test_tokens_that_make_no_sample_are_refused(
    shown: Shown, row: dict[str, Any], reason: str
) -> None:
    """With the column."""
    with pytest.raises(MalformedRowError, match=reason):
        shown(row)


def test_null_is_only_of_columns_that_are_not_read() -> None:
    """A name that no format knows is told when it is mapped to something."""
    with pytest.raises(JobError, match="did you mean 'prompt'"):
        Job(
            name="a",
            base={"model": "m"},
            lora={"r": 2},
            data={"path": "x", "columns": {"promt": "q"}},
        )
