"""nano-batch: the structure of the graphs, and that numbers stay."""

from __future__ import annotations

import pytest
import torch

from tests.models import (
    FAMILIES,
    assert_same,
    base_of,
    job,
    mixed_jobs,
    ready,
    restart,
    run_fused,
    tokens,
)
from tests.sampled import sampled
from tlora_fx.compiler import DEFAULT_PIPELINE, compile, run_passes
from tlora_fx.errors import NotNanoBatchable
from tlora_fx.ir.graph import is_call
from tlora_fx.runtime.adapters.files import base_tensors

ops = torch.ops.tlora_fx


def lengths():
    """Seven sequences of three jobs; the second has one of a single token."""
    return [tokens([5, 4, 2], seed=0), tokens([1, 6], seed=1), tokens([9, 3], seed=2)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Jobs on a small Llama: plain LoRA, with dropout, DoRA."""
    base = base_of(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)
    targets = {"target_modules": ["q_proj", "down_proj"]}
    dora = {"target_modules": ["q_proj"], "use_dora": True}
    kinds = (targets, {**targets, "lora_dropout": 0.3}, dora)
    return [job(f"j{place}", base, seed=place, r=3, **kind) for place, kind in enumerate(kinds)]


def in_nano_batches(jobs, options, **how):
    """The jobs' model in nano-batches, with the adapters that `ready` gives."""
    model = compile(list(jobs), f"{DEFAULT_PIPELINE},nano-batch{{{options}}}", **how)
    model.materialize(base_tensors(model.backbone), "cpu")
    restart(model)
    return model


def assert_equal_to_whole_rows(jobs, *options):
    """Losses and gradients are those of rows in one piece."""
    expected = run_fused(ready(jobs), lengths())
    for each in options:
        found = run_fused(in_nano_batches(jobs, each), lengths())
        for own in jobs:
            assert_same(found[own.name], expected[own.name], 1e-12, f"{own.name} {each}")


def test_layers_are_called_once_a_nano_batch(llama):
    """The row is cut once before the layers and joined once behind them."""
    group = run_passes(llama, f"{DEFAULT_PIPELINE},nano-batch{{count=3}}")

    calls = [str(n.target) for n in group.root.nodes if n.op == "call_module"]
    assert calls == ["model.layers.0"] * 3 + ["model.layers.1"] * 3 + ["loss"]
    assert sum(is_call(n, ops.nano_tables.default) for n in group.root.nodes) == 1
    assert sum(is_call(n, ops.nano_join.default) for n in group.root.nodes) == 1


def test_one_nano_batch_changes_nothing(llama):
    """The graph's code stays."""
    texts = [
        compile(list(llama), pipeline).source
        for pipeline in (DEFAULT_PIPELINE, f"{DEFAULT_PIPELINE},nano-batch{{count=1}}")
    ]

    assert texts[0] == texts[1]


def test_numbers_stay_for_dropout_and_branches_that_run_as_they_are(llama):
    """Masks, DoRA and empty nano-batches included."""
    assert_equal_to_whole_rows(llama, "count=2", "count=8")


@pytest.mark.parametrize("family", sampled(["gpt2", "phi3-longrope", "lfm2"]))
def test_numbers_stay_in_every_family(family, tmp_path):
    """Learnt positions, and tables that depend on a job's longest sequence."""
    jobs = mixed_jobs(base_of(tmp_path, family), FAMILIES[family].targets)

    assert_equal_to_whole_rows(jobs, "count=3")


def test_the_pipeline_s_checks_take_the_pass(llama):
    """Structure and numerics, where the layers that run allow it."""
    compile(list(llama), f"{DEFAULT_PIPELINE},nano-batch{{count=2}}", verify="numerics")


def test_padded_rows_are_refused(tmp_path):
    """A base whose attention is not packed."""
    jobs = mixed_jobs(base_of(tmp_path, "bloom"), FAMILIES["bloom"].targets)

    with pytest.raises(NotNanoBatchable, match="padded rows"):
        run_passes(jobs, f"{DEFAULT_PIPELINE},nano-batch{{count=2}}")
