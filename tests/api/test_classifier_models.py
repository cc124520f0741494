"""A classifier of transformers as the base: its labels are its own, other models are refused."""

from __future__ import annotations

import pytest
import transformers

from tests.api.bases import SHORT, TOKENIZER
from tlora_fx import Job, compile
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import BaseRefused, JobError

DATA = [{"text": "1 + 2", "label": "good"}, {"text": "2 + 2", "label": "bad"}] * 4


def model(kind=transformers.LlamaForSequenceClassification, **fields):
    """A Llama of one layer, of a class of transformers."""
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, **fields,
    )  # fmt: skip
    return kind(config)


def job(base, **fields):
    return Job(
        "a", **SHORT, **{"base": base, "tokenizer": TOKENIZER, "lora": 2, "data": DATA} | fields
    )


def test_a_model_says_its_labels():
    """Names where it has them, else their number; and what it learns."""
    named = BaseSpec(module=model(id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1}))
    assert (named.task, named.labels) == ("SEQ_CLS", ["bad", "good"])
    several = BaseSpec(module=model(num_labels=3, problem_type="multi_label_classification"))
    assert (several.labels, several.objective) == (3, "multi_label_classification")


def test_a_model_has_the_labels_that_it_has():
    """More labels, and another task, are refused."""
    with pytest.raises(JobError, match="the model has 2 labels, and 'labels' 3"):
        job({"module": model(), "labels": 3})
    with pytest.raises(JobError, match="the model is no classifier of sequences"):
        job({"module": model(transformers.LlamaForCausalLM), "task": "SEQ_CLS", "labels": 2})
    with pytest.raises(JobError, match="the model is a classifier of sequences"):
        job({"module": model(), "task": "CAUSAL_LM"})


def test_a_model_of_another_task_is_refused():
    """Its logits would be taken for those of tokens."""
    tags = model(transformers.LlamaForTokenClassification)
    with pytest.raises(BaseRefused, match="this base is a classifier of tokens"):
        compile([job(tags, data=[{"text": "1 + 2"}])])
