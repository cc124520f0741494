"""`why_not`: what became of a module, and what would make a pattern match."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models import Plain, base_of, error_of, job
from tlora_fx.compiler import fuse, prepare, resolve_pipeline
from tlora_fx.config.job import BaseSpec
from tlora_fx.errors import UnknownNode
from tlora_fx.pipeline import Runner
from tlora_fx.tools.explain import PatternRecorder, explain_group, render, why_not


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Six jobs of other kinds on a Llama of four layers, compiled once: `asked(node, job)`."""
    base = base_of(tmp_path_factory.mktemp("llama"), "llama", dtype="float32", num_hidden_layers=4)
    queries = {"r": 4, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1}
    jobs = [
        job("plain", base, **queries),
        job("some", base, r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[1, 2]),
        job("dora", base, **{**queries, "use_dora": True}),
        job("head", base, r=2, target_modules=["v_proj"], modules_to_save=["lm_head"]),
        job("embedding", base, r=2, target_modules=["embed_tokens"]),
        job("biased", base, r=2, target_modules=["q_proj"], lora_bias=True),
    ]
    given, record = prepare(jobs), PatternRecorder()
    group = fuse(given, Runner(resolve_pipeline(None), [record]))
    return lambda node, name=None: explain_group(given, group, record, node, name)


def page(explanation):
    """The text, without what changes with the versions of the libraries."""
    text = re.sub(r"( from +)\S.*", r"\1a line of code", render(explanation))
    text = re.sub(r"( at +[^ =]*?)_\d+ = ", r"\1_N = ", text)
    return re.sub(r"\d+ operators", "N operators", text)


def answer(explanation, name):
    return next(found for found in explanation.jobs if found.job == name)


@pytest.mark.parametrize(
    ("node", "file"),
    [
        ("layers.3.mlp.down_proj", "dora.txt"),
        ("layers.1.self_attn.q_proj", "biased.txt"),
        ("lm_head", "head.txt"),
        ("embed_tokens", "embedding.txt"),
        ("layers.2", "layer.txt"),
    ],
)
def test_an_explanation_reads_well(asked, golden, node, file):
    """A page for each kind that is not lowered, and for a module that holds others."""
    golden(f"explain/{file}", page(asked(node)))


def test_a_lowered_branch_fits_both_patterns(asked):
    """The linear's, and the branch's."""
    found = answer(asked("layers.3.mlp.down_proj"), "plain")

    assert found.state == "lowered"
    assert [attempt.fits for attempt in found.attempts] == [True, True]
    assert found.reason == "rank 4, scaling 2, dropout 0.1"


def test_a_branch_that_fits_no_pattern_names_node_and_line(asked):
    """The condition that failed, what is there, where, and what would make it match."""
    found = answer(asked("layers.1.self_attn.q_proj"), "biased")

    frozen, branch = found.attempts
    assert frozen.fits
    assert branch.why == "its B has a bias"
    assert branch.wanted == "the bias of its B is left out, or None"
    assert branch.node.startswith("layers_1_2.")
    assert "its scaled branch is aten.mul.Tensor" in branch.held


def test_an_untargeted_module_says_which_field_leaves_it_out(asked):
    """target_modules, or layers_to_transform."""
    assert (
        answer(asked("layers.0.mlp.up_proj"), "plain").reason == "target_modules: down_proj, q_proj"
    )
    assert answer(asked("layers.0.self_attn.v_proj"), "some").reason == (
        "layers_to_transform leaves it out: 1, 2"
    )


@pytest.mark.parametrize(
    "spelling",
    [
        "layers.2.self_attn.q_proj",
        "model.layers[2].self_attn.q_proj.weight",
        "base_model.model.model.layers.2.self_attn.q_proj.base_layer",
        "model.layers.2.self_attn.q_proj.lora_A.default.weight",
    ],
)
def test_a_layer_may_be_spelled_in_any_way(asked, spelling):
    """As the base, PEFT or Python writes it."""
    assert asked(spelling, "plain").module == "model.layers.2.self_attn.q_proj"


