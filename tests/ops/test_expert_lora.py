"""`multi_lora_experts`: against a loop over jobs and experts in float64."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from scripts.check_kernels import MAX_REGISTERS, needs_of
from tests.ops.expert_jobs import by_job_and_expert, case
from tlora_fx.codegen.spec import SHARED_BYTES
from tlora_fx.errors import ExpertLinearError, FrozenGradientError
from tlora_fx.ops import multi_lora_experts
from tlora_fx.ops.host_tables import reads_on_host
from tlora_fx.ops.kernels import strict

CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 17)), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (4, 2), (5, 3)]),
    st.tuples(*[st.booleans()] * 4),
    st.sampled_from([0.0, 0.9]),
    st.booleans(),
)
def test_results_and_gradients_are_those_of_each_job_and_expert(
    jobs, sizes, flags, skew, is_strict
):
    """Whatever the ranks and routing; jobs without tokens or adapters, experts without pairs."""
    lengths, ranks = zip(*jobs, strict=True)
    ranks = ranks if any(ranks) else (1, *ranks[1:])
    turned, crossed, shared, biased = flags
    mine = case(
        lengths, ranks, experts=sizes[0], chosen=sizes[1], turned=turned, crossed=crossed,
        shared=shared, biased=biased, skew=skew, dtype=torch.float64,
    )  # fmt: skip
    expected = mine.results(by_job_and_expert)

    with strict(is_strict):
        found = mine.results(multi_lora_experts)

    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_strict", [False, True])
def test_what_is_no_number_stays_with_its_job(is_strict):
    """Of tokens, adapters and gradients; neighbours keep their bits, their gradients too."""
    mine = case(lengths=(9, 7, 13))
    own = slice(0, 9)
    poisoned = replace(mine, x=mine.x.clone(), dy=mine.dy.clone())
    poisoned.x[9:16], poisoned.dy[9:16] = torch.nan, torch.inf
    poisoned.a[1].fill_(torch.nan)

    with strict(is_strict):
        alone, beside = (one.results(multi_lora_experts) for one in (mine, poisoned))

    assert beside[0][9:16].isnan().all()
    for before, after in zip(alone[:2], beside[:2], strict=True):
        assert torch.equal(before[own], after[own])
        assert torch.equal(before[16:], after[16:])
    for place in (2, 4, 5, 7):  # A and B of the first and the last job
        assert torch.equal(alone[place], beside[place])


@pytest.mark.parametrize("change", ["rank", "swapped", "job", "twice", "narrow"])
def test_adapters_that_do_not_fit_are_refused(change):
    """The error lists what they must be."""
    mine = case()
    if change == "rank":
        mine.a[0] = mine.a[0][1:]
    elif change == "swapped":
        mine = replace(mine, crossed=True)
    elif change == "narrow":
        mine.b[1] = mine.b[1].half()
    else:
        mine = replace(mine, jobs=[0, 1, 3 if change == "job" else 1])

    with pytest.raises(ExpertLinearError, match=r"A \[E r, "):
        multi_lora_experts(*mine.arguments())


def test_a_graph_may_serve_more_jobs_than_it_was_made_with():
    """Fake segments stand for those of any row; real ones say which jobs there are."""
    mine = replace(case(), jobs=[2, 5, 9])

    with FakeTensorMode() as mode:
        fakes = [
            [mode.from_tensor(one) for one in value]
            if isinstance(value, list) and isinstance(value[0], torch.Tensor)
            else mode.from_tensor(value)
            if isinstance(value, torch.Tensor)
            else value
            for value in mine.arguments()
        ]
        assert multi_lora_experts(*fakes).shape[-1] == mine.b[0].shape[0]
    with pytest.raises(ExpertLinearError, match="of 3 jobs"):
        multi_lora_experts(*mine.arguments())


def test_the_weight_is_frozen():
    """Its gradient is refused, not forgotten."""
    mine = case()
    y = multi_lora_experts(*replace(mine, weight=mine.weight.requires_grad_()).arguments())

    with pytest.raises(FrozenGradientError):
        y.sum().backward()


def test_torch_knows_the_operator():
    """Its fake tensors, its gradient, and what is traced of both."""
    mine = case(dtype=torch.float64)
    leaves = [own.detach().requires_grad_() for own in (mine.x, *mine.a, *mine.b)]
    given = replace(mine, x=leaves[0], a=leaves[1:4], b=leaves[4:]).arguments()

    torch.library.opcheck(
        torch.ops.tlora_fx.multi_lora_experts_forward.default, given, test_utils=CHECKS
    )


@pytest.mark.parametrize(
    ("dtype", "rank", "reads"),
    [(torch.bfloat16, 17, False), (torch.float32, 17, True), (torch.bfloat16, 129, True)],
)
def test_segments_are_read_on_the_host_where_no_kernel_serves(monkeypatch, dtype, rank, reads):
    """A CUDA graph cannot hold that."""
    monkeypatch.delenv("TLORA_FX_KERNELS", raising=False)
    mine = case(ranks=(1, 2, rank), dtype=dtype, adapters=torch.float32)
    names = [name for name in mine.__dataclass_fields__ if name != "dy"]

    arguments = dict(zip(names, mine.arguments(), strict=True))
    assert reads_on_host("multi_lora_experts", arguments) is reads


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is built for Linux")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")
@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        ("apply", 16),
        *[
            pytest.param(kind, rank, marks=pytest.mark.slow)
            for kind in ("apply", "outer")
            for rank in (16, 32, 64, 128)
            if (kind, rank) != ("apply", 16)
        ],
    ],
)
def test_a_kernel_fits_hopper(kind, rank):
    """Registers, no spills, shared memory, tensor cores; at Qwen3-30B-A3B's sizes."""
    triton = pytest.importorskip("triton")
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tlora_fx.ops.kernels import expert_pairs as pairs

    values = {"JOBS": 8, "EXPERTS": 128, "CHOSEN": 8, "RANK": rank, "WIDE": tl.float32}
    options = pairs.options(rank)
    if kind == "apply":
        values |= {"INNER": 2048, "OUTER": 1536, "FIRST": 0, "KIND": tl.float32, "WRITES": True}
        values |= {"ROWS": pairs.ROWS, "COLUMNS": pairs.COLUMNS, "SPLITS": pairs.SPLITS}
    else:
        values |= {"WIDTH": 2048, "BY_COLUMN": 1}
        values |= {"ROWS": pairs.SUMMED, "COLUMNS": pairs.WIDE_COLUMNS}
        options = {"num_warps": 4, "num_stages": 3}
    types = dict.fromkeys(values, "constexpr") | dict.fromkeys(("order", "table"), "*i64")
    types |= {"ends": "*i32", "out": "*fp32"}
    kernel = getattr(pairs, f"_{kind}")
    names = [parameter.name for parameter in kernel.params]
    signature = {name: types.get(name, "*bf16") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*")
    }
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in values.items()}, aligned
    )
    found = needs_of(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options), 90)

    assert found.registers <= MAX_REGISTERS
    assert found.spills == 0
    assert found.shared_bytes <= SHARED_BYTES[90]
    assert found.tensor_core > 0
    assert found.wide_loads > 0
