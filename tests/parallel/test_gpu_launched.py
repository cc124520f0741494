"""On a GPU: what is said of a model without running it is what capturing it comes to."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.test_gpu_row_graphs import WIDE, loaded
from tests.parallel.test_row_graphs import row_of
from tests.runtime.groups import tiny_base
from tlora_fx.cost.facts import why_launched
from tlora_fx.parallel.cuda_graphs import RowGraphs

pytestmark = pytest.mark.gpu
CASES = {
    "plain": ("bfloat16", {}, {}),
    "float16": ("float16", {}, {}),
    "float32": ("float32", {}, {}),
    "dora": ("bfloat16", {}, {"use_dora": True, "lora_dropout": 0.0}),
    "dora with dropout": ("bfloat16", {}, {"use_dora": True, "lora_dropout": 0.1}),
    "bias": ("bfloat16", {}, {"lora_bias": True}),
    "module of its own": ("bfloat16", {}, {"modules_to_save": ["lm_head"]}),
    "head": ("bfloat16", {"vocab_size": 64}, {"target_modules": ["q_proj", "lm_head"]}),
    "attention dropout": ("bfloat16", {"attention_dropout": 0.1}, {}),
    "odd width": ("bfloat16", {"intermediate_size": 40}, {}),
    "odd width, not adapted": (
        "bfloat16",
        {"intermediate_size": 40},
        {"target_modules": ["q_proj"]},
    ),
    "wide heads": ("bfloat16", {"hidden_size": 528, "num_attention_heads": 2}, {}),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_is_said_to_be_captured_is(tmp_path, monkeypatch, name, compiled):
    """And what is not reads a table on the host, or meets one for the first time."""
    monkeypatch.delenv("TLORA_FX_KERNELS", raising=False)
    dtype, sizes, lora = CASES[name]
    model, mesh = loaded(tiny_base(tmp_path, dtype, **(WIDE | sizes)), compiled, **lora)
    graphs, weights = RowGraphs(model, mesh.device, 256), torch.ones(3, device="cuda")

    for _ in range(3):
        graphs.run(row_of(1), weights)

    launched = why_launched(model.group)
    assert bool(graphs.keys) is (not launched)
    assert ("TableNotOnDevice" in graphs.refused) is bool(launched)
