"""The operators on generated kernels on CUDA, at real sizes, against float64."""

import pytest
import torch

from tests.ops.adapted import Adapted, both
from tests.ops.batches import batch, jobs_of, run, split
from tests.ops.token_scale import token_scale
from tlora_fx.codegen import loading
from tlora_fx.ops import keep_mask, multi_lora_linear, multi_lora_linears
from tlora_fx.ops.kernels import (
    extend_weight,
    force_plan,
    launch,
    launch_cache,
    packed,
    refresh,
    select,
    strict,
)
from tlora_fx.parallel.capturing import add_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, FP16 = torch.bfloat16, torch.float16
SHAPE = (1024, 768)
LENGTHS, RANKS, RATES = (700, 1, 0, 129, 1400), (16, 1, 8, 32, 5), (0.05, 0.0, 0.3, 0.1, 0.0)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel does not write is NaN, or all ones."""

    def empty(shape, *, dtype, device):
        value = float("nan") if dtype.is_floating_point else 255
        return torch.full(shape, value, dtype=dtype, device=device)

    monkeypatch.setattr(launch, "empty", empty)


@pytest.fixture
def site(lora):
    """A site on CUDA; bf16, adapters in float32."""

    def make(lengths=LENGTHS, ranks=RANKS, rates=RATES, **other):
        given = {"features": SHAPE, "dtype": BF16, "adapter_dtype": torch.float32, "bias": False}
        given |= {"compute": other.get("dtype", BF16), "device": "cuda"} | other
        return lora(lengths, ranks, rates, **given)

    return make


def dropped(made):
    """What dropout multiplies with, float64."""
    rates, segments, keys, index, number = made.row.mask_tables()
    keep = keep_mask(rates, segments, keys, index, number, made.x.shape[-1])
    return keep * token_scale(rates, segments, made.row.tokens).to("cuda")[:, None]


def errors(made, monkeypatch, **other):
    """Of output and gradients: the error of kernels, and that of plain PyTorch in this dtype."""
    x, a, b = made.leaves()
    expected = made.reference(x, a, b, dropped(made))
    dy = torch.randn(expected.shape, dtype=torch.float64, device="cuda")
    wanted = (expected.detach(), *torch.autograd.grad(expected, (x, a, b), dy))
    found = run(made, dy.to(made.x.dtype), **other)
    monkeypatch.setenv("TLORA_FX_KERNELS", "off")
    plain = run(made, dy.to(made.x.dtype))
    monkeypatch.delenv("TLORA_FX_KERNELS")
    return [
        tuple(float((one.double() - exact).norm() / exact.norm()) for one in pair)
        for *pair, exact in zip(found, plain, wanted, strict=True)
    ]


def assert_close(pairs):
    """At most twice the error of plain PyTorch."""
    assert all(ours <= 2 * theirs for ours, theirs in pairs), pairs


def launched():
    """How many kernels were generated, and how many binaries Triton made of them."""
    caches = [
        cache
        for module in loading._loaded.values()
        for cache in module.kernel.function.device_caches.values()
    ]
    return len(loading._loaded), sum(len(cache[0]) for cache in caches)


@pytest.mark.parametrize("rates", [(0.0,) * 5, RATES], ids=["keep", "drop"])
@pytest.mark.parametrize("plan", select.PLANS)
def test_every_plan_is_as_exact_as_pytorch(site, monkeypatch, plan, rates):
    """Unequal, single-token and empty jobs."""
    made = site(rates=rates)
    with force_plan(plan):
        assert_close(errors(made, monkeypatch, max_rank=32, drops=any(rates)))


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": FP16},
        {"bias": True},
        {"ranks": (128, 1, 0, 33, 64), "bias": True},
        {"ranks": (64, 1, 0, 33, 8), "bias": True},
        {"adapter_dtype": BF16},
    ],
    ids=["fp16", "bias", "large ranks", "middle ranks", "bf16 adapters"],
)
def test_other_sites_are_as_exact_as_pytorch(site, monkeypatch, other):
    """On the fused plan, with dropout."""
    with force_plan("fused"):
        assert_close(errors(site(**other), monkeypatch, max_rank=max(other.get("ranks", RANKS))))


@pytest.mark.parametrize(
    "lengths",
    [LENGTHS, (100, 1, 0, 129, 140), (100, 1, 0, 629, 140)],
    ids=["chunks", "whole", "wide chunk"],
)
@pytest.mark.parametrize("rates", [(0.0,) * 5, RATES], ids=["keep", "drop"])
@pytest.mark.parametrize("ranks", [RANKS, (128, 1, 0, 33, 64)], ids=["", "large ranks"])
@pytest.mark.parametrize("adapter_dtype", [torch.float32, BF16], ids=["float32", "bfloat16"])
def test_kernels_add_gradients_as_a_sum_behind_them_adds(
    site, monkeypatch, adapter_dtype, ranks, rates, lengths
):
    """To the bit, eagerly and replayed; a job without tokens keeps what it has."""
    made = site(lengths=lengths, ranks=ranks, rates=rates, adapter_dtype=adapter_dtype)
    tables = made.arguments()[5:]
    one, two = both(lambda: Adapted(made, tables=tables), monkeypatch)
    assert all(map(torch.equal, one, two))

    model = Adapted(made, tables=tables)
    before = [model.a.grad.clone(), model.b.grad.clone()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_gradients(model(), model, 10**9)
    assert all(map(torch.equal, [model.a.grad, model.b.grad], before))
    graph.replay()
    assert all(map(torch.equal, [model.a.grad, model.b.grad], one))


def test_conv1d_is_as_exact_as_pytorch(site, monkeypatch):
    """GPT-2 stores [in, out]."""
    made = site(bias=True)
    made.weight = made.weight.t().contiguous().t()
    with force_plan("fused"):
        assert_close(errors(made, monkeypatch, max_rank=32))


def test_rows_that_no_tile_divides_are_exact(site, monkeypatch):
    """One token beside many; fewer tokens than a tile."""
    for lengths in ((1, 2047), (3, 5), (127, 129)):
        made = site(lengths, (4, 16), (0.1, 0.1))
        with force_plan("fused"):
            assert_close(errors(made, monkeypatch, max_rank=32))


def errors_together(made, monkeypatch, plan=None):
    """As `errors`, of sites that share x: outputs, dx, dA and dB; plan None: the one that pays."""
    calls = [one.arguments(x=made[0].x) for one in made]
    x, *leaves = made[0].x, *(leaf for call in calls for leaf in call[3:5])
    leaves = [one.detach().clone().requires_grad_() for one in (x, *leaves)]
    x, a, b = leaves[0], leaves[1::2], leaves[2::2]
    expected = [
        one.reference(x, *pair, dropped(one)) for one, *pair in zip(made, a, b, strict=True)
    ]
    dys = [torch.randn(y.shape, dtype=torch.float64, device="cuda").to(BF16) for y in expected]
    wanted = torch.autograd.grad(expected, leaves, [dy.double() for dy in dys])
    largest, drops = max(made[0].ranks), any(made[0].row.rates)

    def together():
        lists = [list(column) for column in zip(*calls, strict=True)]
        ys = multi_lora_linears(
            x, *lists[1:3], a, b, *lists[5:8], *calls[0][8:11], lists[11], BF16, largest, drops
        )
        return (*ys, *torch.autograd.grad(ys, leaves, dys))

    with force_plan(plan):
        found = together()
    monkeypatch.setenv("TLORA_FX_KERNELS", "off")
    plain = together()
    monkeypatch.delenv("TLORA_FX_KERNELS")
    return [
        tuple(float(((one - exact).norm() / exact.norm()).detach()) for one in pair)
        for *pair, exact in zip(found, plain, (*expected, *wanted), strict=True)
    ]


@pytest.mark.parametrize("rates", [(0.0,) * 5, RATES], ids=["keep", "drop"])
@pytest.mark.parametrize("plan", ["fused", "sidecar"])
def test_sites_that_share_x_are_as_exact_as_pytorch(site, monkeypatch, plan, rates):
    """q, k and v of unequal widths."""
    made = [site(features=(SHAPE[0], width), rates=rates) for width in (768, 256, 256)]
    assert_close(errors_together(made, monkeypatch, plan))


@pytest.mark.parametrize("rate", [0.0, 0.05], ids=["keep", "drop"])
@pytest.mark.parametrize("tokens", [160, 1280, 5120])
@pytest.mark.parametrize(
    ("inner", "widths"),
    [(3072, (3072, 1024, 1024)), (3072, (8192, 8192)), (8192, (3072,)), (1536, (896,))],
    ids=["qkv", "gate up", "down", "no tile divides"],
)
def test_ranks_of_several_blocks_are_as_exact_as_pytorch(
    site, monkeypatch, inner, widths, tokens, rate
):
    """Ranks to 64 in blocks of 32: each plan, and the one that pays."""
    ranks = (8, 16, 32, 64, 33, 64, 1, 40)
    lengths = (tokens // 4, 1, tokens // 8 - 1, 20, 28, 0, tokens // 8, 0)
    lengths = (*lengths[:-1], tokens - sum(lengths))
    made = [site(lengths, ranks, (rate,) * 8, features=(inner, width)) for width in widths]
    for plan in (None, "fused", "sidecar"):
        assert_close(errors_together(made, monkeypatch, plan))


@pytest.mark.parametrize("rate", [0.0, 0.05], ids=["keep", "drop"])
@pytest.mark.parametrize("tokens", [1280, 5120])
@pytest.mark.parametrize(
    ("inner", "widths"),
    [(4096, (4096, 1024, 1024)), (14336, (4096,)), (4096, (4096,) * 4)],
    ids=["qkv", "down", "four wide"],
)
def test_measured_tiles_are_as_exact_as_pytorch(site, monkeypatch, inner, widths, tokens, rate):
    """The linears of an 8B model, whose tiles tables have: each plan, and the one that pays."""
    ranks = (2, 4, 8, 16, 16, 8, 4, 2)
    lengths = (tokens // 4, 1, tokens // 8 - 1, 100, 28, 0, tokens // 8, 0)
    lengths = (*lengths[:-1], tokens - sum(lengths))
    made = [site(lengths, ranks, (rate,) * 8, features=(inner, width)) for width in widths]
    for plan in (None, "fused", "sidecar"):
        assert_close(errors_together(made, monkeypatch, plan))


@pytest.mark.parametrize("rates", [(0.0,) * 5, RATES], ids=["keep", "drop"])
@pytest.mark.parametrize("plan", select.PLANS)
def test_later_calls_get_their_own_numbers(site, monkeypatch, plan, rates):
    """What the second call started serves the others, with their tensors: see launch_cache.py."""
    made, counts = site(rates=rates), [0]
    serve = launch_cache.Recipe.serve

    def counted(*args):
        counts[0] += 1
        return serve(*args)

    monkeypatch.setattr(launch_cache.Recipe, "serve", counted)
    rounds = []
    for _ in range(4):
        values = {name: torch.randn_like(getattr(made, name)) for name in "xab"}
        values["dy"] = torch.randn(1, made.row.tokens, SHAPE[1], device="cuda").to(BF16)
        rounds.append(values | {"weight": torch.randn_like(made.weight)})

    def results():
        for step, one in enumerate(rounds):
            made.row.keys = made.row.keys.clone()
            made.row.keys[:, 1], made.weight = step, one["weight"]
            leaves = {name: one[name] for name in ("x", "a", "b", "dy")}
            yield run(made, **leaves, max_rank=32, drops=any(rates))

    with force_plan(plan):
        found = list(results())
        assert counts[0] >= 4
        monkeypatch.setattr(launch.KernelCall, "serve", lambda self, call, *args: call(self, *args))
        for own, wanted in zip(found, results(), strict=True):
            assert all(torch.equal(one, other) for one, other in zip(own, wanted, strict=True))


@pytest.mark.parametrize("where", ["x", "dy", "a", "b"])
@pytest.mark.parametrize("plan", ["fused", "sidecar"])
def test_a_nan_stays_in_its_job(site, plan, where):
    """NaN in a job's rows, gradient or adapters leaves the neighbours bitwise unchanged."""
    made = site((200, 60, 300), (8, 8, 8), (0.1, 0.1, 0.0))
    dy = torch.randn(1, 560, SHAPE[1], device="cuda").to(BF16)

    def others(poison):
        given = {"x": made.x.clone(), "a": made.a.clone(), "b": made.b.clone(), "dy": dy.clone()}
        part = given[where][0, 200:260] if where in ("x", "dy") else given[where][8:16]
        if poison:
            part.fill_(float("nan"))
        y, dx, da, db = run(made, given.pop("dy"), **given, max_rank=32)
        assert bool(da[8:16].isnan().any()) == poison or where == "b"
        tokens, ranks = [*range(200), *range(260, 560)], [*range(8), *range(16, 24)]
        return y[0, tokens], dx[0, tokens], da[ranks], db[ranks]

    with force_plan(plan):
        clean, beside = others(False), others(True)
    assert all(torch.equal(one, other) for one, other in zip(clean, beside, strict=True))


