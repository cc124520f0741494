"""The noise of a base, and what it lets pass."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models import SIZES, VOCABULARY, Plain
from tlora_fx.numerics.noise import FACTOR, base_noise, lifted, rounding_unit

DRAW = random.Random(0)
LINES = [[DRAW.randrange(VOCABULARY) for _ in range(length)] for length in (12, 21, 5)]


def llama() -> nn.Module:
    """In float64; its norms and its eager softmax compute in float32."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager")).double()


@pytest.mark.parametrize(
    ("noise", "passes"),
    [(0.0, 1e-6), (1e-8, 1e-6), (1e-6, FACTOR * 1e-6), (4e-5, 5e-5), (6e-5, 1e-6)],
    ids=["none", "little", "some", "much", "no-rounding"],
)
def test_noise_lifts_a_floor_up_to_a_ceiling_and_not_from_beyond_it(noise, passes):
    """A base that moves by more than the ceiling is not excused."""
    assert lifted(1e-6, noise, 5e-5) == passes


def test_noise_that_is_no_number_lifts_nothing():
    """A base that gives NaN is held to the floor."""
    assert lifted(1e-6, float("nan"), 5e-5) == 1e-6


def test_float32_inside_a_float64_base_is_found():
    """transformers' softmax rounds to float32 whatever the weights are."""
    base = llama()
    noise = base_noise(base, LINES, [base.lm_head.weight])

    assert 1e-9 < noise.logits < 1e-6
    assert 1e-9 < noise.gradients < 1e-6
    assert rounding_unit(base, LINES[0]) == torch.finfo(torch.float32).eps


def test_a_base_that_is_float64_throughout_hardly_moves():
    """Nothing lifts a bound that was made for float64."""
    base = Plain(layers=2).double()
    noise = base_noise(base, LINES, list(base.parameters()))

    assert noise.logits < 1e-14
    assert noise.gradients < 1e-13
    assert rounding_unit(base, LINES[0]) == torch.finfo(torch.float64).eps


class LengthScaled(Plain):
    """A model that divides by the length of the padded line."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits that depend on S."""
        return self.head(self.embed(ids) / ids.shape[1])


def test_another_result_is_more_than_noise():
    """What depends on the width of a batch lies far beyond any rounding."""
    assert base_noise(LengthScaled(), LINES).logits > 0.1


def test_a_base_keeps_its_modes():
    """Some of its modules may be frozen in evaluation mode."""
    base = Plain(layers=1, rate=0.5).train()
    base.layers[0].norm.eval()

    assert base_noise(base, LINES).logits < 1e-5
    assert base.layers[0].drop.training
    assert not base.layers[0].norm.training
