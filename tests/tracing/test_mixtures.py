"""Mixtures of experts, fused, against transformers' own experts wrapped by PEFT alone."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from peft import PeftModel
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from tests.models import (
    MIXTURES,
    assert_equals_peft,
    base_of,
    in_float64,
    job,
    peft_model,
    plain_model,
    ready,
    tokens,
)
from tests.sampled import sampled
from tlora_fx.compiler import compile
from tlora_fx.errors import BaseNotTraceable, JobError, UnknownTarget
from tlora_fx.inspect.listing import make_listing
from tlora_fx.numerics.probe import probe_compiled
from tlora_fx.runtime.adapters.files import (
    adapter_tensors,
    read_adapter,
    start_adapters,
    write_adapter,
)

# Routers and norms of transformers run in float32 in every model dtype.
ROUNDED = 3e-6


def attention_jobs(base, family):
    """Two jobs that adapt attention and leave the experts as they are."""
    targets = [name for name in MIXTURES[family].targets if name != "up_proj"]
    return [
        job("one", base, r=8, target_modules=targets),
        job("two", base, r=3, target_modules=targets[:1], use_rslora=True),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_jobs_on_a_mixture_get_what_each_gets_alone(tmp_path, family, nodes_of):
    """All tokens go through each expert's product once."""
    model = ready(attention_jobs(base_of(tmp_path, family), family))

    assert model.group.form == MIXTURES[family].form
    products = nodes_of(model.group, "expert_linear")
    blocks = {block.name for block in model.group.blocks.values() if block.name != "head"}
    assert {node.meta["role"] for node in products} == {"shared"}
    assert 0 < len(products) <= 2 * len(blocks)
    parts = [tokens([9, 7], seed=1), tokens([6, 12], seed=2)]
    assert_equals_peft(model, parts, ROUNDED)


def expert_jobs(base, family):
    """Both matrices of all experts, one of them, attention beside experts, attention alone."""
    gate, down = "experts.gate_up_proj", "experts.down_proj"
    first, second = MIXTURES[family].targets[:2]
    return [
        job("both", base, r=4, target_modules=[], target_parameters=[gate, down],
            rank_pattern={down: 3}),
        job("one", base, r=4, target_modules=[first], target_parameters=[gate], use_rslora=True),
        job("attention", base, r=3, target_modules=[second]),
    ]  # fmt: skip


@pytest.mark.parametrize("family", sampled(MIXTURES, len(MIXTURES)))
def test_adapters_on_experts_get_what_peft_gives_them(tmp_path, family, nodes_of):
    """By PEFT's names; all jobs' tokens and adapters go through each product once."""
    model = ready(expert_jobs(base_of(tmp_path, family), family))

    assert model.group.form == MIXTURES[family].form
    assert {n.meta["role"] for n in nodes_of(model.group, "expert_linear")} <= {"shared"}
    lowered = nodes_of(model.group, "multi_lora_experts")
    blocks = {block.name for block in model.group.blocks.values() if block.name != "head"}
    assert 0 < len(lowered) <= 2 * len(blocks)
    assert {node.meta["jobs"] for node in lowered} == {("both", "one"), ("both",)}
    assert not any("experts" in note for _, note in model.group.notes)
    parts = [tokens([9, 7], seed=1), tokens([6, 12], seed=2), tokens([5], seed=3)]
    assert_equals_peft(model, parts, ROUNDED)
    assert_loaded_by_peft(model, "both", tmp_path / "adapter")
    assert_starts_by_path(model)
    assert_listed(model)
    found = probe_compiled(model.group, model.backbone, model.jobs)
    assert found.lengths
    assert found.gradient < 1e-4


