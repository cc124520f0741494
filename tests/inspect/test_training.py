"""What a training step costs, against what torch counts while it runs."""

from __future__ import annotations

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.models import FAMILIES, OLD_TRANSFORMERS, base_of, job, mixed_jobs, ready, row_of, tokens
from tlora_fx.inspect.flops import FlopCounter, training_cost
from tlora_fx.model.source import size_names

LENGTH = 12


def odd_jobs(base):
    """Jobs with branches that run as they are, and layers that nothing trains."""
    two = ["q_proj", "v_proj"]
    return [
        job("plain", base, r=8, target_modules=[*two, "down_proj"], layers_to_transform=[1, 2]),
        job("dora", base, r=3, target_modules=two, use_dora=True, layers_to_transform=[2]),
        job("copy", base, r=3, target_modules=["q_proj"], modules_to_save=["lm_head"],
            layers_to_transform=[1]),
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "falcon"])
def test_training_costs_what_torch_counts(family, tmp_path):
    """To the operation: packed and padded rows, odd branches, layers below the first adapter."""
    if family == "falcon" and OLD_TRANSFORMERS:
        pytest.skip("this Falcon's rotary tables grow with lines and tokens, which is told as ?")
    base = base_of(tmp_path, family, dtype="float32")
    jobs = odd_jobs(base) if family == "gemma2" else mixed_jobs(base, FAMILIES[family].targets)
    model = ready(jobs)
    row = row_of(model, [tokens([LENGTH], seed=number) for number in range(len(jobs))])
    with FlopCounterMode(display=False) as counter:
        model(row).sum().backward()
    cost = training_cost(model.group, FlopCounter(model.group.form, size_names(model.group)))
    rows, targets = LENGTH * len(jobs), (LENGTH - 1) * len(jobs)
    found = (cost.token + cost.length * LENGTH) * rows + cost.row

    # The loss takes rows with a target only, and computes its logits again in the backward.
    config = model.backbone.config
    head = 2 * config.hidden_size * config.vocab_size
    own = head * (LENGTH - 1) if family == "gemma2" else 0  # the copy's logits, again
    found += head * (targets - 2 * (rows - targets)) + own - 3 * bool(own) * head

    assert not cost.unknown
    assert counter.get_total_flops() == pytest.approx(found, rel=1e-9)
