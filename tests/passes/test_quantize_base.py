"""`quantize-base`: what is stored, what stays, and that jobs train on it as PEFT would."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.models import (
    assert_same,
    error_of,
    hand_written,
    peft_model,
    restart,
    run_alone,
    run_fused,
    tokens,
)
from tests.quantised import decoded
from tlora_fx.compiler import prepare, resolve_pipeline, run_passes
from tlora_fx.errors import BaseRefused, MissingPackageError, PipelineError
from tlora_fx.ir.lora_sites import lowered_sites
from tlora_fx.ir.verifier import named_graphs
from tlora_fx.model.batch import pack
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.numerics.state import copy_state
from tlora_fx.ops import quantized
from tlora_fx.ops.quantized import FORMS
from tlora_fx.pipeline import Runner
from tlora_fx.pipeline.instrument import Event
from tlora_fx.runtime.adapters.files import base_tensors
from tlora_fx.testing import small_base, small_job

LAYER = "layers_0_1"
# The products of library and decoded matrix round differently; float32.
ROUNDED = 2e-4
# bfloat16 through two layers, of all gradients together.
HALF = 5e-2


def traced(jobs):
    """Jobs fused, for `quantised` to go on with."""
    group = run_passes(jobs, stop_after="fuse-backbone")
    return SimpleNamespace(group=group, given=prepare(jobs), known={})


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Two plain jobs, and one with DoRA on v_proj and an o_proj of its own."""
    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    base = small_base(folder, num_hidden_layers=2, **sizes)
    return traced(
        [
            small_job("plain", base),
            small_job("all", base, r=2, target_modules="all-linear"),
            small_job(
                "dora",
                base,
                r=3,
                target_modules=["v_proj"],
                use_dora=True,
                modules_to_save=["o_proj"],
            ),
        ]
    )


def quantised(fused, added):
    """The group after all passes, one of them added."""
    pipeline = resolve_pipeline(None, [added])
    group, runner = copy_state(fused.group), Runner(pipeline)
    for place, item in enumerate(pipeline.passes, 1):
        if place > pipeline.place_of("fuse-backbone"):
            runner.run_one(Event(place, item, "group", group))
    return group


def model_of(fused, added):
    """The model, with its weights and random adapters; made once for each text."""
    if added not in fused.known:
        given = fused.given
        model = SuperModel(quantised(fused, added), given.backbone, given.jobs)
        model.materialize(base_tensors(given.backbone), "cpu")
        fused.known[added] = model
    restart(fused.known[added])
    return fused.known[added]


def stored_in(group, name):
    """The modules of a layer for which an operator runs."""
    graph = group.blocks[LAYER].graph
    called = [node for node in graph.nodes if name in str(node.target)]
    return {str(node.meta["path"]).rpartition(".")[2] for node in called}


