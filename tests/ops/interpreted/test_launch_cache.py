"""What one call started is started again for others of its kind, with their tensors."""

import pytest
import torch

from tests.ops.batches import run
from tests.sampled import sampled
from tlora_fx.ops import multi_lora_linear, multi_lora_linears
from tlora_fx.ops.kernels import force_plan, launch, launch_cache, refresh, select

SHAPE, LENGTHS, RANKS = (32, 48), (4, 0, 3), (3, 2, 5)
OUTERS = (48, 16)
SLOW = [pytest.mark.slow]
QUICK = {("fused", "drop"), ("sidecar", "keep")}


@pytest.fixture
def direct(monkeypatch):
    """Let no call be served by a recipe."""

    def off():
        monkeypatch.setattr(
            launch.KernelCall, "serve", lambda self, function, *args: function(self, *args)
        )

    return off


@pytest.fixture
def served(monkeypatch):
    """How many calls recipes served."""
    counts = [0]
    serve = launch_cache.Recipe.serve

    def counted(*args):
        counts[0] += 1
        return serve(*args)

    monkeypatch.setattr(launch_cache.Recipe, "serve", counted)
    return counts


def others(made, seed):
    """Other numbers for a site: x, a, b, dy."""
    draw = torch.Generator().manual_seed(seed)

    def normal(like):
        return torch.randn(like.shape, generator=draw).to(like.dtype)

    dy = torch.empty(1, sum(LENGTHS), SHAPE[1], dtype=made.x.dtype)
    return {"x": normal(made.x), "a": normal(made.a), "b": normal(made.b), "dy": normal(dy)}


@pytest.mark.parametrize(
    ("plan", "rates"),
    [
        pytest.param(plan, rates, id=f"{plan}-{name}", marks=SLOW * ((plan, name) not in QUICK))
        for plan in select.PLANS
        for name, rates in {"keep": (0.0,) * 3, "drop": (0.3, 0.2, 0.0)}.items()
    ],
)
def test_calls_with_other_tensors_get_their_own_numbers(lora, plan, rates, served, direct):
    """Every plan; other adapters, other seeds, other weights."""
    made = lora(LENGTHS, RANKS, rates, dtype=torch.float16, features=SHAPE)
    rounds = [others(made, seed) for seed in range(4)]
    weights = [torch.randn(made.weight.shape).half() for _ in rounds]

    def all_rounds():
        results = []
        for step, (one, made.weight) in enumerate(zip(rounds, weights, strict=True)):
            made.row.keys = made.row.keys.clone()
            made.row.keys[:, 1] = step
            results.append(run(made, **one, max_rank=16, drops=any(rates)))
        return results

    with force_plan(plan):
        found = all_rounds()
        assert served[0] >= 4
        direct()
        expected = all_rounds()
    for own, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(own, wanted, strict=True))


@pytest.mark.parametrize(
    ("plan", "rates"),
    sampled([("fused", (0.3, 0.2, 0.0)), ("sidecar", (0.0,) * 3)]),
    ids=["fused-drop", "sidecar-keep"],
)
def test_groups_of_unequal_sites_equal_each_alone(lora, plan, rates, served):
    """q and k share one read of x, whatever their widths; so do their recipes."""
    made = [
        lora(LENGTHS, RANKS, rates, dtype=torch.float32, features=(SHAPE[0], outer))
        for outer in OUTERS
    ]
    drops = any(rates)
    with force_plan(plan):
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(made[0].x.shape, requires_grad=True)
            leaves = [
                torch.randn(part.shape, requires_grad=True)
                for one in made
                for part in (one.a, one.b)
            ]
            calls = [
                one.arguments(x=x, a=leaves[2 * k], b=leaves[2 * k + 1])
                for k, one in enumerate(made)
            ]
            lists = [list(column) for column in zip(*calls, strict=True)]
            together = multi_lora_linears(
                x, *lists[1:8], *calls[0][8:11], lists[11], torch.float32, 16, drops
            )
            dys = [torch.randn_like(y) for y in together]
            found = torch.autograd.grad(together, (x, *leaves), dys)
        assert served[0] >= 3
        alone = [multi_lora_linear(*call, max_rank=16, drops=drops) for call in calls]
        wanted = torch.autograd.grad(alone, (x, *leaves), dys)
    for one, other in zip((*together, *found), (*alone, *wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_changed_tables_and_adapters_are_seen_at_once(lora, served, direct):
    """A table refreshed in place, adapters stepped in place, another plan: none is missed."""
    made = lora(LENGTHS, RANKS, dtype=torch.float32, features=SHAPE)
    x, weight, bias, a, b, ranks, scales, *rest = made.arguments()
    dy = torch.randn(1, sum(LENGTHS), SHAPE[1])
    a, b, x = (one.clone().requires_grad_() for one in (a, b, x))

    def step(plan="fused"):
        with force_plan(plan):
            y = multi_lora_linear(x, weight, bias, a, b, ranks, scales, *rest, max_rank=16)
            return (y.detach(), *torch.autograd.grad(y, (x, a, b), dy))

    def change(number):
        with torch.no_grad():
            a.mul_(1.5)
        if number % 2:
            scales[1] += 1
            refresh(scales)

    found = []
    for number in range(6):
        change(number)
        found.append(step("fused" if number < 4 else "sidecar"))
    assert served[0] >= 3
    direct()
    with torch.no_grad():
        a.div_(1.5**6)
        scales[1] -= 3
    for number, own in enumerate(found):
        change(number)
        wanted = step("fused" if number < 4 else "sidecar")
        for one, other in zip(own, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_tensor_that_stands_for_two_is_not_written_down(lora, monkeypatch):
    """Sites whose outputs are added get one gradient, which later calls need not share."""
    made = [lora(LENGTHS, RANKS, dtype=torch.float32, features=SHAPE) for _ in range(2)]
    calls = [one.arguments(x=made[0].x) for one in made]
    lists = [list(column) for column in zip(*calls, strict=True)]
    x = made[0].x.clone().requires_grad_()
    shared = torch.randn(1, sum(LENGTHS), SHAPE[1])
    apart = [torch.randn_like(shared) for _ in made]

    def gradient(dys):
        made = multi_lora_linears(
            x, *lists[1:8], *calls[0][8:11], lists[11], torch.float32, 16, False
        )
        return torch.autograd.grad(made, x, dys)[0]

    with force_plan("fused"):
        together = [gradient([shared, shared]) for _ in range(5)]
        different = gradient(apart)
        assert all(torch.equal(one, together[0]) for one in together)
    monkeypatch.setenv("TLORA_FX_KERNELS", "off")
    torch.testing.assert_close(different, gradient(apart), rtol=1e-4, atol=1e-4)
