"""`multi_lora_linear` against each job alone in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.errors import AdapterTableError, FrozenGradientError, SegmentError
from tlora_fx.ops import multi_lora_linear, multi_lora_linears, site_id

ops = torch.ops.tlora_fx
JOB = st.tuples(st.integers(0, 9), st.integers(0, 64), st.sampled_from([0.0, 0.3]))


def results(made):
    """The operator's output and gradients, and the reference's."""
    x, a, b = made.leaves()
    y = multi_lora_linear(*made.arguments(x=x, a=a, b=b))
    expected = made.reference(x, a, b)
    dy = torch.randn(expected.shape, dtype=torch.float64, device=y.device)
    found = torch.autograd.grad(y, (x, a, b), dy.to(y.dtype))
    return (y, *found), (expected, *torch.autograd.grad(expected, (x, a, b), dy))


@given(jobs=st.lists(JOB, min_size=1, max_size=5), bias=st.booleans())
def test_any_mix_of_jobs_equals_each_alone(lora, jobs, bias):
    """Output and gradients equal the loop over jobs: any ranks, lengths, missing adapters."""
    lengths, ranks, rates = zip(*jobs, strict=True)
    made = lora(lengths, ranks, rates, bias=bias)

    for found, expected in zip(*results(made), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rates", [(0.0, 0.0, 0.0), (0.4, 0.0, 0.2)])
def test_gradients_pass_gradcheck(lora, rates):
    """Numerical differences agree with the backward operator in float64."""
    made = lora((2, 0, 3), (2, 1, 3), rates, features=(4, 3))

    def run(x, a, b):
        return multi_lora_linear(*made.arguments(x=x, a=a, b=b))

    assert torch.autograd.gradcheck(run, made.leaves())


def test_batch_form_owns_rows(lora):
    """In x [B, S, I] segments count rows."""
    made = lora((1, 2), (2, 3), (0.2, 0.0), batch=4)

    for found, expected in zip(*results(made), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("where", ["x", "a", "b", "dy"])
def test_a_nan_stays_in_its_job(lora, where):
    """NaN in a job's rows, adapters or gradient leaves the neighbours' bits unchanged."""
    made = lora((4, 5, 3), (3, 2, 4), (0.3, 0.3, 0.0), dtype=torch.float32, features=(16, 8))

    def run(poison):
        x, a, b = made.leaves()
        dy = torch.ones(1, 12, 8)
        target = {"x": x, "a": a, "b": b, "dy": dy}[where]
        if poison:
            rows = slice(4, 9) if where in ("x", "dy") else slice(3, 5)
            (target.detach()[0] if target.dim() == 3 else target.detach())[rows] = float("nan")
        y = multi_lora_linear(*made.arguments(x=x, a=a, b=b))
        dx, da, db = torch.autograd.grad(y, (x, a, b), dy)
        tokens, ranks = [0, 1, 2, 3, 9, 10, 11], [0, 1, 2, 5, 6, 7, 8]
        return y[0, tokens], dx[0, tokens], da[ranks], db[ranks]

    for clean, beside in zip(run(False), run(True), strict=True):
        assert torch.equal(clean, beside)


def test_a_job_is_bitwise_the_same_beside_idle_neighbours(lora):
    """Jobs without tokens or without an adapter change no bit of another's gradients."""
    alone = lora((5,), (3,), (0.3,), dtype=torch.float32)
    x, a, b = alone.x, alone.a, alone.b
    beside = lora((0, 5, 0), (2, 3, 0), (0.3, 0.3, 0.0), dtype=torch.float32)
    beside.row.keys[1, 0], beside.scales = 11, (1.0, *alone.scales, 1.0)
    beside.weight, beside.bias = alone.weight, alone.bias
    wide_a, wide_b = (torch.cat([torch.zeros(2, t.shape[1]), t]) for t in (a, b))
    first = multi_lora_linear(*alone.arguments())
    second = multi_lora_linear(*beside.arguments(x=x, a=wide_a, b=wide_b))

    assert torch.equal(first, second)