def test_a_job_is_bitwise_the_same_alone_beside_others_and_reordered(site):
    """In strict mode neither company nor order changes a bit of a job."""
    made = site()
    dy = torch.randn(1, made.row.tokens, SHAPE[1], device="cuda").to(BF16)
    jobs, order = list(jobs_of(made, dy)), [4, 3, 0, 2, 1]
    with strict():
        whole = split(batch(made, jobs, 32), jobs)
        turned = [jobs[place] for place in order]
        again = split(batch(made, turned, 32), turned)
        for place, job in enumerate(jobs):
            if not LENGTHS[place]:
                continue
            (alone,) = split(batch(made, [job], 32), [job])
            for one, two, three in zip(whole[place], alone, again[order.index(place)], strict=True):
                assert torch.equal(one, two)
                assert torch.equal(one, three)


@pytest.mark.parametrize("plan", select.PLANS)
def test_ten_repeats_are_bitwise_equal(site, plan):
    """Nothing is added up in the order of arrival."""
    made = site(rates=(0.0,) * 5)
    dy = torch.randn(1, made.row.tokens, SHAPE[1], device="cuda").to(BF16)
    with force_plan(plan):
        first, *rest = [run(made, dy, max_rank=32, drops=False) for _ in range(10)]
    for again in rest:
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("plan", select.PLANS)
def test_a_captured_graph_replays_with_other_jobs(site, plan):
    """Jobs leave, bring no tokens, change scale, rank and seed: the tables are refreshed."""
    made = site((300, 200, 500), (8, 16, 4), (0.0,) * 3)
    x, weight, bias, a, b, ranks, scales, rates, segments, keys, index, number, kind = (
        made.arguments()
    )
    dy = torch.randn(1, 1000, SHAPE[1], device="cuda").to(BF16)
    leaves = [one.detach().clone().requires_grad_() for one in (x, a, b)]
    tables = ranks, scales, rates, segments, keys, index, number, kind

    def step():
        x, a, b = leaves
        y = multi_lora_linear(x, weight, bias, a, b, *tables, max_rank=32, drops=False)
        return (y, *torch.autograd.grad(y, leaves, dy))

    with force_plan(plan):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        before = launched()
        for bounds, offsets in (
            ((0, 0, 999, 1000), (0, 8, 24, 28)),
            ((0, 10, 10, 1000), (0, 1, 2, 28)),
        ):
            segments.copy_(torch.tensor(bounds))
            ranks.copy_(torch.tensor(offsets))
            scales[0] += 1
            refresh(segments, ranks, scales)
            graph.replay()
            found = [one.clone() for one in captured]
            expected = step()
            assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
        assert launched() == before


