"""`int8-base`: how far weights move, what is stored, and that training goes on."""

import pytest
import torch
from tlora_fx_extension.int8_base import int8_scales, int8_values

import tlora_fx
from tlora_fx.compiler import resolve_pipeline
from tlora_fx.model.batch import JobTokens, pack
from tlora_fx.pipeline import find_pass
from tlora_fx.runtime.adapters.files import base_tensors, start_adapters
from tlora_fx.testing import around, assert_equivalent

ADDED = "int8-base@after:lower-adapters"


def test_a_weight_moves_by_half_a_step_at_most():
    """A row of zeros stays one."""
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    scales = int8_scales(weight)

    moved = (int8_values(weight) * scales - weight).abs()

    assert bool((moved <= scales / 2 + 1e-7).all())
    assert not moved[3].any()


def test_it_declares_that_numbers_change(jobs):
    """And they do: the pass tells the truth."""
    before, after = around(jobs, ADDED)

    assert find_pass("int8-base").preserves_numerics == "no"
    with pytest.raises(AssertionError, match="differs by"):
        assert_equivalent(before, after)


def test_the_model_stores_int8_and_trains(jobs):
    """Frozen matrices of layers are int8 and scales; every adapter gets a gradient."""
    model = tlora_fx.compile(jobs, resolve_pipeline(None, [ADDED]))
    model.materialize(base_tensors(model.backbone), "cpu")
    start_adapters(model)
    layer = dict(model.net.get_submodule("model.layers.0").named_buffers())
    tokens = [JobTokens([[3, 5, 7, 9]], [[3, 5, 7, 9]], seed=place) for place in range(2)]

    model(pack(tokens)).sum().backward()

    assert layer["self_attn.q_proj.weight_int8"].dtype == torch.int8
    assert not [name for name, _ in model.named_parameters() if name.endswith("q_proj.weight")]
    for job in jobs:
        ups = [p for name, p in model.job_parameters(job.name).items() if "lora_B" in name]
        assert all(bool(parameter.grad.any()) for parameter in ups)
