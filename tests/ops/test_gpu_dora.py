"""`dora_scale` on its kernels on CUDA, against float64 and PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.ops.scaled import arguments, magnitudes_of, norms, others, reference, results
from tlora_fx.ops import dora_scale
from tlora_fx.ops.dora import lengths_kept
from tlora_fx.ops.kernels import strict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS, RANKS, JOBS = (700, 1, 0, 129, 1400), (16, 1, 8, 40, 5), [0, 1, 3, 2]


def made_of(lora, dtype=torch.bfloat16, width=1040, bias=True):
    """A site, what its linear gave, a gradient, and magnitudes."""
    made = lora(
        LENGTHS, RANKS, features=(1024, width), dtype=dtype, adapter_dtype=torch.float32,
        bias=bias, device="cuda",
    )  # fmt: skip
    made.b *= 0.05
    draw = torch.Generator("cuda").manual_seed(3)
    shape = (1, made.row.tokens, width)
    y, dy = (torch.randn(shape, generator=draw, device="cuda").to(dtype) for _ in range(2))
    return made, y, dy, magnitudes_of(made, JOBS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_kernels_are_as_exact_as_pytorch(lora, monkeypatch, dtype, bias):
    """Twice PyTorch's distance from float64 at most, and the same bits again; others' rows stay.

    In 16 bits a norm that is 3e-7 off rounds some elements to their other neighbour.
    """
    made, y, dy, magnitudes = made_of(lora, dtype, bias=bias)

    def run():
        return results(lambda y, m: dora_scale(*arguments(made, y, m, JOBS)), y, magnitudes, dy)

    first, again = run(), run()
    monkeypatch.setenv("TLORA_FX_KERNELS", "off")
    plain = run()
    exact = results(lambda y, m: reference(made, y, m, JOBS), y, magnitudes, dy)

    for ours, later, theirs, wanted in zip(first, again, plain, exact, strict=True):
        assert torch.equal(ours, later)
        more = 1e-6 if ours.dtype == torch.float32 else 1e-5
        limit = 2 * (theirs - wanted).norm() + more * wanted.norm()
        assert (ours - wanted).norm() <= limit
    rest = others(made, JOBS)
    assert torch.equal(first[0][0, rest], y[0, rest])
    assert torch.equal(first[1][0, rest], dy[0, rest])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_strict_mode_norms_do_not_depend_on_neighbours(lora, dtype):
    """Whatever their ranks, bit for bit."""
    made, *_ = made_of(lora, dtype)
    ranks, scales, rates, *_, site, _ = made.arguments()[5:]

    def norms_of(jobs):
        tables = made.a, made.b, ranks, scales, rates, site
        return torch.ops.tlora_fx.dora_norms(made.weight, *tables, jobs, max(RANKS))

    with strict():
        both, alone = norms_of([0, 3, 1]), [norms_of([job]) for job in (0, 3, 1)]

    assert torch.equal(both, torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [0.02, 1.0, 20.0])
@pytest.mark.parametrize("stored", ["rows", "columns"])
def test_norms_are_those_of_the_sum(lora, dtype, size, stored):
    """To 2e-6 of float64, of a base in 16 bits too, and of small and large adapters.

    Again and again, with what is kept of the weight and without.
    """
    made, *_ = made_of(lora, dtype)
    made.b *= size
    if stored == "columns":
        made.weight = made.weight.t().contiguous().t()
    ranks, scales, rates, *_, site, _ = made.arguments()[5:]

    wanted, kept = torch.stack([norms(made, job) for job in JOBS]), {}
    for store in (None, None, None, kept, kept, kept):
        with lengths_kept(store):
            found = torch.ops.tlora_fx.dora_norms(
                made.weight, made.a, made.b, ranks, scales, rates, site, JOBS, 40
            )
        assert ((found - wanted).abs() / wanted).max() <= 2e-6
    assert len(kept) == 1


def test_a_graph_serves_rows_of_other_segments(lora):
    """Captured forward and backward; segments and adapters are changed, and it is replayed."""
    from tlora_fx.ops.kernels import refresh

    made, y, dy, magnitudes = made_of(lora)
    leaves = [t.detach().clone().requires_grad_() for t in (y, *magnitudes)]
    given = arguments(made, leaves[0], leaves[1:], JOBS)

    def run():
        found = dora_scale(*given)
        return (found, *torch.autograd.grad(found, leaves, dy))

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        run()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    made.row.segments.copy_(torch.tensor([0, 5, 900, 1100, 1101, 2230], dtype=torch.int32))
    refresh(made.row.segments)
    with torch.no_grad():
        given[5].mul_(1.5)
    graph.replay()
    torch.cuda.synchronize()

    for mine, wanted in zip(captured, run(), strict=True):
        assert torch.equal(mine, wanted)
