"""Bases that attend by nn.MultiheadAttention, which folds the lines of a padded row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import (
    VOCABULARY,
    assert_equals_peft,
    error_of,
    hand_written,
    ready,
    tokens,
)
from tlora_fx.compiler import compile
from tlora_fx.errors import NotTokenParallel, UnknownTarget


class Attending(nn.Module):
    """A causal model of two layers."""

    def __init__(self, *, lines_first: bool = True, **told: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(AttendingLayer(lines_first, told) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, S, V]."""
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class AttendingLayer(nn.Module):
    """Attention and one linear."""

    def __init__(self, lines_first: bool, told: dict[str, Any]) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(32, 4, batch_first=lines_first)
        self.up = nn.Linear(32, 32)
        self.lines_first, self.told = lines_first, told

    def forward(self, hidden: Tensor) -> Tensor:
        """Both are residual."""
        length = hidden.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=hidden.device), 1)
        x = hidden if self.lines_first else hidden.transpose(0, 1)
        y = self.attn(x, x, x, attn_mask=mask, **self.told)[0]
        hidden = hidden + (y if self.lines_first else y.transpose(0, 1))
        return hidden + torch.tanh(self.up(hidden))


@pytest.mark.parametrize(
    "told",
    [
        {"need_weights": False},
        {"lines_first": False},
        {"need_weights": False, "is_causal": True},
    ],
    ids=str,
)
def test_linears_beside_multihead_attention_train_as_alone(told):
    """With its weights or without, and with lines at either dimension."""
    jobs = hand_written(Attending(**told), targets=("up",))
    other = {"name": "two", "lora": {"r": 8, "target_modules": ["up", "head"]}}
    model = ready([*jobs, jobs[0].model_copy(update=other)])

    assert model.banks.keys() >= {"layers.0.up", "layers.1.up", "head"}
    assert_equals_peft(model, [tokens([5, 3]), tokens([7, 2, 4])], 1e-12)


class Encoding(nn.Module):
    """A causal model of nn.TransformerEncoderLayer."""

    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, S, V]."""
        mask = nn.Transformer.generate_square_subsequent_mask(
            ids.shape[1], device=ids.device, dtype=self.head.weight.dtype
        )
        return self.head(self.layer(self.embed(ids), src_mask=mask, is_causal=True))


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_encoder_layers_train_as_alone(norm_first):
    """Their feed-forward linears are adapted."""
    model = ready(hand_written(Encoding(norm_first=norm_first), targets=("linear1", "linear2")))

    assert_equals_peft(model, [tokens([5, 3])], 1e-12)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"target_modules": ["attn"]}, "layers.0.attn, by target_modules"),
        ({"modules_to_save": ["attn"]}, "layers.0.attn, by modules_to_save"),
        ({"modules_to_save": ["out_proj"]}, "layers.0.attn.out_proj, by modules_to_save"),
        ({"bias": "all"}, "layers.0.attn.out_proj.bias, by bias: all"),
    ],
    ids=str,
)
def test_what_trains_multihead_attention_itself_is_refused(changes, what):
    """PEFT writes adapters into its weights in each forward."""
    (plain,) = hand_written(Attending(), targets=("up",))
    job = plain.model_copy(
        update={"name": "mine", "lora": {"r": 4, "target_modules": ["up"], **changes}}
    )

    text = error_of(lambda: compile([job]), UnknownTarget)

    assert "trains a part of nn.MultiheadAttention" in text
    assert "job       mine\n" in text
    assert what in text


def test_trained_biases_beside_multihead_attention_without_any():
    """Nothing of it is trained, so the others are."""
    base = Attending(need_weights=False)
    for layer in base.layers:
        layer.attn = nn.MultiheadAttention(32, 4, bias=False, batch_first=True)
    (plain,) = hand_written(base, targets=("up",))
    lora = {"r": 4, "target_modules": ["up"], "bias": "all"}
    model = ready([plain.model_copy(update={"lora": lora})])

    assert_equals_peft(model, [tokens([5, 3])], 1e-12)


def test_an_error_about_attention_dropout_says_that_it_must_be_none():
    """An encoder layer of torch drops 0.1 unless it is told otherwise."""
    base = Encoding(norm_first=True)
    base.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    text = error_of(lambda: compile(hand_written(base, targets=("linear1",))), NotTokenParallel)

    assert "attention dropout must be 0" in text
    assert "dropout=0.0" in text


def test_an_adapter_on_its_last_linear_is_reported_as_idle():
    """Its module is never called, with PEFT neither."""
    model = compile(hand_written(Attending(), targets=("out_proj", "up")))

    notes = [text for by, text in model.group.notes if by == "adapters"]
    assert len(notes) == 1
    assert "the loss does not depend on adapters of layers.0.attn.out_proj" in notes[0]