def test_other_jobs_compile_nothing(site):
    """Other lengths, ranks, rates, jobs without tokens: the binaries of long rows and of short."""
    mixes = [
        (LENGTHS, RANKS, RATES),
        ((1, 0, 17, 0, 64), (1, 32, 3, 0, 2), (0.0, 0.1, 0.0, 0.0, 0.5)),
        ((16, 16, 16, 16, 16), (16, 16, 16, 16, 16), (0.1,) * 5),
        ((513,), (7,), (0.2,)),
        ((40,) * 63, (2,) * 63, (0.0,) * 63),
    ]
    counts = []
    with strict():
        for mix in mixes:
            made = site(*mix)
            run(
                made,
                torch.ones(1, made.row.tokens, SHAPE[1], device="cuda", dtype=BF16),
                max_rank=32,
            )
            counts.append(launched())
    # The second is the first of those in which no job has more than a chunk of tokens.
    assert counts[1:] == [counts[1]] * (len(mixes) - 1)


@pytest.mark.parametrize("rates", [(0.0,) * 5, RATES], ids=["keep", "drop"])
def test_a_backward_holds_x_s_and_one_bit_an_element(site, rates):
    """What a site saves beside parameters and tables on the CPU."""
    made, saved = site(rates=rates), {}
    x, a, b = made.leaves()

    def note(tensor):
        own = {one.data_ptr() for one in (made.weight, a, b)}
        if tensor.is_cuda and tensor.data_ptr() not in own:
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        multi_lora_linear(*made.arguments(x=x, a=a, b=b), max_rank=32, drops=any(rates))
    tokens, inner = made.row.tokens, SHAPE[0]
    bits = tokens * inner // 8 if any(rates) else 0
    assert sum(saved.values()) <= 2 * tokens * (inner + 32) + bits + 4 * tokens


