"""torch.compile on a Shared Super-Model: as one graph, and layer by layer."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from tests import fresh
from tests.models import (
    FAMILIES,
    SHALLOW,
    assert_same,
    base_of,
    hand_written,
    job,
    mixed_jobs,
    plain,
    ready,
    restart,
    row_of,
    run_fused,
    tokens,
)
from tests.runtime.groups import losses_of, make_data, make_job, tiny_base
from tlora_fx.compiler import compile
from tlora_fx.host import phases
from tlora_fx.ir.graph import HEAD, OpenSlots
from tlora_fx.model.compiled import repeatable
from tlora_fx.model.supermodel import SuperModel
from tlora_fx.runtime.adapters.files import base_tensors
from tlora_fx.runtime.trainer import Trainer

# Sequence lengths of three jobs. The first row decides what is compiled, and has every
# coincidence: 32 tokens are as many as hidden features, three sequences as many as jobs.
ROWS = [
    ([10], [11], [11]),
    ([5, 4], [6], [3, 9]),
    ([1], [1], [30]),
    ([], [12], [4, 4, 4]),
    ([7], [], []),
    ([], [], [2]),
    ([1], [], []),
]
ROOT = Path(__file__).parents[2]
KINDS = ({}, {"use_dora": True}, {"lora_dropout": 0.5})
QKV = ("q_proj", "k_proj", "v_proj")

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A GPT-2, which computes everything in float64."""
    return base_of(tmp_path_factory.mktemp("gpt2"), "gpt2", n_layer=2)


def of_kinds(base, *kinds, targets=("c_attn", "c_fc")):
    """A job of each kind."""
    return [
        job(f"j{place}", base, r=4, target_modules=list(targets), **kind)
        for place, kind in enumerate(kinds)
    ]


def mixes(jobs=3):
    """Tokens of so many jobs for each of ROWS."""
    return [[tokens(n, seed=s) for s, n in enumerate(row[:jobs])] for row in ROWS]


def assert_rows_equal(model, run, rows, bound=1e-9):
    """Losses and gradients of `run`, which may be compiled, are those that `rows` holds."""
    for parts, expected in rows:
        found = run_fused(run, parts)
        for own in model.jobs:
            assert_same(found[own.name], expected[own.name], bound, own.name)


def compiled_count(model, rows, bound=1e-9, backend="eager"):
    """Compile layer by layer, run all rows, and tell what the first and what all compiled."""
    counter = CompileCounterWithBackend(backend)
    expected = [(parts, run_fused(model, parts)) for parts in rows]
    model.compile(backend=counter)
    assert_rows_equal(model, model, expected[:1], bound)
    first = counter.frame_count
    assert_rows_equal(model, model, expected[1:], bound)
    return first, counter.frame_count


@pytest.mark.parametrize(
    ("kinds", "backend"),
    [
        (KINDS, "eager"),
        pytest.param(KINDS, "aot_eager", marks=pytest.mark.slow),
        pytest.param(({}, {}, {}), "aot_eager", marks=pytest.mark.slow),
    ],
    ids=["mixed", "mixed-aot", "plain-aot"],
)
def test_layers_of_one_structure_compile_once_whatever_the_rows(base, kinds, backend):
    """One compilation of a layer and one of the loss; none for any later row."""
    model = ready(of_kinds(base, *kinds))

    assert compiled_count(model, mixes(), backend=backend) == (2, 2)


def test_a_group_of_one_job_is_compiled(base):
    """Tables with one entry are no reason to make code anew or to leave it out."""
    model = ready(of_kinds(base, {}))
    rows = [[tokens([10])], [tokens([5, 4])], [tokens([1])], [tokens([1, 1])]]

    assert compiled_count(model, rows) == (2, 2)


def test_ranks_that_differ_between_layers_share_code(base):
    """rank_pattern by layer changes tables, not code, even where a rank is 1."""
    pattern = {r"h\.0\..*c_attn": 1, r"h\.1\..*c_attn": 7}
    model = ready(of_kinds(base, {"rank_pattern": pattern}, targets=["c_attn"]))
    rows = [[tokens([10])], [tokens([5, 4])]]

    assert compiled_count(model, rows) == (2, 2)


def test_a_process_compiles_any_number_of_models(base):
    """Dynamo compiles one piece of code so often only; models after that would not run."""
    rows = mixes(1)[:1]
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(2):  # each compiles layers and loss
            first, _ = compiled_count(ready(of_kinds(base, {})), rows)
            assert first