def assert_loaded_by_peft(model, name, folder):
    """A job's folder gives PEFT the model that the job trained."""
    own = next(own for own in model.jobs if own.name == name)
    trained = adapter_tensors(model.job_parameters(name))
    write_adapter(folder, trained, own.lora_config())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of adapters that lack tensors
        loaded = PeftModel.from_pretrained(plain_model(model), folder)

    ids = torch.tensor([tokens([9], seed=4).sequences[0]])
    expected = peft_model(model, name).eval()(ids).logits
    torch.testing.assert_close(loaded.eval()(ids).logits, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(plain_model(model)(ids).logits, expected, atol=1e-3)
    assert read_adapter(folder).tensors.keys() == trained.keys()


def assert_starts_by_path(model):
    """Equal seeds and ranks give one start, however deep PEFT nests its wrapper."""
    start_adapters(model)
    both, one = model.job_parameters("both"), model.job_parameters("one")
    nested = [name for name in both if name.endswith(".experts.base_layer.lora_A.default.weight")]

    assert nested
    for name in nested:
        assert torch.equal(both[name], one[name.replace(".base_layer", "")])


def assert_listed(model):
    """The listing has each job's rank and numbers at the experts, in the shared operator."""
    rows = [row for block in make_listing(model).blocks for row in block.rows]
    branches = [
        (row.operator, branch)
        for row in rows
        if "experts." in row.module
        for branch in row.branches
    ]
    numbers = Counter()
    for name, tensor in model.job_parameters("both").items():
        numbers[name.partition("lora_")[0]] += tensor.numel()

    assert {operator for operator, _ in branches} == {"multi_lora_experts"}
    assert {(branch.kind, branch.lowered) for _, branch in branches} == {("experts", True)}
    listed = {branch.parameters for _, branch in branches if branch.job == "both"}
    assert listed == set(numbers.values())


def test_passes_keep_the_numbers_of_experts_and_jobs_apart(tmp_path):
    """Checked after each pass, though other tokens send other numbers of them to an expert."""
    base = base_of(tmp_path, "mixtral", num_hidden_layers=1)

    compile(expert_jobs(base, "mixtral")[1:], verify="numerics")


@pytest.mark.parametrize("target", ["experts.up", "input_layernorm.weight"])
def test_a_parameter_that_is_no_matrix_of_experts_is_refused(tmp_path, target):
    """With those that there are."""
    own = job("one", base_of(tmp_path, "qwen3-moe"), target_parameters=[target])

    with pytest.raises(UnknownTarget, match=r"experts\.gate_up_proj"):
        compile([own])


#: Mixtures whose experts PEFT adapts as parameters where a job targets their linears of before.
MOVED = ("qwen3-moe", "mixtral", "olmoe", "deepseek-v3", "glm4-moe", "minimax-m2", "ernie4.5-moe",
         "deepseek-v2", "dots1", "flex-olmo", "qwen3-next", "hunyuan-moe")  # fmt: skip
EXACT = ("qwen3-moe", "olmoe", "deepseek-v3", "glm4-moe", "flex-olmo")


def moved_jobs(base, family):
    """All linears, and a list of the experts' linears as transformers 4 had them."""
    experts = ["w1", "w2", "w3"] if family in ("mixtral", "minimax-m2") else [
        "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    first = MIXTURES[family].targets[0]
    return [
        job("all", base, r=4, target_modules="all-linear"),
        job("listed", base, r=3, lora_alpha=7, target_modules=[first, "gate", *experts],
            use_rslora=True),
    ]  # fmt: skip


@pytest.mark.parametrize("family", sampled(MOVED, len(MOVED)))
def test_targets_among_experts_get_what_peft_makes_of_them(tmp_path, family):
    """Experts at twice the rank for their fused matrix, and the router, by PEFT's names."""
    model = ready(moved_jobs(base_of(tmp_path, family), family))

    assert model.group.form == MIXTURES[family].form
    ranks = {path.rpartition(".")[2]: s.rank for path, s in model.group.jobs[1].sites.items()}
    assert {"gate_up_proj": 6, "down_proj": 3}.items() <= ranks.items()
    assert ("router_logits" in ranks) == (family != "hunyuan-moe")
    noted = [note for _, note in model.group.notes if "as parameters" in note]
    assert len(noted) == 2
    parts = [tokens([9, 7], seed=1), tokens([6, 12], seed=2)]
    assert_equals_peft(model, parts, ROUNDED)
    assert_loaded_by_peft(model, "all", tmp_path / "adapter")


@pytest.mark.parametrize("family", sampled(EXACT, len(EXACT)))
def test_without_rounding_in_float32_a_moved_target_is_peft_s(tmp_path, family, monkeypatch):
    """Losses and gradients, the router's included."""
    base = base_of(tmp_path, family, rms_norm_eps=3e-6)  # no other test traces this one
    in_float64(monkeypatch, family)

    model = ready(moved_jobs(base, family))

    assert_equals_peft(model, [tokens([9, 7], seed=1), tokens([6, 12], seed=2)], 1e-9)


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"target_modules": "all-linear", "lora_dropout": 0.1}, JobError, "leave 'lora_dropout'"),
        ({"target_modules": "all-linear", "use_dora": True}, JobError, "leave 'use_dora' out"),
        ({"target_modules": ["gate_proj", "q_proj"]}, UnknownTarget, "without also targeting up"),
    ],
)
def test_what_peft_cannot_adapt_of_experts_is_refused(tmp_path, fields, kind, words):
    """With the field to leave out, and the linears that can be named."""
    own = job("one", base_of(tmp_path, "qwen3-moe"), **fields)

    with pytest.raises(kind, match=rf"(?s){words}.*\[k_proj, o_proj, q_proj, v_proj\]"):
        compile([own])


PRODUCTS = {
    "method": lambda x, weight: x @ weight.t(),
    "function": lambda x, weight: torch.matmul(x, torch.t(weight)),
    "keyword": lambda x, weight: torch.mm(x, mat2=torch.transpose(weight, dim0=0, dim1=1)),
}


@pytest.fixture(params=sampled(PRODUCTS))
def base_of_another_product(request, tmp_path, monkeypatch):
    """A mixture whose router multiplies in its own way; no other test traces it."""

    class Functional:
        def __getattr__(self, name):
            own = PRODUCTS[request.param]
            return own if name == "linear" else getattr(torch.nn.functional, name)

    monkeypatch.setattr(qwen3_moe, "F", Functional())
    return base_of(tmp_path, "qwen3-moe", rms_norm_eps=5e-6, num_hidden_layers=1)


def test_a_router_whose_product_is_another_one_is_refused_where_it_is_adapted(
    base_of_another_product,
):
    """Its adapter would be left out."""
    adapted = {"target_modules": [], "target_parameters": ["gate.weight"]}

    with pytest.raises(BaseNotTraceable, match=r"otherwise than by F\.linear"):
        compile([job("one", base_of_another_product, **adapted)])


@pytest.mark.slow
def test_a_router_that_no_job_adapts_multiplies_as_it_likes(base_of_another_product):
    """Its weight is what it is."""
    compile([job("one", base_of_another_product, target_modules=["q_proj"])])


def test_a_linear_s_weight_is_adapted_as_a_parameter(tmp_path):
    """Which is what PEFT makes of a router's gate that is a linear."""
    base = base_of(tmp_path, "qwen3-moe")
    model = ready([
        job("one", base, r=3, target_modules=[], target_parameters=["q_proj.weight"]),
        job("two", base, r=2, target_modules=["q_proj"], lora_dropout=0.0),
    ])  # fmt: skip

    assert_equals_peft(model, [tokens([9, 7], seed=1), tokens([6, 12], seed=2)], ROUNDED)
