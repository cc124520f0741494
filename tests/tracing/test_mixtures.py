"""Mixtures of experts, fused, against transformers' own experts wrapped by PEFT alone."""

from __future__ import annotations

import pytest

from tests.models import MIXTURES, assert_equals_peft, base_of, job, ready, tokens
from tests.sampled import sampled

# Routers and norms of transformers run in float32 in every model dtype.
ROUNDED = 3e-6


def attention_jobs(base, family):
    """Two jobs that adapt attention and leave the experts as they are."""
    targets = [name for name in MIXTURES[family].targets if name != "up_proj"]
    return [
        job("one", base, r=8, target_modules=targets),
        job("two", base, r=3, target_modules=targets[:1], use_rslora=True),
    ]


@pytest.mark.parametrize("family", sampled(MIXTURES, len(MIXTURES)))
def test_jobs_on_a_mixture_get_what_each_gets_alone(tmp_path, family, nodes_of):
    """Their rows are packed, and all tokens go through each expert's product once."""
    model = ready(attention_jobs(base_of(tmp_path, family), family))

    assert model.group.form == "packed"
    products = nodes_of(model.group, "expert_linear")
    blocks = {block.name for block in model.group.blocks.values() if block.name != "head"}
    assert {node.meta["role"] for node in products} == {"shared"}
    assert 0 < len(products) <= 2 * len(blocks)
    parts = [tokens([9, 7], seed=1), tokens([6, 12], seed=2)]
    assert_equals_peft(model, parts, ROUNDED)
