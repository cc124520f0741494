"""Room behind x and dy: S and dS stand there, and nothing is written anywhere else."""

import pytest
import torch

from tests.sampled import sampled
from tlora_fx.ops import multi_lora_linear, multi_lora_linears
from tlora_fx.ops.kernels import extend_weight, launch, packed, select, support

BOUND = 1e-5
FEATURES = (32, 48)
SLOW = [pytest.mark.slow]
# "concat" stands in the room, so it is run with dropout and without; the others once.
QUICK = {("fused", "drop"), ("sidecar", "keep"), ("concat", "drop"), ("concat", "keep")}
ops = torch.ops.tlora_fx


def widen(value, columns):
    """As `packed.widen`, with NaN in the room."""
    return torch.nn.functional.pad(value, (0, columns), value=float("nan"))


@pytest.fixture
def traced(monkeypatch):
    """Everything runs as if a compiler traced it; tells whether x and dy were copied."""
    copies = []

    def watched(name):
        plain = getattr(launch.KernelCall, name)

        def call(self, *args, copies_=copies, **kwargs):
            given = kwargs.get("copies", any(args[6]) if name == "lora_b_backward" else None)
            copies_.append((name, given))
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(launch.KernelCall, name, call)

    monkeypatch.setattr(packed, "is_traced", lambda: True)
    monkeypatch.setattr(packed, "widen", lambda values, n: widen(torch.cat(values, -1), n))
    watched("shrink")
    watched("lora_b_backward")
    return copies


def assert_close(found, expected):
    """Each is within the bound of the reference's norm."""
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= BOUND * other.norm()


def results(made, **other):
    """Output and gradients of the operator, and of the reference."""
    x, a, b = made.leaves()
    y = multi_lora_linear(*made.arguments(x=x, a=a, b=b), **other)
    expected = made.reference(x, a, b)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    found = torch.autograd.grad(y, (x, a, b), dy.to(y.dtype))
    wanted = torch.autograd.grad(expected, (x, a, b), dy)
    return (y.detach(), *found), (expected.detach(), *wanted)


@pytest.mark.parametrize(
    ("plan", "rates"),
    [
        pytest.param(plan, rates, id=f"{plan}-{name}", marks=SLOW * ((plan, name) not in QUICK))
        for plan in select.PLANS
        for name, rates in {"keep": (0.0,) * 3, "drop": (0.3, 0.0, 0.2)}.items()
    ],
)
def test_every_plan_takes_rows_with_room(lora, traced, plan, rates):
    """Numbers are the reference's, and where jobs drop nothing neither x nor dy is copied."""
    made = lora((17, 0, 1), (3, 2, 18), rates, features=FEATURES, dtype=torch.float32)
    made.weight = extend_weight(made.weight, 64)
    with select.force_plan(plan):
        found, expected = results(made, max_rank=18, drops=any(rates))

    assert_close(found, expected)
    assert dict(traced) == {"shrink": False, "lora_b_backward": any(rates)}


@pytest.mark.parametrize("plan", sampled(select.PLANS))
def test_sites_that_share_x_share_its_room(lora, traced, plan):
    """Three linears of other widths and ranks, on weights with room of their own."""
    ranks = ((3, 5), (40, 30), (2, 1))
    sites = [
        lora((9, 4), own, features=(32, width), dtype=torch.float32)
        for own, width in zip(ranks, (16, 48, 16), strict=True)
    ]
    calls = [site.arguments(x=sites[0].x) for site in sites]
    lists = [list(column) for column in zip(*calls, strict=True)]
    weights = [extend_weight(weight, 128) for weight in lists[1]]
    x = sites[0].x.clone().requires_grad_()
    leaves = [one.detach().clone().requires_grad_() for call in calls for one in call[3:5]]
    with select.force_plan(plan):
        together = multi_lora_linears(
            x, weights, lists[2], leaves[0::2], leaves[1::2], *lists[5:8],
            *(column[0] for column in lists[8:11]), lists[11], calls[0][12], 70, False,
        )  # fmt: skip
        alone = [site.reference(x, *leaves[2 * k : 2 * k + 2]) for k, site in enumerate(sites)]
        found = torch.autograd.grad(sum(y.sin().sum() for y in together), (x, *leaves))
        wanted = torch.autograd.grad(sum(y.sin().sum() for y in alone), (x, *leaves))

    assert_close((*together, *found), (*alone, *wanted))
    assert not any(copied for _, copied in traced)