@pytest.mark.parametrize(
    ("family", "activation"), [("llama", "silu"), ("gemma2", "gelu_tanh"), ("phi3", "silu")]
)
def test_gated_activations_stand_in_the_linears_behind_them(tmp_path, family, activation):
    """In the code that is compiled, once a structure; its numbers are the plain code's."""
    base = base_of(tmp_path, family, **SHALLOW.get(family, {}))
    model = ready([job("all", base, r=4, target_modules="all-linear", lora_dropout=0.5)])
    opened = re.findall(r"gated_linear\.default\([^']*'(\w+)'", model.compiled_source)
    layers = [block for block in model.group.blocks.values() if block.name != HEAD]

    assert opened == [activation] * len(layers)
    assert "gated_linear" not in model.source
    assert len(model.compiled_source) < len(model.source)
    found = compiled_count(model, [[tokens([10])], [tokens([5, 4])]], 1e-5)
    assert found[0] == found[1]


def test_a_gate_with_other_readers_stays(tmp_path):
    """So does one whose linear nobody adapts, and code that somebody gave."""
    base = base_of(tmp_path, "llama", num_hidden_layers=2)
    few = compile([job("few", base, r=4, target_modules=["gate_proj", "up_proj"])])
    every = compile([job("all", base, r=4, target_modules="all-linear")])
    edited = f"{every.source}\n# mine\n"
    given = SuperModel(every.group, every.backbone, every.jobs, source=edited)

    assert "gated" not in few.compiled_source
    assert "gated" in every.compiled_source
    assert given.compiled_source == edited


def test_chunks_of_the_loss_begin_with_the_last_norm(tmp_path):
    """In the code that is compiled, where nobody trains it."""
    base = base_of(tmp_path, "llama", **SHALLOW["llama"])
    frozen = compile([job("frozen", base, r=4, target_modules=["q_proj"])])
    trained = compile([job("norm", base, r=4, target_modules=["q_proj"], modules_to_save=["norm"])])

    root = frozen.compiled_source.partition("class Root")[2]
    forward, _, finish = root.partition("def finish(self, ")
    assert "finish=self.finish" in forward
    assert "norm.weight" not in forward
    assert "self.model.norm.weight" in finish
    assert "finish" not in frozen.source + trained.compiled_source


def test_each_structure_compiles_for_itself(tmp_path):
    """Gemma 2 has two structures: two compilations and one of the loss."""
    gemma = base_of(tmp_path, "gemma2")
    model = ready(of_kinds(gemma, {}, targets=["q_proj"]))
    rows = [[tokens([10])], [tokens([5, 4])]]

    assert compiled_count(model, rows, 1e-5) == (3, 3)


def test_batch_form_compiles_alike():
    """Lines and columns of a padded batch are sizes of the row as well."""
    model = ready(hand_written(plain(layers=3), targets=["qkv", "out"]))
    assert model.group.form == "batch"
    rows = [[tokens([10, 3, 32])], [tokens([5, 4, 7, 2])], [tokens([1])]]

    assert compiled_count(model, rows) == (2, 2)


@pytest.mark.parametrize(
    "kinds",
    [({}, {"lora_dropout": 0.5}), pytest.param(KINDS, marks=pytest.mark.slow)],
    ids=["plain", "mixed"],
)
def test_a_head_with_an_adapter_compiles_once(base, kinds):
    """A LoRA on lm_head takes the chunk's tables along."""
    model = ready(of_kinds(base, *kinds, targets=["c_attn", "lm_head"]))
    model.net.loss.chunk_rows = 16

    assert compiled_count(model, mixes(len(kinds))) == (2, 2)


def test_a_model_without_layers_compiles_as_a_whole():
    """Where nothing could be folded into layers, the root is compiled."""
    model = ready(hand_written(plain(layers=1)))
    assert set(model.group.blocks) == {"head"}
    rows = [[tokens([10, 3])], [tokens([5, 4, 7])], [tokens([1])]]

    assert compiled_count(model, rows) == (1, 1)


def test_fixed_sizes_may_be_asked_for(base):
    """dynamic=False makes code for each number of tokens."""
    model = ready(of_kinds(base, {}))
    counter = CompileCounterWithBackend("eager")
    model.compile(backend=counter, dynamic=False)

    counts = []
    for length in (10, 11):
        model(row_of(model, [tokens([length])]))
        counts.append(counter.frame_count)

    assert counts[1] == 2 * counts[0]