@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_half_precision_stays_close_to_float64(lora, adapter, compute):
    """On a bf16 base, adapters stored and multiplied in either type stay within rounding."""
    made = lora(
        (30, 40), (8, 16), (0.0, 0.1), features=(64, 48),
        dtype=torch.bfloat16, adapter_dtype=adapter, compute=compute,
    )  # fmt: skip

    for found, expected in zip(*results(made), strict=True):
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        assert error < 0.01
        assert found.dtype in (torch.bfloat16, adapter)


def test_float32_adapters_add_before_rounding(lora):
    """With compute_dtype float32 the sum is taken in float32 and rounded once."""
    made = lora(
        (6,), (2,), features=(8, 4), dtype=torch.bfloat16,
        adapter_dtype=torch.float32, compute=torch.float32,
    )  # fmt: skip
    base = torch.nn.functional.linear(made.x, made.weight, made.bias)
    branch = made.x.float() @ made.a.t() @ made.b
    expected = (base.float() + branch * made.scales[0]).to(torch.bfloat16)

    assert torch.equal(multi_lora_linear(*made.arguments()), expected)


def test_strides_do_not_matter(lora):
    """Transposed inputs and an expanded gradient give what contiguous ones give."""
    made = lora((3, 4), (2, 3), (0.3, 0.0))
    twisted = {
        name: getattr(made, name).transpose(-1, -2).contiguous().transpose(-1, -2)
        for name in ("x", "weight", "a", "b")
    }
    leaves = [twisted[name].requires_grad_() for name in ("x", "a", "b")]
    y = multi_lora_linear(*made.arguments(**twisted))
    expected = made.reference(*made.leaves())

    torch.testing.assert_close(y, expected)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), leaves))


@pytest.mark.parametrize("gradient", [("x", "a", "b"), ("a", "b"), ()])
def test_multi_lora_linear_passes_opcheck(lora, gradient):
    """Schema, fake, autograd registration and AOT dispatch hold, with and without dx."""
    made = lora((2, 0, 3), (2, 4, 0), (0.4, 0.0, 0.2))
    leaves = dict(zip(("x", "a", "b"), made.leaves(), strict=True))
    given = {name: leaf.requires_grad_(name in gradient) for name, leaf in leaves.items()}

    torch.library.opcheck(ops.multi_lora_linear.default, made.arguments(**given))


@pytest.mark.parametrize("need_dx", [True, False])
def test_the_inner_operators_pass_opcheck(lora, need_dx):
    """Forward and the two parts of the backward stand on their own, for several sites too."""
    x, lists, row = sites(lora((2, 3), (2, 4), (0.4, 0.0)), lora((2, 3), (1, 0), (0.4, 0.0)))
    weights, biases, tables = lists[0], lists[1], [*lists[2:7], *row, *lists[7:]]
    tables += [torch.float64, 0, True]
    x.requires_grad_(need_dx)
    torch.library.opcheck(ops.multi_lora_forward.default, (x, weights, biases, *tables, 0))

    x = x.detach()
    dys, none = [torch.randn(1, 5, 5).double() for _ in weights], [x.new_empty(0)] * 2
    arguments = (dys, weights, *tables, none, none, need_dx, 0)
    torch.library.opcheck(ops.multi_lora_input_gradient.default, arguments)
    _, *rest = ops.multi_lora_input_gradient(*arguments)
    arguments = (dys, x, weights, *tables, none, none, rest[:2], rest[2:])
    torch.library.opcheck(ops.multi_lora_adapter_gradients.default, arguments)


def sites(*made):
    """x, the arguments that are lists, those of the row: of linears that share the first's x."""
    calls = [one.arguments(x=made[0].x) for one in made]
    columns = [list(column) for column in zip(*calls, strict=True)]
    return made[0].x.clone(), [*columns[1:8], columns[11]], [one[0] for one in columns[8:11]]