def test_a_weight_with_room_needs_no_copy(site, monkeypatch):
    """concat-K on a weight that was made with room for its adapters."""
    made = site(rates=(0.0,) * 5)
    made.weight = extend_weight(made.weight, 64)
    before = made.weight.clone()
    with force_plan("concat"):
        assert_close(errors(made, monkeypatch, max_rank=32, drops=False))
    assert torch.equal(made.weight, before)


@pytest.fixture
def joined(site):
    """Makes q, k and v on one x, compiled, their weights in one buffer; and as they are alone."""
    torch._dynamo.reset()

    def make(lengths=LENGTHS, rates=(0.0,) * 5, spoil=None, ranks=RANKS):
        sites = [site(lengths, ranks, rates, features=(1024, n)) for n in (1024, 256, 256)]
        lists = [list(column) for column in zip(*(one.arguments() for one in sites), strict=True)]
        leaves = [sites[0].x, *lists[3], *lists[4]]
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        if spoil is not None:
            leaves[2].data[spoil] = float("nan")

        # Parameters, as a model has them: their sizes are no symbols.
        weights = torch.nn.ParameterList(
            torch.nn.Parameter(weight, requires_grad=False) for weight in lists[1]
        )

        def run(x, *adapters):
            x = torch.nn.functional.rms_norm(x, (1024,))
            q, k, v = multi_lora_linears(
                x, list(weights), lists[2], list(adapters[:3]), list(adapters[3:]), *lists[5:8],
                *(column[0] for column in lists[8:11]), lists[11], BF16, 32, any(rates),
            )  # fmt: skip
            turned = torch.cat([k[..., 128:], -k[..., :128]], -1)
            return q, k + turned, v

        def join():
            found = packed.join(lists[1], sum(ranks))
            for weight, one in zip(weights, found, strict=True):
                weight.data = one

        def results(compiled):
            ys = compiled(*leaves)
            draw = torch.Generator("cuda").manual_seed(3)
            dys = [torch.randn(y.shape, generator=draw, device="cuda").to(y.dtype) for y in ys]
            gradients = torch.autograd.grad(ys, leaves, dys)
            return [*(y.detach() for y in ys), *gradients]

        return run, results, join

    return make