@pytest.fixture
def joined(lora, traced):
    """Makes three linears on one x whose weights stand in one buffer, and what calls them.

    returns   results of the operator: ys, and gradients of x and all leaves; and the reference's
    """
    ranks = ((3, 5, 0), (4, 0, 17), (2, 1, 9))

    def make(rates=(0.0,) * 3, bias=False, lengths=(9, 4, 1), rows=64, called=3):
        sites = [
            lora(lengths, own, rates, features=(32, width), dtype=torch.float32, bias=bias)
            for own, width in zip(ranks, (32, 16, 16), strict=True)
        ]
        calls = [site.arguments(x=sites[0].x) for site in sites]
        lists = [list(column) for column in zip(*calls, strict=True)]
        weights = packed.join(lists[1], rows)[:called]
        sites, lists = sites[:called], [column[:called] for column in lists]
        leaves = [one.detach().clone().requires_grad_() for call in calls for one in call[3:5]]
        leaves = leaves[: 2 * called]

        def run(seed=0):
            x = torch.randn(sites[0].x.shape, generator=torch.Generator().manual_seed(seed))
            x.requires_grad_()
            ys = multi_lora_linears(
                x, weights, lists[2], leaves[0::2], leaves[1::2], *lists[5:8],
                *(column[0] for column in lists[8:11]), lists[11], calls[0][12], 17, any(rates),
            )  # fmt: skip
            wanted = [site.reference(x, *leaves[2 * k : 2 * k + 2]) for k, site in enumerate(sites)]
            both = []
            for values in (ys, wanted):
                total = sum((value.double() / 8).sin().sum() for value in values)
                gradients = torch.autograd.grad(total, (x, *leaves))
                both.append([*(value.detach() for value in values), *gradients])
            return both

        return run

    return make


@pytest.mark.parametrize(("rows", "step"), [(64, 64), (21, 32)], ids=["wide", "tight"])
@pytest.mark.parametrize("rates", [(0.0,) * 3, (0.3, 0.0, 0.2)], ids=["keep", "drop"])
def test_joined_weights_give_all_outputs_by_one_product(joined, monkeypatch, rates, rows, step):
    """Both ways, but where masks part dx from the branches its product stands alone."""
    products, plain = [], torch.mm

    def watched(*args, **kwargs):
        products.append(args[1].shape)
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", watched)
    run = joined(rates, rows=rows)

    for seed in range(4):  # the second is written down, the others are started again
        assert_close(*run(seed))

    both = [(32 + 3 * step, 64), (64 + 3 * step, 32)]
    assert products == 2 * both[: 1 if any(rates) else 2]


@pytest.fixture
def products(monkeypatch):
    """Shapes of the second operands of products that write where they are told."""
    shapes, plain = [], torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda *args, **kw: shapes.append(args[1].shape) or plain(*args, **kw)
    )
    return shapes


def test_two_joined_weights_share_64_columns(joined, products, monkeypatch):
    """As gate and up of few rows: 32 each. Here q and k, the other one being a lone weight."""
    both = packed.join

    monkeypatch.setattr(packed, "join", lambda weights, rows: both(weights[:2], rows))
    assert_close(*joined(rows=21, called=2)())

    assert products == [(32 + 64, 48), (48 + 64, 32)]


@pytest.mark.parametrize("rows", [16, 21, 64])
def test_some_of_joined_weights_do_not_pass_for_all(joined, products, rows):
    """Behind two of three stands the third one, not their adapters."""
    assert_close(*joined(rows=rows, called=2)())

    assert not products


def test_adapters_of_more_rows_than_joined_weights_have_room_for(joined, products):
    """21 rows of one site do not fit 16 columns: plans of single sites serve."""
    assert_close(*joined(rows=16)())

    assert not products


