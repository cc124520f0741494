"""Bases whose own loss is not that of the next token."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    BartConfig,
    BertConfig,
    BertForTokenClassification,
    GPTNeoConfig,
    MixtralConfig,
)

from tests.models import VOCABULARY, base_of, error_of, job
from tests.sampled import sampled
from tests.silence.losses import OTHER, common, each, with_loss
from tlora_fx.compiler import compile, prepare
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.errors import BaseRefused, OwnLossDiffers
from tlora_fx.model.backbone import load_backbone
from tlora_fx.runtime.data.samples import DataReport, JobData, Sample
from tlora_fx.runtime.trainer import Trainer, TrainerCallback
from tlora_fx.tracing.own_loss import MAX_BATCH, id_rows, require_common_loss, sample_rows

BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "decoder_layers": 2, "encoder_layers": 2,
    "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def test_the_decoder_of_an_encoder_decoder_is_refused(tmp_path):
    """Its labels are shifted before it sees them, so its own loss shifts nothing."""
    named = {"architectures": ["BartForCausalLM"], "is_encoder_decoder": False}
    BartConfig(**BART, **named).save_pretrained(tmp_path)
    one = job("one", BaseSpec(config=tmp_path, dtype="float32"), target_modules=["q_proj"])

    text = error_of(lambda: compile(one), BaseRefused)

    assert "own loss differs by" in text
    assert "nothing is shifted" in text


class Tagger(BertForTokenClassification):
    """A classifier of tokens whose name does not say so."""


@pytest.mark.parametrize(
    ("kind", "told"), [(BertForTokenClassification, "classifier of tokens"), (Tagger, "own loss")]
)
def test_a_model_that_classifies_tokens_is_refused(kind, told):
    """By its name, or since it has a loss of its own kind, and two logits a token."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=VOCABULARY, intermediate_size=48, **sizes)
    base = BaseSpec(module=kind(config), dtype="float32")

    text = error_of(lambda: prepare(job("one", base, target_modules=["query"])), BaseRefused)

    assert told in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sampled(["llama", "gpt2", "gemma2", "phi3-longrope"], 4))
def test_a_causal_model_passes_in_every_dtype(tmp_path, family, dtype):
    """Its own loss is compared and is ours."""
    assert require_common_loss(load_backbone(base_of(tmp_path, family, dtype))) is None


def test_logits_that_are_cast_behind_the_loss_are_known(tmp_path):
    """GPT-Neo takes its loss in float32 and hands on logits in bfloat16."""
    GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48,
        attention_types=[[["global", "local"], 1]],
    ).save_pretrained(tmp_path)  # fmt: skip
    backbone = load_backbone(BaseSpec(config=tmp_path, dtype="bfloat16"))

    assert require_common_loss(backbone) is None


def hand_written(own, **more):
    """A job on the tiny decoder with a loss."""
    return on(BaseSpec(module=with_loss(own), dtype="float64", attention="batch"), "inner", **more)


def on(base, target, **more):
    """A job of one step on a base."""
    lora = {"r": 2, "target_modules": [target]}
    return Job(name="one", base=base, lora=lora, data={"path": "none"}, max_steps=1, **more)


def test_a_job_that_names_its_loss_trains_on_any_base():
    """Its loss is the cross entropy, whatever the base's own code adds."""
    given = prepare(hand_written(OTHER["z-loss"], loss="cross_entropy"))

    assert given.notes == ()


def test_the_error_names_job_row_and_difference():
    """And what to do."""
    text = error_of(lambda: prepare(hand_written(OTHER["label smoothing"])), OwnLossDiffers)

    assert re.search(r"own loss differs by [\d.]+ % on row 1", text)
    assert "job       one" in text
    assert "loss: cross_entropy" in text


def test_a_job_that_learns_of_pairs_has_a_loss_of_its_own():
    """No loss of the base takes part."""
    preferring = hand_written(OTHER["z-loss"], method="orpo")

    assert prepare(preferring).notes == ()


