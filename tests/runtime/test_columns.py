"""Which columns make which samples."""

from __future__ import annotations

from typing import Any

import pytest

from tlora_fx.config.job import Job
from tlora_fx.errors import AmbiguousFormatError, MissingColumnError
from tlora_fx.runtime.data.layout import SampleLayout, find_layout


def layout(present: list[str], **fields: Any) -> SampleLayout:
    """The layout of data with these columns."""
    data = {"path": "x.jsonl", **fields}
    job = Job(name="a", base={"model": "m"}, lora={"r": 2}, data=data)
    return find_layout(job, [dict.fromkeys(present, "a")], where="x.jsonl:1")


@pytest.mark.parametrize(
    ("columns", "format", "on_completion"),
    [
        (["prompt", "completion", "id"], "prompt-completion", True),
        (["messages", "prompt"], "messages", True),
        (["text"], "text", False),
    ],
)
def test_the_columns_tell_the_format(columns: list[str], format: str, on_completion: bool) -> None:
    """Our own names need no mapping; the loss is on completions where there are some."""
    found = layout(columns)

    assert (found.format, found.on_completion) == (format, on_completion)


def test_a_mapping_tells_the_format() -> None:
    """A mapped column decides, whatever else the data has."""
    assert layout(["text", "body"], columns={"text": "body"}).columns == {"text": "body"}


def test_columns_of_two_formats_need_a_choice() -> None:
    """Nothing is guessed where two formats fit; naming one is enough."""
    with pytest.raises(AmbiguousFormatError, match="messages and text"):
        layout(["messages", "text"])

    assert layout(["messages", "text"], format="text").format == "text"


@pytest.mark.parametrize("names", [("question", "answer"), ("Prompt", "ANSWER")])
def test_usual_names_are_proposed(names: tuple[str, str]) -> None:
    """GSM8K's columns get the mapping that fits them, and so do names in other letters."""
    with pytest.raises(MissingColumnError) as caught:
        layout([*names])

    assert caught.value.help == f"perhaps columns: {{prompt: {names[0]}, completion: {names[1]}}}"
    assert caught.value.facts["found"] == f"columns {', '.join(sorted(names))}"


def test_a_misspelled_column_gets_the_nearest() -> None:
    """A mapping to a column that is not there names the one that is meant."""
    with pytest.raises(MissingColumnError, match="did you mean 'question'") as caught:
        layout(["question", "answer"], columns={"prompt": "qestion", "completion": "answer"})

    assert "no column 'qestion'" in caught.value.what


def test_plain_text_has_no_completion() -> None:
    """loss_on: completion cannot be had from text."""
    with pytest.raises(MissingColumnError, match="no completion"):
        layout(["text"], loss_on="completion")
