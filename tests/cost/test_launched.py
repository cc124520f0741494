"""Models whose operators no CUDA graph can hold, and what is predicted of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cost.facts import load, row
from tests.models import FAMILIES, base_of, job
from tests.parallel.graph_times import with_graphs
from tests.sampled import sampled
from tlora_fx.compiler import compile
from tlora_fx.cost.facts import facts_of, why_launched
from tlora_fx.cost.hardware import GPUS
from tlora_fx.cost.plan import Plan
from tlora_fx.cost.profile_sources import roofline_profile
from tlora_fx.cost.step_time import CostModel

TARGETS = ["q_proj", "down_proj"]
BRANCHES = ("segment_read", "segment_write")
DROPPING = ("keyed_dropout", *BRANCHES)
MODELS = {
    "dora with dropout": ({}, {"use_dora": True, "lora_dropout": 0.1}, DROPPING),
    "plain": ({}, {}, ()),
    "dropout": ({}, {"lora_dropout": 0.1}, ()),
    "dora": ({}, {"use_dora": True}, ()),
    "bias of its own": ({}, {"lora_bias": True}, BRANCHES),
    "module of its own": ({}, {"modules_to_save": ["lm_head"]}, BRANCHES),
    "head": ({"vocab_size": 64}, {"target_modules": ["lm_head"]}, ()),
    "attention dropout": ({"attention_dropout": 0.1}, {}, ("packed_attention",)),
    "width without kernels": ({"intermediate_size": 40}, {"target_modules": ["up_proj"]},
                              ("multi_lora_linear",)),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(MODELS, len(MODELS)))
def test_a_model_says_what_no_graph_can_hold(tmp_path, name):
    """By the operators that jobs' own parts are made of."""
    sizes, lora, expected = MODELS[name]
    base = base_of(tmp_path, "llama", dtype="bfloat16", num_hidden_layers=2, **sizes)
    given = {"target_modules": TARGETS} | lora

    found = facts_of(compile([job("one", base, **given)]))

    assert found.launched == expected
    assert found.captures is (not expected)


@pytest.mark.parametrize(
    ("family", "sizes", "expected"),
    sampled(
        [
            ("gemma2", {"num_hidden_layers": 1}, ("packed_attention",)),
            ("gpt2", {"n_layer": 1}, ()),
            ("bloom", {"n_layer": 1}, ("batch form",)),
            ("phi3-longrope", {"num_hidden_layers": 1}, ("segment_switch",)),
            ("qwen3", {"num_hidden_layers": 1}, ()),
        ],
        5,
    ),
)
def test_a_base_may_keep_all_its_jobs_from_it(tmp_path, family, sizes, expected):
    """Capped scores, tables chosen by length, padded batches."""
    base = base_of(tmp_path, family, dtype="bfloat16", **sizes)
    targets = list(FAMILIES[family].targets)

    assert facts_of(compile([job("one", base, target_modules=targets)])).launched == expected


def test_rows_with_adapters_on_the_head_may_be_captured(tmp_path):
    """No operator of theirs reads a table of jobs on the host."""
    base = base_of(tmp_path, "llama", dtype="bfloat16", num_hidden_layers=1, vocab_size=64)
    group = compile([job("one", base, target_modules=["q_proj", "lm_head"])]).group

    assert why_launched(group) == ()


def test_one_job_keeps_its_group_from_it(tmp_path):
    """As one graph for all of them would hold the branch too."""
    base = base_of(tmp_path, "llama", dtype="bfloat16", num_hidden_layers=2)
    plain, dora = (
        job(name, base, target_modules=TARGETS, lora_dropout=0.1, use_dora=name == "dora")
        for name in ("plain", "dora")
    )

    assert facts_of(compile([plain])).captures
    assert facts_of(compile([plain, dora])).launched == DROPPING


def test_adapters_that_compute_in_float32_have_no_kernels(tmp_path):
    """Nor have those on a base in float32."""
    base = base_of(tmp_path, "llama", dtype="bfloat16", num_hidden_layers=2)
    one = job("one", base, target_modules=TARGETS)
    wide = one.model_copy(update={"adapter_compute": "float32"})

    assert facts_of(compile([wide])).launched == ("multi_lora_linear",)


def test_rows_of_such_a_model_cost_what_launching_them_costs(tmp_path):
    """Whatever the plan and the profile know of graphs."""
    base = base_of(tmp_path, "llama", dtype="bfloat16", num_hidden_layers=2)
    facts = facts_of(compile([job("one", base, target_modules=TARGETS)]))
    plain = roofline_profile(GPUS["h200"], facts).model_copy(update={"source": "measured"})
    profile, plan, given = with_graphs(plain), Plan(planner="test"), load(512, jobs=1)
    launched = replace(facts, launched=("segment_read",))

    assert plan.captures
    before = row(CostModel(facts, plain), plan, given)
    assert row(CostModel(facts, profile), plan, given) == pytest.approx(before)
    assert row(CostModel(launched, profile), plan, given) > 1.5 * before
