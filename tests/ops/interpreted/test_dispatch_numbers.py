"""The operators on kernels give the numbers of each job alone in float64."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tlora_fx.codegen.spec import Tile
from tlora_fx.ops import multi_lora_linear, multi_lora_linears
from tlora_fx.ops.kernels import launch, select

BOUNDS = {torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-7}
JOB = st.tuples(st.integers(0, 20), st.integers(0, 9), st.sampled_from([0.0, 0.3]))


def results(made, **other):
    """Output and gradients of the operator, and of the reference."""
    x, a, b = made.leaves()
    y = multi_lora_linear(*made.arguments(x=x, a=a, b=b), **other)
    expected = made.reference(x, a, b)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    found = torch.autograd.grad(y, (x, a, b), dy.to(y.dtype))
    wanted = torch.autograd.grad(expected, (x, a, b), dy)
    return (y.detach(), *found), (expected.detach(), *wanted)


def assert_close(found, expected, bound):
    """Each is finite and within the bound of the reference's norm."""
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        assert (one.double() - other).norm() <= bound * other.norm().clamp_min(1e-30)


@pytest.mark.parametrize("rates", [(0.0, 0.0, 0.0), (0.3, 0.0, 0.2)], ids=["keep", "drop"])
@pytest.mark.parametrize("plan", select.PLANS)
def test_every_plan_equals_the_reference(lora, plan, rates):
    """Forward and backward, with a bias, a job without tokens, one with a single token."""
    made = lora((17, 0, 1), (3, 2, 18), rates, features=(32, 48), dtype=torch.float32)
    with select.force_plan(plan):
        assert_close(*results(made, max_rank=18, drops=any(rates)), BOUNDS[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_equal_the_reference(lora, dtype):
    """float16 within rounding, float64 up to scales, which are float32."""
    made = lora((17, 4), (3, 5), (0.3, 0.0), features=(16, 32), dtype=dtype, bias=False)
    with select.force_plan("fused"):
        assert_close(*results(made), BOUNDS[dtype])


@settings(deadline=None, max_examples=3, database=None, suppress_health_check=list(HealthCheck))
@given(jobs=st.lists(JOB, min_size=1, max_size=3))
def test_any_mix_of_jobs_equals_each_alone(lora, jobs):
    """Any lengths and ranks, also none, dropped or not."""
    lengths, ranks, rates = zip(*jobs, strict=True)
    if not sum(lengths) or not sum(ranks):
        return
    made = lora(lengths, ranks, rates, features=(16, 16), dtype=torch.float32)
    with select.force_plan("fused"):
        assert_close(*results(made, max_rank=9), BOUNDS[torch.float32])


def test_gradients_pass_gradcheck(lora):
    """Numerical differences agree with the backward kernels in float64."""
    made = lora((1, 0, 2), (2, 1, 1), (0.4, 0.0, 0.0), features=(16, 16))

    def run(x, a, b):
        return multi_lora_linear(*made.arguments(x=x, a=a, b=b))

    with select.force_plan("fused"):
        assert torch.autograd.gradcheck(run, made.leaves(), fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("plan", ["fused", "sidecar"])
def test_sites_that_share_x_give_what_each_gives_alone(lora, plan):
    """Three linears of other widths in one call: outputs, and the sum of their dx."""
    sites = [
        lora((9, 4), (3, 5), (0.3, 0.0), features=(32, width), dtype=torch.float32)
        for width in (16, 48, 16)
    ]
    for number, site in enumerate(sites):
        site.row.site_tensor = torch.tensor(70 + number)
    calls = [site.arguments(x=sites[0].x) for site in sites]
    x = sites[0].x.clone().requires_grad_()
    leaves = [one.detach().clone().requires_grad_() for call in calls for one in call[3:5]]
    lists = [list(column) for column in zip(*calls, strict=True)]
    with select.force_plan(plan):
        together = multi_lora_linears(
            x, lists[1], lists[2], leaves[0::2], leaves[1::2], *lists[5:8],
            *(column[0] for column in lists[8:11]), lists[11], calls[0][12], 5,
        )  # fmt: skip
        alone = [
            multi_lora_linear(x, *call[1:3], *leaves[2 * k : 2 * k + 2], *call[5:], max_rank=5)
            for k, call in enumerate(calls)
        ]
        found = torch.autograd.grad(sum(y.sin().sum() for y in together), (x, *leaves))
        wanted = torch.autograd.grad(sum(y.sin().sum() for y in alone), (x, *leaves))

    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    torch.testing.assert_close(found[0], wanted[0])
    assert all(torch.equal(one, other) for one, other in zip(found[1:], wanted[1:], strict=True))


def test_short_rows_have_the_gradients_of_longer_ones(lora, monkeypatch):
    """Bit by bit, whether shares of one chunk each are added up or not."""
    made = lora((17, 0, 4), (3, 2, 40), (0.3, 0.0, 0.2), dtype=torch.float32)
    found, _ = results(made, max_rank=40)
    monkeypatch.setattr(launch.KernelCall, "is_short", False)
    summed, _ = results(made, max_rank=40)

    assert all(torch.equal(one, other) for one, other in zip(found, summed, strict=True))


def test_tiles_of_expand_are_asked_for_by_what_it_writes(lora, monkeypatch):
    """The output's columns without masks, the input's with them, whatever is summed."""
    asked, tile_for = [], select.tile_for

    def noted(kind, site, tokens, gpu, sites=1):
        asked.extend([select.family(kind, site, sites)] * (kind == "expand"))
        return tile_for(kind, site, tokens, gpu, sites)

    monkeypatch.setattr(select, "tile_for", noted)
    made = lora((9, 4), (3, 5), (0.3, 0.0), features=(32, 48), dtype=torch.float32)
    with select.force_plan("sidecar"):
        results(made, max_rank=5)

    assert asked == ["expand 48 float32 r16 out_in keep", "expand 32 float32 r16 out_in drop"]


@pytest.mark.parametrize(("strict", "launches"), [(False, 1), (True, 2)])
def test_narrow_sites_are_passed_over_with_the_widest(lora, monkeypatch, strict, launches):
    """Cut as it is, but not in strict mode, where each has the bits that it has alone."""
    kinds, kernel = [], launch.kernel

    def noted(kind, *args, **fields):
        kinds.append(kind)
        return kernel(kind, *args, **fields)

    monkeypatch.setattr(launch, "kernel", noted)
    cuts = {64: Tile(32, 32, 0, 4, 2, 512, 32), 32: Tile(32, 16, 0, 4, 2, 512, 16)}
    monkeypatch.setattr(launch, "rule_of", lambda kind, site: cuts_of(kind, site, cuts))
    sites = [
        lora((9, 4), (3, 5), features=(32, width), dtype=torch.float32) for width in (64, 32, 32)
    ]
    calls = [site.arguments(x=sites[0].x) for site in sites]
    leaves = [one.detach().clone().requires_grad_() for call in calls for one in call[3:5]]
    lists = [list(column) for column in zip(*calls, strict=True)]
    with select.strict(strict):
        together = multi_lora_linears(
            sites[0].x, lists[1], lists[2], leaves[0::2], leaves[1::2], *lists[5:8],
            *(column[0] for column in lists[8:11]), lists[11], calls[0][12], 5, False,
        )  # fmt: skip
        found = torch.autograd.grad(sum(y.sin().sum() for y in together), leaves)
    alone = [site.reference(sites[0].x, *leaves[2 * k : 2 * k + 2]) for k, site in enumerate(sites)]
    wanted = torch.autograd.grad(sum(y.sin().sum() for y in alone), leaves)

    assert kinds.count("lora_b_backward") == kinds.count("sum_ds") == launches
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() <= 1e-5 * other.norm()


def cuts_of(kind, site, cuts, rule_of=launch.rule_of):
    """The rule, but for `lora_b_backward` by the site's width."""
    return cuts[site.outer] if kind == "lora_b_backward" else rule_of(kind, site)


@pytest.mark.parametrize("plan", select.PLANS)
def test_weights_stored_by_columns_are_served(lora, plan):
    """GPT-2's Conv1D holds [in, out]."""
    made = lora((9, 4), (3, 5), features=(32, 48), dtype=torch.float32)
    made.weight = made.weight.t().contiguous().t()
    with select.force_plan(plan):
        assert_close(*results(made, drops=False), BOUNDS[torch.float32])
