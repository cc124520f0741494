"""`benchmarks.backend_step` times nothing whose gradients are wrong."""

from __future__ import annotations

import pytest
import torch

from benchmarks.backend_step import Job, WrongGradients, distance, peft_model, require_alike
from benchmarks.step_mixes import Shape

SHAPE = Shape(
    layers=1, hidden=32, intermediate=48, heads=4, key_value_heads=2, vocabulary=97, dtype="float32"
)


def test_a_gradient_that_is_wrong_is_named():
    """The adapter that a backend computes wrongly ends the benchmark; rounding does not."""
    model = peft_model(SHAPE, "cpu", 4, "same")
    job = Job(model, torch.arange(24).reshape(2, 12), "same")
    expected = job.gradients(model)
    name = next(name for name in expected if "up_proj.lora_A" in name)
    assert len(expected) == 14
    assert all(gradient.norm() > 0 for gradient in expected.values())

    near = {**expected, name: expected[name] * (1 + 1e-6)}
    far = {**expected, name: expected[name] * 1.1}
    inductor = distance(near, expected)
    require_alike({"inductor": inductor, "tlora-fx": inductor})
    with pytest.raises(WrongGradients, match=r"up_proj\.lora_A"):
        require_alike({"inductor": inductor, "tlora-fx": distance(far, expected)})
