"""Texts with labels: what rows are read as, and what a classifier's job measures and saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import FAMILIES, error_of, save_config
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.errors import MalformedRowError, MissingColumnError
from tlora_fx.runtime.data.labels import decoded, label_code
from tlora_fx.runtime.data.samples import load_job_data

NAMES = {"task": "SEQ_CLS", "labels": ["bad", "good"], "dtype": "float32"}


def codes(values: list[Any], base: BaseSpec) -> np.ndarray:
    """Labels as integers."""
    return np.array([label_code(value, base) for value in values], dtype=np.int64)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_a_number_is_itself_again(numbers):
    """To the bit of a float32, also -100, which stands for no label among tokens."""
    base = BaseSpec(model="m", task="SEQ_CLS", labels=1)
    found = codes([*numbers, -100.0], base)

    assert -100 not in found
    assert decoded(found, base).tolist() == [*numbers, -100.0]


def test_labels_are_named_numbered_or_marked():
    """By name, by number as text or not; of several by names, in a list or in text, or by marks."""
    one = BaseSpec(model="m", task="SEQ_CLS", labels=["bad", "good"])
    many = one.model_copy(update={"problem_type": "multi_label_classification"})

    assert codes(["good", " bad", 1, "0", True], one).tolist() == [1, 0, 1, 0, 1]
    marks = decoded(codes([["good"], "bad,good", [1, 0], []], many), many)
    assert marks.tolist() == [[0, 1], [1, 1], [1, 0], [0, 0]]


@pytest.mark.parametrize("value", ["fair", 2, -1, 0.5, None, "", [0]])
def test_a_label_that_is_none_is_told(value):
    """With the names that there are."""
    base = BaseSpec(model="m", task="SEQ_CLS", labels=["bad", "good"])

    assert "none of 2: bad, good" in error_of(lambda: label_code(value, base), ValueError)


def classifying(tmp_path: Path, rows: list[Any], **fields: Any) -> Job:
    """A job over rows in a file."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {"config": save_config(tmp_path, "llama", pad_token_id=1), **NAMES}
    lora = {"r": 2, "target_modules": list(FAMILIES["llama"].targets)}
    return Job(name="a", base=base, lora=lora, data={"path": str(path)}, **fields)


def test_a_label_stands_at_the_last_token_that_is_no_padding(tmp_path, make_tokenizer):
    """The texts are as the tokenizer makes and cuts them; `</s>` is the config's padding here."""
    rows = [{"text": "ab", "label": "good"}, {"text": "abcdefgh", "label": "bad"}]
    job = classifying(tmp_path, rows, max_length=6)
    data = load_job_data(job, make_tokenizer(adds_bos=True, adds_eos=True))

    assert [len(sample.input_ids) for sample in data.samples] == [4, 6]
    assert [sample.labels for sample in data.samples] == [
        (-100, -100, 1, -100),
        (-100, -100, -100, -100, 0, -100),
    ]
    assert (data.report.truncated, data.report.target_tokens) == (1, 2)


@pytest.mark.parametrize(
    ("row", "kind", "words"),
    [
        ({"text": "ab", "label": "fair"}, MalformedRowError, "none of 2: bad, good"),
        ({"text": 3, "label": "bad"}, MalformedRowError, "no text"),
        ({"text": "ab", "class": "bad"}, MissingColumnError, "columns: {text: text, label: class}"),
    ],
)
def test_a_row_without_a_label_is_refused(tmp_path, make_tokenizer, row, kind, words):
    """With its line, or with the column that may be meant."""
    job = classifying(tmp_path, [row])

    assert words in error_of(lambda: load_job_data(job, make_tokenizer()), kind)


@pytest.mark.slow
def test_a_classifier_trains_is_measured_and_loads_into_transformers(tmp_path, make_tokenizer):
    """Its accuracy is what PEFT and transformers find by the folder that it leaves."""
    import torch
    from peft import PeftModel

    from tlora_fx.compiler import compile
    from tlora_fx.runtime.adapters.files import plain_base
    from tlora_fx.runtime.trainer import Trainer

    make_tokenizer(adds_bos=True).save_pretrained(tmp_path / "llama")
    rows = [
        {"text": "abc" * (1 + index % 4) + "xyz"[index % 2], "label": NAMES["labels"][index % 2]}
        for index in range(24)
    ]
    held_out = {"path": str(tmp_path / "rows.jsonl")}
    job = classifying(tmp_path, rows, max_steps=4, learning_rate=1e-2, eval_data=held_out)
    trainer = Trainer(compile([job]), output=tmp_path / "out", device="cpu")
    trainer.run()
    last = json.loads((tmp_path / "out" / "a" / "metrics.jsonl").read_text().splitlines()[-1])

    model = PeftModel.from_pretrained(
        plain_base(trainer.model.backbone).float(), tmp_path / "out" / "a"
    ).eval()
    data = load_job_data(job, make_tokenizer(adds_bos=True))
    right = 0
    for sample in data.samples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sample.input_ids])).logits
        right += int(logits.argmax()) == sample.labels[-1]
    assert type(model.get_base_model()).__name__ == "LlamaForSequenceClassification"
    assert last["eval_accuracy"] == pytest.approx(right / len(rows))