@pytest.mark.parametrize("first", ["materialize", "compile"])
def test_frozen_weights_of_sites_get_room_for_adapters(tmp_path, monkeypatch, first):
    """Where kernels serve; values, names and training stay, tied and other weights where they are.

    A head with an adapter shares its weight with the embedding.
    """
    base = base_of(tmp_path, "llama", tie_word_embeddings=True, vocab_size=64, num_hidden_layers=1)
    jobs = of_kinds(base, {}, {}, targets=["q_proj", "down_proj", "lm_head"])
    as_they_are, model = ready(jobs), compile(jobs)
    expected = dict(as_they_are.named_parameters())
    rows = [(parts, run_fused(as_they_are, parts)) for parts in mixes(2)[:1]]

    monkeypatch.setenv("TLORA_FX_KERNELS", "interpret")
    if first == "compile":
        model.compile(backend="aot_eager")
    model.materialize(base_tensors(model.backbone), "cpu")
    if first == "materialize":
        model.compile(backend="aot_eager")
    monkeypatch.delenv("TLORA_FX_KERNELS")
    restart(model)

    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    roomy = {name for name, value in found.items() if not value.is_contiguous()}
    assert {name.rsplit(".", 2)[-2] for name in roomy} == {"q_proj", "down_proj"}
    assert all(found[name].stride(0) == found[name].shape[1] + 64 for name in roomy)
    assert_rows_equal(model, model, rows)


@pytest.mark.parametrize(
    ("slots", "gap"), [(None, 64), (OpenSlots(QKV, rows=16, jobs=2, rank=8), 128)]
)
def test_an_open_model_keeps_room_for_banks_that_double(tmp_path, monkeypatch, slots, gap):
    """Behind q, k and v of 16 rows 64 columns; 128 where they may become 32."""
    base = base_of(tmp_path, "llama", num_hidden_layers=1, num_attention_heads=2, hidden_size=32,
                   num_key_value_heads=1)  # fmt: skip
    jobs = of_kinds(base, {}, targets=list(QKV))
    model = compile(jobs, open=slots)
    monkeypatch.setenv("TLORA_FX_KERNELS", "interpret")
    model.materialize(base_tensors(model.backbone), "cpu")

    model.compile(backend="aot_eager")

    weights = [value for name, value in model.named_parameters() if "_proj.weight" in name
               and not value.is_contiguous()]  # fmt: skip
    assert len(weights) == 3
    assert {weight.stride(0) - weight.shape[1] for weight in weights} == {gap}


def test_a_deep_copy_of_a_compiled_model_runs_its_own_layers(base):
    """Copies do not lead back to the tensors that they were copied from."""
    model = ready(of_kinds(base, {}))
    model.compile(backend="eager")
    twin = copy.deepcopy(model)
    parts = [tokens([6])]
    before = model(row_of(model, parts)).item()
    with torch.no_grad():
        for bank in twin.banks.values():
            bank.a.mul_(3)

    assert twin(row_of(twin, parts)).item() != before
    assert model(row_of(model, parts)).item() == before


@pytest.mark.parametrize("kinds", [({}, {}, {}), KINDS], ids=["plain", "mixed"])
def test_the_whole_model_is_one_graph(base, kinds):
    """fullgraph=True: forward and backward without a break, for all rows by one compilation."""
    model = ready(of_kinds(base, *kinds))
    expected = [(parts, run_fused(model, parts)) for parts in mixes()[1:5]]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)

    assert_rows_equal(model, compiled, expected)
    assert counter.frame_count == 1


def test_logits_stay_chunks_in_one_graph(base):
    """No graph holds the logits of the whole row, nor saves those of a chunk for the backward."""
    model = ready(of_kinds(base, {}))
    model.net.loss.chunk_rows = 8
    parts = [tokens([15, 15])]
    expected = [(parts, run_fused(model, parts))]
    computed, saved = [], []

    def note(graph, inputs):
        (output,) = graph.graph.find_nodes(op="output")
        computed.extend(logits_in(graph.graph.nodes))
        saved.extend(logits_in(output.args[0]))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(model, fullgraph=True, backend=backend)

    assert_rows_equal(model, compiled, expected)
    assert computed
    assert max(computed) <= 8
    assert saved == []


def logits_in(nodes):
    """How many rows each value has that is as wide as the vocabulary, weights left out."""
    values = [node.meta.get("val") for node in nodes if isinstance(node, torch.fx.Node)]
    shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
    return [shape[-2] for shape in shapes if shape[-1:] == (61,) and shape not in [(32, 61), (61,)]]


def test_inductor_compiles_branches_on_every_linear(tmp_path):
    """Linears of one layer read the same jobs' parts: one length a job, not one a linear."""
    base = base_of(tmp_path, "llama", num_hidden_layers=1)
    kinds = ({"use_dora": True}, {"lora_bias": True}, {"use_dora": True, "lora_dropout": 0.5})
    model = ready(of_kinds(base, *kinds, targets=["q_proj", "o_proj", "down_proj"]))
    rows = [(parts, run_fused(model, parts)) for parts in mixes()[:5]]
    model.compile()

    # Its norms compute in float32.
    assert_rows_equal(model, model, rows, bound=1e-6)