@pytest.mark.parametrize("spelling", ["layers_1_2.mlp.down_proj", "layers.1-2.mlp.down_proj"])
def test_a_folded_layer_stands_for_its_first(asked, spelling):
    """As dumps write it."""
    assert asked(spelling, "plain").module == "model.layers.1.mlp.down_proj"


def test_a_node_is_found_by_its_name(asked):
    """The explanation is of its module."""
    named = answer(asked("layers.1.self_attn.q_proj"), "biased").attempts[1].node

    found = asked(named.partition(" = ")[0], "biased")

    assert found.module == "model.layers.1.self_attn.q_proj"
    assert found.node == named


def test_a_name_that_fits_many_modules_says_so(asked):
    """The first one is explained."""
    found = asked("down_proj", "plain")

    assert found.module == "model.layers.0.mlp.down_proj"
    assert found.others == 3


@pytest.mark.parametrize(
    ("node", "nearest"),
    [("layers.2.mpl.down_proj", "mlp.down_proj"), ("embed_token", "embed_tokens")],
)
def test_a_wrong_name_gets_the_nearest(asked, node, nearest):
    """Of modules."""
    assert nearest in error_of(lambda: asked(node), UnknownNode)


def test_a_name_that_is_near_nothing_gets_what_there_is(asked):
    """Modules that can be asked about."""
    with pytest.raises(UnknownNode) as caught:
        asked("zzz")

    assert "nearest" not in caught.value.facts
    named = caught.value.facts["modules"].partition(" and ")[0].split(", ")
    assert "model.layers.0.self_attn.q_proj" in named
    assert [asked(name).module for name in named] == named


def test_a_wrong_job_gets_the_nearest(asked):
    """And the list of all."""
    text = error_of(lambda: asked("lm_head", "plane"), UnknownNode)

    assert "nearest  plain" in text


def test_dropouts_say_whether_they_are_keyed(asked):
    """Inside the operator, or by themselves in a branch that runs as it is."""
    told = asked("layers.3.mlp.down_proj").dropouts

    assert told == (
        "plain: rate 0.1 inside multi_lora_linear, masks keyed to the job",
        "dora: rate 0.1, masks keyed to the job",
    )


def test_layers_say_what_tells_their_structures_apart(asked):
    """A job that adapts some layers only."""
    first, second = asked("layers.0.mlp").layers

    assert first == "layers.{0,3} ×2: code of block layers_0_3"
    assert second.endswith("job 'some' adapts self_attn.q_proj, self_attn.v_proj there, not here")


def test_a_copy_that_a_job_trains_is_not_shared(asked):
    """The base's node serves the others."""
    assert any("it trains a copy of its own" in told for told in asked("lm_head").sharing)
    assert not any("copy" in told for told in asked("lm_head", "plain").sharing)


class Rounded(nn.Linear):
    """A linear whose weight is made anew at each call, as quantised ones do."""

    def forward(self, x):
        return F.linear(x, torch.round(self.weight * 4) / 4, self.bias)


def test_a_branch_behind_a_computed_weight_is_lowered(golden):
    """No pattern of frozen linears fits the module, so its adapters are added to what it gives."""
    model = Plain(layers=2)
    for layer in model.layers:
        layer.out = Rounded(32, 32)
    base = BaseSpec(module=model.double(), dtype="float64")

    found = why_not([job("one", base, r=4, target_modules=["out"])], "layers.0.out")

    golden("explain/computed-weight.txt", page(found))


def test_trained_biases_of_gpt2(tmp_path, golden):
    """bias: all gives the job a linear of its own, so no branch reads the base's."""
    base = base_of(tmp_path, "gpt2", n_layer=2, resid_pdrop=0.1)
    jobs = [
        job("plain", base, r=4, target_modules=["c_attn"]),
        job("biased", base, r=3, target_modules=["c_attn"], bias="all"),
    ]

    golden("explain/gpt2-biases.txt", page(why_not(jobs, "h.1.attn")))