@pytest.mark.parametrize(("ranks", "step"), [(RANKS, 64), ((4, 1, 2, 7, 2), 16)], ids=["64", "16"])
@pytest.mark.parametrize("rates", [(0.0,) * 5, RATES], ids=["keep", "drop"])
def test_joined_weights_give_what_each_gives_alone(joined, monkeypatch, rates, ranks, step):
    """Compiled, for several numbers of tokens, by one product each way."""
    shapes, plain = [], torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda *args, **kwargs: shapes.append(args[1].shape) or plain(*args, **kwargs)
    )
    for lengths in (LENGTHS, (64, 0, 9, 300, 5)):
        run, results, join = joined(lengths, rates, ranks=ranks)
        wanted = results(run)
        join()
        shapes.clear()
        found = results(torch.compile(run, fullgraph=True, backend="inductor"))
        assert (1024 + 3 * step, 1536) in shapes
        assert ((1536 + 3 * step, 1024) in shapes) == (not any(rates))
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).float().norm() <= 2e-2 * other.float().norm()


def test_joined_weights_keep_jobs_apart(joined):
    """A NaN in one job's adapter leaves its neighbours' bits."""
    found = []
    for spoil in (None, slice(16, 17)):  # the second job's only row
        run, results, join = joined(spoil=spoil)
        join()
        found.append(results(torch.compile(run, fullgraph=True)))
    good, bad = found

    own = slice(700, 701)
    for one, other in zip(good[:4], bad[:4], strict=True):
        assert torch.equal(one[:, :700], other[:, :700])
        assert torch.equal(one[:, 701:], other[:, 701:])
    assert bad[1][:, own].isnan().all()
    assert bad[3][:, own].isnan().all()


def test_a_compiled_site_equals_an_eager_one(site):
    """Through AOT and Inductor, for several numbers of tokens, in one compilation."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def layer(*arguments):
        return torch.nn.functional.silu(multi_lora_linear(*arguments, BF16, 32))

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for lengths in (LENGTHS, (64, 0, 9, 300, 5)):
        made = site(lengths)
        leaves = made.leaves()
        tensors = made.arguments(**dict(zip("xab", leaves, strict=True)))[:-1]
        dy = torch.randn(1, sum(lengths), SHAPE[1], device="cuda").to(BF16)
        found = torch.autograd.grad(compiled(*tensors), leaves, dy)
        wanted = torch.autograd.grad(layer(*tensors), leaves, dy)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert counter.frame_count == 1