@pytest.mark.slow
def test_inductor_compiles_layer_by_layer(base):
    """By Inductor's C++ backend, jobs as they are and empty segments included."""
    model = ready(of_kinds(base, *KINDS, targets=["c_attn"]))
    rows = [(parts, run_fused(model, parts)) for parts in mixes()]
    model.compile()

    assert_rows_equal(model, model, rows)


@pytest.mark.slow
def test_inductor_compiles_the_whole_model(base):
    """By Inductor's C++ backend as one graph."""
    model = ready(of_kinds(base, *KINDS, targets=["c_attn"]))
    rows = [(parts, run_fused(model, parts)) for parts in mixes()[1:4]]

    assert_rows_equal(model, torch.compile(model, fullgraph=True, dynamic=True), rows)


@pytest.mark.parametrize("way", ["layers", "whole"])
def test_a_compiled_model_trains_as_an_eager_one(tmp_path, way):
    """Two rounds of the trainer give the same losses."""
    base = tiny_base(tmp_path / "base")
    jobs = [
        make_job(base, "a", seed=1, lora={"lora_dropout": 0.1}, max_steps=2),
        make_job(base, "b", seed=2, gradient_accumulation_steps=2, max_steps=2),
    ]
    data = make_data(jobs)
    eager, compiled = compile(jobs), compile(jobs)
    Trainer(eager, output=tmp_path / "eager", device="cpu", data=data).run()
    if way == "layers":
        compiled.compile(backend="aot_eager")
    else:
        compiled = torch.compile(compiled, fullgraph=True, dynamic=True, backend="aot_eager")
    Trainer(compiled, output=tmp_path / way, device="cpu", data=data).run()

    one, two = losses_of(tmp_path / "eager", jobs), losses_of(tmp_path / way, jobs)
    for own in jobs:
        assert len(one[own.name]) == 2
        assert two[own.name] == pytest.approx(one[own.name], rel=1e-9)


def test_the_pages_example_trains_compiled(tmp_path):
    """The block on compiling an SSM runs in a fresh process and ends with three jobs done."""
    page = (ROOT / "docs" / "torch-compile.md").read_text(encoding="utf-8")
    section = page.partition("\n## Compiling an SSM\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    told = fresh.run("-c", code, cwd=tmp_path)

    assert told.returncode == 0, told.stderr
    assert told.stdout.count(" done ") == 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "way"), [("llama", "layers"), ("llama", "whole"), ("lfm2", "layers")]
)
def test_inductor_compiles_on_a_gpu(tmp_path, family, way):
    """Tables stay on the CPU beside Triton kernels, with the same losses and gradients."""
    model = ready(mixed_jobs(base_of(tmp_path, family, "float32"), FAMILIES[family].targets))
    model.materialize(base_tensors(model.backbone), "cuda")
    restart(model)
    rows = [[tokens(n, seed=s) for s, n in enumerate(row)] for row in ROWS]
    expected = [losses_and_gradients(model, model, row_of(model, parts)) for parts in rows]
    if way == "layers":
        model.compile()
    run = model if way == "layers" else torch.compile(model, fullgraph=True, dynamic=True)

    for parts, wanted in zip(rows, expected, strict=True):
        found = losses_and_gradients(model, run, row_of(model, parts))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def losses_and_gradients(model, run, row):
    """The loss sums and the gradients of all banks, on a GPU."""
    for bank in model.banks.values():
        bank.a.grad.zero_()
        bank.b.grad.zero_()
    losses = run(row.to("cuda"))
    losses.sum().backward()
    found = [bank.a.grad.clone() for bank in model.banks.values()]
    return [losses.detach(), *found, *(bank.b.grad.clone() for bank in model.banks.values())]


def test_what_torch_compiles_is_a_phase_of_the_start(base):
    """Layers are compiled when they first run, and not again."""
    model = ready(of_kinds(base, {}))
    model.compile(backend="eager")
    parts = mixes(jobs=1)[0]
    start = phases.begin()
    run_fused(model, parts)
    compiled = [each.phase for each in start.record().stretches]
    run_fused(model, parts)
    again = phases.end()

    assert set(compiled) == {"layers"}
    assert len(again.stretches) == len(compiled)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"options": {"deterministic": True}}),
        (
            {"options": {"max_autotune": True}},
            {"options": {"deterministic": True, "max_autotune": True}},
        ),
        ({"options": {"deterministic": False}}, {"options": {"deterministic": False}}),
        ({"mode": "max-autotune"}, {"mode": "max-autotune"}),
        ({"backend": "eager"}, {"backend": "eager"}),
    ],
)
def test_inductor_times_nothing_that_bits_depend_on_unless_somebody_asks(given, expected):
    """`mode` excludes options, and other backends know none of these."""
    assert repeatable(given) == expected