@pytest.mark.parametrize("unread", [False, True])
def test_several_linears_equal_each_alone(lora, unread):
    """Outputs and all gradients, where one has no bias, and where nobody reads the last."""
    made = [lora((2, 3), (2, 4), (0.4, 0.0), features=(6, width)) for width in (5, 7, 4)]
    made[1].bias = None
    x, lists, row = sites(*made)
    leaves = [one.clone().requires_grad_() for one in (x, *lists[2], *lists[3])]
    x, a, b = leaves[0], leaves[1:4], leaves[4:]
    lists[2:4] = a, b
    together = multi_lora_linears(x, *lists[:7], *row, lists[7], torch.float64)
    alone = [
        multi_lora_linear(x, *(one[k] for one in lists[:7]), *row, lists[7][k], torch.float64)
        for k in range(3)
    ]

    def gradients(outputs):
        total = sum(y.sin().sum() for y in outputs[: 2 if unread else 3])
        return torch.autograd.grad(total, leaves, materialize_grads=True)

    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(gradients(together), gradients(alone), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("largest", [3, 4])
def test_a_rank_above_the_graphs_is_refused(lora, largest):
    """max_rank says what shapes a compiled graph has room for."""
    made = lora((2, 3), (2, 4))
    if largest == 4:
        expected = multi_lora_linear(*made.arguments())
        assert torch.equal(multi_lora_linear(*made.arguments(), max_rank=4), expected)
        return
    with pytest.raises(AdapterTableError, match="rank"):
        multi_lora_linear(*made.arguments(), max_rank=largest)


def test_a_table_error_names_the_site(lora):
    """By the module's path, where this process has made the number of it."""
    made = lora((2, 3), (2, 4), (0.4, 0.0))
    made.row.site_tensor = torch.tensor(site_id("layers.7.up_proj"))

    with pytest.raises(AdapterTableError, match=r"site +layers\.7\.up_proj"):
        multi_lora_linear(*made.arguments(), drops=False)


def test_export_keeps_the_operator_whole(lora):
    """A program holds one node a site; decompositions are left to those who ask for them."""
    made = lora((2, 3), (2, 4), (0.4, 0.0))

    class Site(torch.nn.Module):
        def forward(self, x):
            return multi_lora_linear(*made.arguments(x=x))

    program = torch.export.export(Site(), (made.x,), strict=False)
    targets = [node.target for node in program.graph.nodes if "tlora_fx" in str(node.target)]
    assert targets == [ops.multi_lora_linear.default]
    torch.testing.assert_close(program.run_decompositions().module()(made.x), Site()(made.x))


def test_other_rows_do_not_recompile(lora, compiles):
    """One compilation, with its backward, serves other lengths, segments and ranks."""
    mixes = [((4, 3), (2, 8)), ((2, 7), (4, 5)), ((0, 6), (3, 2))]
    calls = []
    for lengths, ranks in mixes:
        made = lora(lengths, ranks, (0.2, 0.0))
        *tensors, _ = made.arguments(**dict(zip(("x", "a", "b"), made.leaves(), strict=True)))
        calls.append(tuple(tensors))

    def run(*tensors):
        y = multi_lora_linear(*tensors, torch.float64)
        return torch.nn.functional.silu(y).sum()

    assert compiles(run, calls) == 1


def test_compiled_gradients_equal_eager_ones(lora):
    """The backward runs through AOT autograd."""
    made = lora((4, 3), (2, 3), (0.2, 0.0))

    def run(x, a, b):
        return multi_lora_linear(*made.arguments(x=x, a=a, b=b)).square().sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    leaves = made.leaves()
    found = torch.autograd.grad(compiled(*leaves), leaves)
    expected = torch.autograd.grad(run(*leaves), leaves)

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_frozen_weights_have_no_gradient(lora):
    """A weight that asks for a gradient is refused, not silently skipped."""
    made = lora((3,), (2,))
    made.weight.requires_grad_()
    with pytest.raises(FrozenGradientError, match="T0505"):
        multi_lora_linear(*made.arguments()).sum().backward()


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.randn(1, 3, 7).double()},
        {"a": torch.randn(2, 7).double()},
        {"a": torch.randn(3, 6).double()},
        {"b": torch.randn(2, 6).double()},
        {"weight": torch.randn(5, 6)},
        {"bias": torch.randn(4).double()},
    ],
)
def test_shapes_that_do_not_fit_are_named(lora, other):
    """Any mismatch between x, weight, bias, a and b is one error of ours."""
    with pytest.raises(AdapterTableError):
        multi_lora_linear(*lora((3,), (2,)).arguments(**other))


def test_segments_of_another_row_are_refused(lora):
    """Segments that cannot cover x are an error before any work."""
    with pytest.raises(SegmentError):
        multi_lora_linear(*lora((3, 4), (2, 2)).arguments(x=torch.randn(1, 8, 6).double()))
