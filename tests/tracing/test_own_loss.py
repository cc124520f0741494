"""Bases whose own loss is not that of the next token."""

from __future__ import annotations

import pytest
from transformers import BartConfig, BertConfig, BertForTokenClassification, GPTNeoConfig

from tests.models import VOCABULARY, base_of, error_of, job
from tlora_fx.compiler import compile, prepare
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import BaseRefused
from tlora_fx.model.backbone import load_backbone
from tlora_fx.tracing.own_loss import refuse_other_loss

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

    assert "own loss is not that of the next token" in text
    assert "nothing is shifted" in text


def test_a_model_that_classifies_tokens_is_refused():
    """It has a loss of its own kind, and two logits a token."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=VOCABULARY, intermediate_size=48, **sizes)
    base = BaseSpec(module=BertForTokenClassification(config), dtype="float32")

    text = error_of(lambda: prepare(job("one", base, target_modules=["query"])), BaseRefused)

    assert "own loss" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "phi3-longrope"])
def test_a_causal_model_passes_in_every_dtype(tmp_path, family, dtype):
    """Its own loss is compared and is ours."""
    assert refuse_other_loss(load_backbone(base_of(tmp_path, family, dtype))) is None


def test_logits_that_are_cast_behind_the_loss_are_known(tmp_path):
    """GPT-Neo takes its loss in float32 and hands on logits in bfloat16."""
    GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48,
        attention_types=[[["global", "local"], 1]],
    ).save_pretrained(tmp_path)  # fmt: skip
    backbone = load_backbone(BaseSpec(config=tmp_path, dtype="bfloat16"))

    assert refuse_other_loss(backbone) is None