def test_a_loss_that_treats_an_id_of_the_samples_otherwise_is_refused_by_them():
    """No row that is made holds the id as a label: only the job's own do."""

    def loss(m, logits, labels, x):
        twice = bool((labels == 7).any()) and bool((labels == 5).any()) and labels.shape[1] == 6
        return common(logits, labels) * (2 if twice else 1)

    backbone = load_backbone(BaseSpec(module=with_loss(loss), dtype="float64"))
    rows = sample_rows([([1, 7, 2, 5, 3, 4], [1, 7, 2, 5, 3, 4])], 17)

    assert require_common_loss(backbone) is None
    with pytest.raises(OwnLossDiffers, match="on row 1"):
        require_common_loss(backbone, rows)


@given(count=st.integers(1, 3000), vocabulary=st.sampled_from([17, 5000, 32_000, 262_144]))
def test_every_id_that_fits_is_a_target_of_one_line(count, vocabulary):
    """Lines that run together are as long as each other, and hold no more than fits."""
    rows = id_rows("ids", range(count), vocabulary)
    targets = [label for row in rows for line in row.labels for label in line[1:]]

    assert targets == [*range(len(targets))]
    assert len(targets) == count or len(targets) * vocabulary > MAX_BATCH
    assert not any(row.is_padded for row in rows)
    assert all(sum(map(len, row.lines)) * vocabulary <= MAX_BATCH for row in rows)


def test_a_loss_that_weighs_one_of_many_labels_otherwise_is_refused_by_them():
    """It stands in a line that runs beside others."""

    def loss(m, logits, labels, x):
        return (each(logits, labels) * (1 + 1e-3 * (labels[:, 1:] == 300))).mean()

    module = with_loss(loss)
    module.embed, module.head = nn.Embedding(2000, 8), nn.Linear(8, 2000)
    rows = id_rows("labels", range(700), 2000)

    assert [len(row.lines) for row in rows] == [2, 1]
    with pytest.raises(OwnLossDiffers, match="on row 1"):
        require_common_loss(load_backbone(BaseSpec(module=module, dtype="float32")), rows)


def test_training_tells_first_what_could_not_be_compared(tmp_path):
    """A loss that needs numbers which no matrix-free run has, by numpy."""
    said = []

    class Hears(TrainerCallback):
        def warned(self, line):
            said.append(line)

    def loss(m, logits, labels, x):
        return common(logits, torch.from_numpy(labels.numpy().copy()))

    one = hand_written(loss)
    samples = [Sample((1, 2, 3), (1, 2, 3))] * 2
    data = {"one": JobData(one, samples, DataReport())}
    Trainer(compile(one), output=tmp_path, device="cpu", data=data, callback=Hears()).run()

    assert said[0].startswith("the base's own loss was not compared with the cross entropy")


def test_a_loss_that_takes_no_label_of_minus_100_is_told():
    """It is compared on rows without one."""

    def loss(m, logits, labels, x):
        scores = logits[:, :-1].log_softmax(-1)
        return -scores.gather(2, labels[:, 1:, None]).mean()

    note = require_common_loss(load_backbone(BaseSpec(module=with_loss(loss), dtype="float64")))

    assert note.startswith("the base's own loss equals the cross entropy of the next token, but")
    assert "labels of -100" in note


def test_labels_that_hold_the_next_token_already_are_known():
    """As nanoGPT's targets."""

    class Targets(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = with_loss(lambda *_: None)

        def forward(self, idx, targets=None):
            logits = self.inside(idx).logits
            if targets is None:
                return logits, None
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    backbone = load_backbone(BaseSpec(module=Targets(), dtype="float64"))

    assert require_common_loss(backbone) is None


def test_a_mixture_leaves_its_router_loss_out_where_jobs_name_theirs(tmp_path):
    """Its config asks for one."""
    sizes = {"num_local_experts": 2, "intermediate_size": 24, "output_router_logits": True}
    MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, **sizes,
    ).save_pretrained(tmp_path)  # fmt: skip
    base = BaseSpec(config=tmp_path, dtype="float32")

    given = prepare(on(base, "q_proj", loss="cross_entropy"))

    assert given.backbone.config.output_router_logits is False
