"""A row without tokens, as a process gets where there are more processes than rows."""

from __future__ import annotations

import pytest
import torch

from tests.models import base_of, job
from tlora_fx.compiler import compile
from tlora_fx.cost.plan import Plan
from tlora_fx.model.batch import JobTokens, pack
from tlora_fx.parallel.apply import apply
from tlora_fx.parallel.mesh import open_mesh
from tlora_fx.runtime.adapters.files import base_tensors


@pytest.mark.parametrize("target", ["lm_head", "q_proj"])
def test_a_row_that_nobody_fills_teaches_nothing(tmp_path, target):
    """Also where the head alone is adapted, so that nothing on the way to it learns."""
    base = base_of(tmp_path, "llama", "float32", num_hidden_layers=2)
    model = compile([job("one", base, r=2, target_modules=[target])])
    model.materialize(base_tensors(model.backbone), "cpu")
    plan = Plan(planner="single")
    runner = apply(model, plan, open_mesh(plan.mesh, "cpu"))

    losses = runner.run([pack([JobTokens([], [])])], torch.ones(1, dtype=torch.float64))

    assert losses.tolist() == [0.0]
    assert not any(p.grad.any() for p in model.job_parameters("one").values())
