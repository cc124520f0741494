"""`dora_scale` on Triton's kernels, under the interpreter, against the whole adapted matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.scaled import arguments, magnitudes_of, norms, others, reference, results
from tlora_fx.ops import dora_scale
from tlora_fx.ops.dora import lengths_kept
from tlora_fx.ops.kernels import dora

SLOW = [pytest.mark.slow]
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """What a kernel does not write is NaN."""
    real = torch.empty

    def empty(*sizes, **options):
        made = real(*sizes, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(dora.torch, "empty", empty)


@pytest.mark.parametrize(
    ("dtype", "bias"),
    [
        (torch.float32, True),
        pytest.param(torch.float32, False, marks=SLOW),
        pytest.param(torch.float16, True, marks=SLOW),
        pytest.param(torch.float16, False, marks=SLOW),
    ],
    ids=["float32-bias", "float32", "float16-bias", "float16"],
)
def test_it_equals_the_reference(lora, dtype, bias):
    """Segments of no, one and many chunks; ranks above and below a block; others' tokens."""
    made = lora(
        (130, 0, 1, 70, 33), (3, 8, 16, 20, 2), features=(48, 144), dtype=dtype,
        adapter_dtype=torch.float32, bias=bias,
    )  # fmt: skip
    jobs, draw = [0, 1, 3], torch.Generator().manual_seed(1)
    shape = (1, made.row.tokens, 144)
    y, dy = (torch.randn(shape, generator=draw).to(dtype) for _ in range(2))
    magnitudes = magnitudes_of(made, jobs)

    found = results(lambda y, m: dora_scale(*arguments(made, y, m, jobs)), y, magnitudes, dy)
    wanted = results(lambda y, m: reference(made, y, m, jobs), y, magnitudes, dy)

    for one, other in zip(found, wanted, strict=True):
        assert (one - other).double().norm() <= BOUND[dtype] * other.double().norm()
    rest = others(made, jobs)
    assert torch.equal(found[0][0, rest], y[0, rest])
    assert torch.equal(found[1][0, rest], dy[0, rest])
    assert torch.count_nonzero(found[3]) == 0  # of the job without tokens


def test_a_jobs_bits_do_not_depend_on_its_neighbours(lora):
    """Alone, and behind and before others, one of which is all NaN."""
    made = lora((70, 140, 9), (4, 4, 4), features=(32, 64), dtype=torch.float32, bias=False)
    draw = torch.Generator().manual_seed(2)
    y, dy = (torch.randn(1, 219, 64, generator=draw) for _ in range(2))
    y[0, :70] = float("nan")
    made.a[:4] = float("nan")
    m = magnitudes_of(made, [0, 1, 2])
    beside = results(lambda y, m: dora_scale(*arguments(made, y, m, [0, 1, 2])), y, m, dy)

    alone = lora((140,), (4,), features=(32, 64), dtype=torch.float32, bias=False)
    alone.weight, alone.a, alone.b = made.weight, made.a[4:8], made.b[4:8]
    alone.scales = made.scales[1:2]
    own = slice(70, 210)
    single = results(
        lambda y, m: dora_scale(*arguments(alone, y, m, [0])), y[:, own], m[1:2], dy[:, own]
    )

    assert torch.equal(beside[0][:, own], single[0])
    assert torch.equal(beside[1][:, own], single[1])
    assert torch.equal(beside[3], single[2])


@settings(deadline=None, max_examples=15)
@given(
    ranks=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    inner=st.sampled_from([16, 96, 272, 600]),
    outer=st.sampled_from([8, 72, 136]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    size=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    opposed=st.booleans(),
    stored=st.sampled_from(["rows", "columns"]),
    kept=st.booleans(),
)
def test_norms_by_kernels_are_those_of_the_sum(
    lora, ranks, inner, outer, dtype, size, opposed, stored, kept
):
    """To some roundings of the longest that weight and change could be together.

    Ranks within a block and beyond, sizes that end within one, weights that lie in columns, and an
    adapter that takes part of its weight away.
    """
    made = lora(
        [1] * len(ranks), ranks, features=(inner, outer), dtype=dtype, adapter_dtype=torch.float32
    )
    made.b *= size
    if stored == "columns":
        made.weight = made.weight.t().contiguous().t()
    chosen = list(range(len(ranks)))[::-2]
    if opposed:
        first = sum(made.ranks[: chosen[0]])
        # One row of A, and what all rows of the weight have of it, taken away.
        down = made.a[first]
        made.b[first] = -(made.weight.float() @ down) / down.dot(down) / made.scales[chosen[0]]
    numbers, scales, rates, *_, site, _ = made.arguments()[5:]
    tables = made.a, made.b, numbers, scales, rates, site

    with lengths_kept({} if kept else None):
        found = torch.ops.tlora_fx.dora_norms(made.weight, *tables, chosen, max(ranks))

    for place, job in enumerate(chosen):
        wanted, rows = norms(made, job), slice(sum(ranks[:job]), sum(ranks[: job + 1]))
        change = made.scales[job] * made.b[rows].double().t() @ made.a[rows].double()
        longest = made.weight.double().norm(dim=1) + change.norm(dim=1)
        assert torch.all((found[place] - wanted).abs() * wanted <= 1e-6 * longest.square())
