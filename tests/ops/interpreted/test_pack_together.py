"""What sites of a row pack by one launch is what each packs by its own."""

import pytest
import torch

from tlora_fx.ops import multi_lora_linear, multi_lora_linears
from tlora_fx.ops.kernels import extend_weight, launch, packed, select
from tlora_fx.ops.kernels.pack_together import Packing, noting, serving

LENGTHS = (5, 0, 4)


@pytest.fixture
def packs(monkeypatch):
    """How often kernels called `pack` start; no call is served by a recipe."""
    started, kernel = [], launch.kernel

    def noted(kind, *args, **fields):
        if kind == "pack":
            started.append(kind)
        return kernel(kind, *args, **fields)

    monkeypatch.setattr(launch, "kernel", noted)
    monkeypatch.setattr(
        launch.KernelCall, "serve", lambda self, function, *args: function(self, *args)
    )
    return started


@pytest.fixture
def row(lora):
    """Makes three sites of other shapes and ranks, the second stored by columns, and runs them.

    returns   outputs and gradients of the leaves, a site after the other
    """
    shapes = ((32, 48), (560, 32), (64, 1040))
    ranks = ((3, 5, 0), (4, 0, 17), (40, 1, 2))
    sites = [
        lora(LENGTHS, own, features=shape, dtype=torch.float16)
        for own, shape in zip(ranks, shapes, strict=True)
    ]
    leaves = [leaf.detach().clone().requires_grad_() for site in sites for leaf in (site.a, site.b)]
    calls = []
    for index, site in enumerate(sites):
        call = list(site.arguments(a=leaves[2 * index], b=leaves[2 * index + 1]))
        call[1] = extend_weight(call[1].t().contiguous().t() if index == 1 else call[1], 64)
        calls.append((call, max(ranks[index])))

    def run():
        found = []
        for index, (call, most) in enumerate(calls):
            y = multi_lora_linear(*call, max_rank=most, drops=False)
            own = leaves[2 * index : 2 * index + 2]
            found += [y.detach(), *torch.autograd.grad(y.float().sin().sum(), own)]
        return found

    run.leaves = leaves
    run.weights = [torch.empty(0, dtype=torch.float16).set_(call[1].untyped_storage())
                   for call, _ in calls]  # fmt: skip
    return run


@pytest.fixture
def joined(lora, monkeypatch):
    """As `row`, of two sites whose weights stand in one buffer, 32 columns for each."""
    monkeypatch.setattr(packed, "is_traced", lambda: True)
    sites = [
        lora(LENGTHS, own, features=(64, wide), dtype=torch.float16)
        for own, wide in (((3, 5, 0), 96), ((4, 0, 17), 80))
    ]
    lists = [list(column) for column in zip(*(site.arguments() for site in sites), strict=True)]
    a, b = ([leaf.detach().clone().requires_grad_() for leaf in lists[k]] for k in (3, 4))
    weights = packed.join(lists[1], 21)

    def run():
        ys = multi_lora_linears(
            sites[0].x, weights, lists[2], a, b, *lists[5:8],
            *(column[0] for column in lists[8:11]), lists[11], lists[12][0], 17, False,
        )  # fmt: skip
        total = sum(y.float().sin().sum() for y in ys)
        return [*(y.detach() for y in ys), *torch.autograd.grad(total, (*a, *b))]

    run.leaves = [*a, *b]
    run.weights = [torch.empty(0, dtype=torch.float16).set_(weights[0].untyped_storage())]
    return run


def buffers(weights):
    """All that `pack` writes, as bytes: NaN of flags are equal so."""
    helds = [part for held in packed._packed.values() for part in (held.a, held.b, held.flags)]
    return [part.clone().view(torch.uint8) for part in (*helds, *weights)]


@pytest.mark.parametrize("plan", ["concat", "sidecar"])
def test_one_launch_packs_what_each_site_packs(row, packs, plan):
    """Bit by bit, into buffers and behind weights, and of adapters that have changed since."""
    with select.force_plan(plan):
        assert_packs_at_once(row, packs)

    assert len(packs) == 3


def test_one_launch_packs_behind_joined_weights(joined, packs):
    """Each site's adapters into its own columns alone."""
    assert_packs_at_once(joined, packs)

    assert len(packs) == 1


def assert_packs_at_once(row, packs):
    """One launch writes what sites write by themselves; `packs` then holds their launches."""
    packed.forget()
    packing = Packing()
    with noting(packing):
        row()
    packing.settle(torch.device("cpu"))
    with torch.no_grad():
        for leaf in row.leaves:
            leaf.mul_(1.5)
        row.leaves[0][1, 3] = float("inf")
    packs.clear()
    with serving(packing):
        once, found = buffers(row.weights), row()
    assert not packs
    apart, expected = row(), buffers(row.weights)
    assert all(torch.equal(one, other) for one, other in zip(once, expected, strict=True))
    for one, other in zip(found, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_sites_that_share_their_adapters_pack_for_themselves(row, packs):
    """Two tables of one pair of adapters would write the same buffers."""
    packing = Packing()
    with noting(packing):
        row()
    (work, *_) = packing.works
    packing.works.append(type(work)(work.site, work.jobs, (*work.reads[:3], 0), work.writes,
                                    work.blocks, work.tail))  # fmt: skip
    packing.settle(torch.device("cpu"))

    assert work not in packing.served
    assert len(packing.served) == 2
