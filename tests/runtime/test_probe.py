"""The probe before training in batch form: causal models pass, others are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.models import (
    FAMILIES,
    Plain,
    assert_equals_peft,
    base_of,
    error_of,
    job,
    ready,
    tokens,
)
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import BatchFormUnsafe
from tlora_fx.runtime.checks import probe_batch_form

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def model_of(module: nn.Module, dtype: str = "float64", targets=("out",)):
    """A job on a hand-written module."""
    base = BaseSpec(module=module.to(DTYPES[dtype]), dtype=dtype)
    return ready([job("one", base, r=2, target_modules=list(targets), lora_dropout=0.2)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_causal_model_passes(dtype):
    """Masked attention, in every width; dropout does not disturb the probe."""
    probe_batch_form(model_of(Plain(layers=2, rate=0.1), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ahead", [1, 99])
def test_a_model_that_looks_ahead_is_refused(dtype, ahead):
    """One token ahead is enough, also where weights are small and numbers short."""
    model = model_of(Plain(layers=2, ahead=ahead), dtype)

    assert "later tokens" in error_of(lambda: probe_batch_form(model), BatchFormUnsafe)


class LengthScaled(Plain):
    """A model that divides by the length of the padded line."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits that depend on S."""
        hidden = self.embed(ids) / ids.shape[1] ** 0.5
        return self.head(hidden + self.layers[0].out(hidden))


def test_a_model_that_sees_padding_is_refused():
    """A longer neighbour pads every line; what computes with that length is caught."""
    model = model_of(LengthScaled(layers=2))

    assert "padding behind it" in error_of(lambda: probe_batch_form(model), BatchFormUnsafe)


def test_transformers_own_causal_attention_passes_over_padded_lines(tmp_path):
    """A Llama that is told to run padded."""
    base = base_of(tmp_path, "llama", "float32", num_hidden_layers=2, attention="batch")
    model = ready([job("one", base, r=2, target_modules=["q_proj"])])

    assert model.group.form == "batch"
    probe_batch_form(model)


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_transformers_padded_equals_peft(tmp_path, family):
    """Batch form on request: windows and positions as the model's own code has them."""
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    base = base_of(tmp_path, family, attention="batch", **{layers: 2})
    targets = list(FAMILIES[family].targets)
    jobs = [job("one", base, r=2, target_modules=targets), job("two", base, target_modules=targets)]

    model = ready(jobs)

    assert model.group.form == "batch"
    assert_equals_peft(model, [tokens([9, 7], seed=1), tokens([6], seed=2)], 3e-6)