@pytest.mark.parametrize("gap", [16, 32 + 64, 64 * 5])
def test_rows_of_a_wider_matrix_are_not_taken_for_joined_weights(gap):
    """Its columns beside them are somebody's."""
    whole = torch.zeros(64, 32 + gap)

    assert not packed.step_of([whole[:32, :32], whole[32:, :32]])


def test_joined_weights_take_biases(joined):
    """Each site's own, side by side."""
    assert_close(*joined(bias=True)())


@pytest.mark.parametrize("plan", ["fused", "sidecar"])
def test_joined_weights_serve_plans_of_single_sites(joined, plan):
    """They write into their columns of what holds all outputs."""
    run = joined()
    with select.force_plan(plan):
        assert_close(*run())


@pytest.mark.parametrize("plan", ["fused", "sidecar"])
def test_before_hopper_kernels_take_weights_with_room_too(lora, traced, monkeypatch, plan):
    """Rows of a weight stand further apart than it is wide."""
    monkeypatch.setattr(support, "arch_of", lambda device: 80)
    support._known.clear()
    made = lora((17, 0, 1), (3, 2, 18), features=FEATURES, dtype=torch.float32)
    made.weight = extend_weight(made.weight, 64)

    with select.force_plan(plan):
        assert_close(*results(made, max_rank=18, drops=False))
    support._known.clear()


def test_joined_weights_run_in_strict_mode(joined):
    """A graph that was traced before it was turned on."""
    run = joined()
    with select.strict():
        assert_close(*run())


def test_calls_that_are_started_again_use_their_own_room(lora, traced):
    """The fourth call of a kind equals its reference, as the first does."""
    made = lora((9, 4), (3, 5), features=FEATURES, dtype=torch.float32)
    made.weight = extend_weight(made.weight, 64)
    with select.force_plan("concat"):
        for _ in range(4):
            made.x = torch.randn(made.x.shape)
            assert_close(*results(made, max_rank=5, drops=False))

    assert len(traced) < 2 * 4


def given(made, x, columns):
    """Arguments of the inner forward."""
    _, weight, bias, a, b, ranks, scales, rates, *row, site, kind = made.arguments()
    lists = [[one] for one in (weight, bias, a, b, ranks, scales, rates)]
    return x, *lists, *row, [site], kind, 0, False, columns


def forward(made, x, columns):
    """y, by the inner operator."""
    return ops.multi_lora_forward(*given(made, x, columns))[0]


def test_without_room_nothing_is_written_behind_rows(lora):
    """Whatever the strides of x say: columns behind it belong to somebody else."""
    made = lora((4, 5), (3, 2), features=FEATURES, dtype=torch.float32)
    whole = widen(made.x, 64)
    with select.force_plan("concat"):
        found = forward(made, whole[..., :32], 0)

    assert_close([found], [made.reference(made.x, made.a, made.b)])
    assert whole[..., 32:].isnan().all()


def test_room_ends_with_its_row(lora):
    """Rows that follow the last, and columns behind the room, stay as they are."""
    made = lora((4, 5), (3, 2), features=FEATURES, dtype=torch.float32)
    expected = made.reference(made.x, made.a, made.b)
    below = torch.cat([widen(made.x, 64), torch.full((1, 3, 96), float("nan"))], 1)
    with select.force_plan("concat"):
        found = forward(made, below[:, :9], 64)

    assert_close([found], [expected])
    assert below[:, 9:].isnan().all()
    assert below[:, :9].isfinite().all()

    beside = widen(made.x, 64 + 32)
    with select.force_plan("concat"):
        found = forward(made, beside[..., :96], 64)

    assert_close([found], [expected])
    assert beside[..., 96:].isnan().all()


def test_too_little_room_is_not_used(lora):
    """Adapters of 70 rows take 128 columns."""
    made = lora((4, 5), (40, 30), features=FEATURES, dtype=torch.float32)
    whole = widen(made.x, 64)
    with select.force_plan("concat"):
        found = forward(made, whole, 64)

    assert_close([found], [made.reference(made.x, made.a, made.b)])
    assert whole[..., 32:].isnan().all()