@pytest.mark.parametrize("form", FORMS)
def test_matrices_of_layers_are_stored_and_others_stay(llama, form):
    """What DoRA reads too, for which there is a note; small ones, embeddings, the head."""
    group = quantised(llama, f"quantize-base{{to={form}}}@before:lower-adapters")
    large = {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

    assert stored_in(group, "quantized_linear") == large
    assert stored_in(group, "multi_lora_add") == large
    (told,) = (note for name, note in group.notes if name == "quantize-base")
    assert told.startswith(f"{LAYER}.self_attn.v_proj is not stored in {form}:")
    assert not stored_in(group, "aten.linear") & large
    small = quantised(llama, f"quantize-base{{to={form} at-least=5000}}@before:lower-adapters")
    assert stored_in(small, "quantized_linear") == {"gate_proj", "up_proj", "down_proj"}
    forms = {
        node.meta["tensor"].form
        for graph in group.graphs()
        for node in graph.nodes
        if node.op == "get_attr" and node.meta["tensor"].originals
    }
    assert forms == {f"tlora_fx.ops.quantized:{form}_{p}" for p in FORMS[form].parts}


def test_where_the_form_is_required_a_job_that_reads_a_matrix_is_refused(llama):
    """By its name, and by what reads it: DoRA's norm."""
    told = error_of(
        lambda: quantised(llama, "quantize-base{to=nf4 required=true}@before:lower-adapters"),
        BaseRefused,
    )

    assert "stored in nf4" in told
    assert "job    dora" in told
    assert f"at {LAYER}.self_attn.v_proj" in told


def sites_of(group):
    """What computes each lowered site, and for whom."""
    return {
        (where, site.path): (site.operator, site.jobs, tuple(site.branches))
        for where, graph in named_graphs(group)
        for site in lowered_sites(graph)
    }


@pytest.mark.parametrize("place", ["lower-adapters", "share-input", "lower-loss"])
def test_it_may_stand_behind_lowering(llama, place):
    """Lowered sites become what they would have become, those that shared an operator too.

    Of q, k and v, which shared one, v stays, because DoRA reads its matrix.
    """
    early = quantised(llama, "quantize-base{to=int8}@before:lower-adapters")
    late = quantised(llama, f"quantize-base{{to=int8}}@after:{place}")

    assert len(sites_of(early)) == 7
    assert sites_of(late) == sites_of(early)
    assert stored_in(late, "quantized_linear") == stored_in(early, "quantized_linear")


def restore(model, wrapped, form):
    """Give PEFT's model the matrices that are stored, decoded."""
    for path, module in model.net.named_modules():
        stored = [module._buffers.get(f"weight_{form}_{part}") for part in FORMS[form].parts]
        if stored[0] is None:
            continue
        linear = wrapped.get_base_model().get_submodule(path)
        linear = getattr(linear, "original_module", getattr(linear, "base_layer", linear))
        turned = isinstance(linear, Conv1D)
        shape = linear.weight.shape[::-1] if turned else linear.weight.shape
        found = decoded(form, stored, shape)
        linear.weight.data.copy_(found.t() if turned else found)


PARTS = [tokens([5, 7], seed=0), tokens([6], seed=1), tokens([4, 3], seed=2)]


def assert_trains(model, form, bound):
    """Two steps of gradient descent; each job's gradients are those of PEFT on what is stored."""
    parts = PARTS[: len(model.jobs)]
    for _ in range(2):
        fused = run_fused(model, parts)
        for own, part in zip(model.jobs, parts, strict=True):
            wrapped = peft_model(model, own.name)
            restore(model, wrapped, form)
            assert_same(fused[own.name], run_alone(wrapped, part), bound, own.name)
            for parameter in model.job_parameters(own.name).values():
                parameter.data -= 0.1 * parameter.grad


@pytest.mark.parametrize("form", FORMS)
def test_jobs_train_as_on_the_restored_base(llama, form):
    """Plain LoRA, on all or some linears, DoRA on one that stays, a trained copy of another."""
    model = model_of(llama, f"quantize-base{{to={form}}}@before:lower-adapters")

    assert_trains(model, form, ROUNDED)


@pytest.mark.parametrize("form", FORMS)
def test_a_nan_stays_in_its_job(llama, form):
    """Adapters of NaN give their job NaN, and change no bit of the others' losses and gradients."""
    model = model_of(llama, f"quantize-base{{to={form}}}@before:lower-adapters")
    clean = run_fused(model, PARTS)
    for parameter in model.job_parameters("all").values():
        parameter.data.fill_(float("nan"))
    beside = run_fused(model, PARTS)

    assert beside["all"].loss.isnan()
    for name in ("plain", "dora"):
        assert torch.equal(clean[name].loss, beside[name].loss)
        for key, gradient in clean[name].gradients.items():
            assert torch.equal(gradient, beside[name].gradients[key])


class InFloat8(torch.autograd.Function):
    """What a frozen linear with products in float8 gives, written out in float64."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.factors = weight.float().abs().amax(1) / 448
        ctx.codes = rounded(weight.float(), ctx.factors[:, None]).double()
        scale = x.float().abs().amax(-1, keepdim=True) / 448
        rows = rounded(x.float(), scale).double() * scale
        return (rows @ (ctx.codes * ctx.factors[:, None].double()).t()).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        wide = dy.float() * ctx.factors
        scale = wide.abs().amax(-1, keepdim=True) / 448
        return (rounded(wide, scale).double() * scale @ ctx.codes).to(dy.dtype), None


def rounded(numbers, scale):
    """The codes, as float32; rows of zeros stay zeros."""
    return (numbers / scale.clamp_min(1e-30)).to(torch.float8_e4m3fn).float()


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Two jobs in bfloat16."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    folder = tmp_path_factory.mktemp("half")
    base = small_base(folder, dtype="bfloat16", num_hidden_layers=2, **sizes)
    all_linear = {"r": 2, "target_modules": "all-linear"}
    return traced([small_job("plain", base), small_job("all", base, **all_linear)])


# Codes that fall on the other side, of all gradients together; and of a loss in bfloat16.
FLIPPED, ROUNDED_LOSS = 8e-2, 1e-2
FLOAT8 = "quantize-base{to=float8 products=true}@before:lower-adapters"


def test_products_in_float8_round_an_input_once(half):
    """q, k and v read one pair of codes and scale, gate and up another; adapters read x itself."""
    graph = quantised(half, FLOAT8).blocks[LAYER].graph
    rows = [node for node in graph.nodes if "float8_rows" in str(node.target)]
    linears = [node for node in graph.nodes if "float8_linear" in str(node.target)]
    read = [
        {str(n.meta["path"]).rpartition(".")[2] for n in linears if n.args[0] is row.args[0]}
        for row in rows
    ]

    assert read == [
        {"q_proj", "k_proj", "v_proj"},
        {"o_proj"},
        {"gate_proj", "up_proj"},
        {"down_proj"},
    ]
    assert all(node.args[1].args[0] in rows for node in linears)
    inputs = {row.args[0] for row in rows}
    assert {site.arguments["x"] for site in lowered_sites(graph)} == inputs


def test_jobs_train_on_products_in_float8(half):
    """As PEFT on linears that are written out, up to codes that fall on the other side."""
    model = model_of(half, FLOAT8)
    fused = run_fused(model, PARTS[:2])
    for own, part in zip(model.jobs, PARTS, strict=False):
        wrapped = peft_model(model, own.name)
        for linear in linears_of(wrapped):
            linear.forward = in_float8(linear.weight)
        expected = run_alone(wrapped, part)
        assert apart(fused[own.name].gradients, expected.gradients) < FLIPPED
        assert abs(fused[own.name].loss - expected.loss) < ROUNDED_LOSS * expected.loss


def in_float8(weight):
    return lambda x: InFloat8.apply(x, weight)


def linears_of(wrapped):
    """The frozen linears of the layers."""
    for path, module in wrapped.named_modules():
        if path.endswith("proj"):
            yield getattr(module, "base_layer", module)


@pytest.mark.parametrize("value", [float("nan"), 1e4])
def test_in_float8_no_job_touches_another_ones_bits(half, value):
    """By a NaN, or by numbers beside which those of its neighbour are nothing."""
    model = model_of(half, FLOAT8)
    clean = run_fused(model, PARTS[:2])
    for parameter in model.job_parameters("all").values():
        parameter.data.fill_(value)
    beside = run_fused(model, PARTS[:2])

    assert not torch.equal(clean["all"].loss, beside["all"].loss)
    assert torch.equal(clean["plain"].loss, beside["plain"].loss)
    for key, gradient in clean["plain"].gradients.items():
        assert torch.equal(gradient, beside["plain"].gradients[key])


def test_what_has_no_product_in_float8_stays_and_is_told(llama):
    """A base in float32 gives other results than bfloat16; other forms have no products."""
    group = quantised(llama, FLOAT8)
    assert not stored_in(group, "float8")
    notes = [note for name, note in group.notes if name == "quantize-base"]
    assert any("products in float8 give bfloat16, and it is of torch.float32" in n for n in notes)
    with pytest.raises(PipelineError, match="no products of its own"):
        quantised(llama, "quantize-base{to=int8 products=true}@before:lower-adapters")


def apart(found, expected):
    error = sum(float((found[n].double() - g.double()).norm() ** 2) for n, g in expected.items())
    return (error / sum(float(g.double().norm() ** 2) for g in expected.values())) ** 0.5


class Written(nn.Module):
    """Matrices as GPT-2 has them, and a product by hand."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(61, 64)
        self.widen = Conv1D(128, 64)
        self.narrow = nn.Linear(128, 64)
        self.odd = nn.Linear(64, 96)
        self.back = nn.Linear(96, 64, bias=False)
        self.head = nn.Linear(64, 61)

    def forward(self, ids):
        hidden = self.embed(ids)
        hidden = hidden + self.narrow(torch.tanh(self.widen(hidden)))
        return self.head(hidden + self.back(torch.tanh(self.odd(hidden))))


@pytest.fixture(scope="module")
def written():
    """A job on that model, in padded rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        (own,) = hand_written(Written(), "batch", ["widen", "odd", "back"])
    spec = own.base.model_copy(update={"module": own.base.module.float(), "dtype": "float32"})
    return traced([own.model_copy(update={"base": spec})])


@pytest.mark.parametrize(
    ("form", "wanted"),
    [("nf4", {"widen", "narrow", "odd"}), ("int8", {"widen", "narrow", "odd", "back"})],
)
@pytest.mark.parametrize("place", ["before", "after"])
def test_stored_turned_matrices_and_biases(written, form, wanted, place):
    """GPT-2's [in, out], with biases; in nf4 a matrix of 96 columns stays, and the note says so."""
    added = f"quantize-base{{to={form} at-least=1024}}@{place}:lower-adapters"
    model = model_of(written, added)
    names = [name for name, _ in model.net.named_buffers() if form in name]

    assert {name.split(".")[0] for name in names} == wanted
    told = [note for name, note in model.group.notes if name == "quantize-base"]
    assert ("back" in wanted) == (not told)
    assert all("back is not stored in nf4: in nf4 in_features must be" in note for note in told)
    assert_trains(model, form, ROUNDED)


def test_without_the_library_the_pass_says_so(llama, monkeypatch):
    """Before anything is rewritten."""
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    told = error_of(
        lambda: quantised(llama, "quantize-base@before:lower-adapters"), MissingPackageError
    )

    assert "tlora-fx[quant]" in told


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_jobs_train_on_cuda(tmp_path, form):
    """In bfloat16, close to PEFT in float32 on what is stored."""
    pytest.importorskip(FORMS[form].package)
    base = small_base(
        tmp_path, dtype="bfloat16", hidden_size=128, intermediate_size=256, num_hidden_layers=2
    )
    jobs = [small_job("one", base), small_job("two", base, r=2, target_modules="all-linear")]
    fused = traced(jobs)
    added = f"quantize-base{{to={form}}}@before:lower-adapters"
    model = SuperModel(quantised(fused, added), fused.given.backbone, fused.given.jobs)
    model.materialize(base_tensors(fused.given.backbone), "cuda")
    restart(model)

    model(pack(PARTS[:2]).to("cuda")).sum().backward()

    for own, part in zip(model.jobs, PARTS, strict=False):
        wrapped = peft_model(model, own.name).float()
        restore(model, wrapped, form)
        expected = run_alone(wrapped, part).gradients
        found = {n: p.grad.cpu() for n, p in model.job_parameters(own.name).items()}
        error = sum(float((found[n] - g).norm() ** 2) for n, g in expected.items()) ** 0.5
        size = sum(float(g.norm() ** 2) for g in expected.values()) ** 0.5
        assert error <= HALF * size
