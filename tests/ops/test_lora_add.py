"""`multi_lora_add`: the branches of all jobs alone, against `multi_lora_linear` and float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tlora_fx.errors import AdapterTableError
from tlora_fx.ops import multi_lora_add

JOB = st.tuples(st.integers(0, 9), st.integers(0, 64), st.sampled_from([0.0, 0.3]))


def arguments(made, y, **other):
    """The operator's arguments for a row's `multi_lora_linear`."""
    x, _, _, *tables = made.arguments(**other)
    return (y, x, *tables)


def leaves_of(made):
    """y, x, a and b, asking for gradients."""
    y = torch.nn.functional.linear(made.x, made.weight, made.bias)
    return (y.detach().requires_grad_(), *made.leaves())


@given(jobs=st.lists(JOB, min_size=1, max_size=5))
def test_any_mix_of_jobs_equals_each_alone(lora, jobs):
    """The sum, and the gradients of its four parts; y's is the sum's own."""
    lengths, ranks, rates = zip(*jobs, strict=True)
    made = lora(lengths, ranks, rates)
    y, x, a, b = leaves_of(made)
    dy = torch.randn(y.shape, dtype=torch.float64)

    found = multi_lora_add(*arguments(made, y, x=x, a=a, b=b))
    grads = torch.autograd.grad(found, (y, x, a, b), dy)

    made.weight, made.bias = torch.zeros_like(made.weight), None
    branches = made.reference(x, a, b)
    expected = torch.autograd.grad(branches, (x, a, b), dy)
    assert torch.equal(grads[0], dy)
    for one, other in zip((found, *grads[1:]), (y + branches, *expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rates", [(0.0, 0.0, 0.0), (0.4, 0.0, 0.2)])
def test_gradients_pass_gradcheck(lora, rates):
    """Numerical differences agree with the backward in float64."""
    made = lora((2, 0, 3), (2, 1, 3), rates, features=(4, 3))

    def run(y, x, a, b):
        return multi_lora_add(*arguments(made, y, x=x, a=a, b=b))

    assert torch.autograd.gradcheck(run, leaves_of(made))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_behind_a_linear_it_is_multi_lora_linear(lora, compute):
    """The same bits, forward; in both types in which adapters multiply."""
    made = lora(
        (30, 40), (8, 16), (0.0, 0.1), features=(64, 48),
        dtype=torch.bfloat16, adapter_dtype=torch.float32, compute=compute,
    )  # fmt: skip
    y = torch.nn.functional.linear(made.x, made.weight, made.bias)

    found = multi_lora_add(*arguments(made, y))

    assert torch.equal(found, torch.ops.tlora_fx.multi_lora_linear(*made.arguments()))


@pytest.mark.parametrize("where", ["y", "x", "a", "b", "dy"])
def test_a_nan_stays_in_its_job(lora, where):
    """NaN in a job's rows, adapters or gradient leaves the neighbours' bits unchanged."""
    made = lora((4, 5, 3), (3, 2, 4), (0.3, 0.3, 0.0), dtype=torch.float32, features=(16, 8))

    def run(poison):
        y, x, a, b = leaves_of(made)
        dy = torch.ones(1, 12, 8)
        if poison:
            target = {"y": y, "x": x, "a": a, "b": b, "dy": dy}[where].detach()
            rows = slice(3, 5) if where in ("a", "b") else slice(4, 9)
            (target[0] if target.dim() == 3 else target)[rows] = float("nan")
        made_of = multi_lora_add(*arguments(made, y, x=x, a=a, b=b))
        grad_y, dx, da, db = torch.autograd.grad(made_of, (y, x, a, b), dy)
        tokens, ranks = [0, 1, 2, 3, 9, 10, 11], [0, 1, 2, 5, 6, 7, 8]
        return made_of[0, tokens], grad_y[0, tokens], dx[0, tokens], da[ranks], db[ranks]

    for clean, beside in zip(run(False), run(True), strict=True):
        assert torch.equal(clean, beside)


def test_what_is_added_to_stays_as_it_was(lora):
    """The frozen operator's result may be read by others."""
    made = lora((3, 4), (2, 3))
    y = torch.nn.functional.linear(made.x, made.weight)
    before = y.clone()

    assert not torch.equal(multi_lora_add(*arguments(made, y)), y)
    assert torch.equal(y, before)


@pytest.mark.parametrize("gradient", [("y", "x", "a", "b"), ("a", "b"), ()])
def test_multi_lora_add_passes_opcheck(lora, gradient):
    """Schema, fake, autograd registration and AOT dispatch hold, of it and what it is made of."""
    made = lora((2, 0, 3), (2, 4, 0), (0.4, 0.0, 0.2))
    leaves = dict(zip(("y", "x", "a", "b"), leaves_of(made), strict=True))
    asked = {name: leaf.requires_grad_(name in gradient) for name, leaf in leaves.items()}
    y, x, a, b, ranks, scales, rates, *row, site, compute = arguments(made, **asked)
    tables = [a], [b], [ranks], [scales], [rates], *row, [site], compute, 4, True
    ops = torch.ops.tlora_fx

    torch.library.opcheck(ops.multi_lora_add_forward.default, (y, x, *tables))
    nothing, dy = [torch.empty(0)], torch.randn_like(y).detach()
    alone = [a.detach()], [b.detach()], *tables[2:]
    torch.library.opcheck(
        ops.multi_lora_add_input_gradient.default,
        (dy, *alone, nothing, nothing, "x" in gradient),
    )


def test_compiled_gradients_equal_eager_ones(lora):
    """Dynamo and AOT take it in one graph."""
    made = lora((4, 3), (2, 3), (0.2, 0.0))

    def run(y, x, a, b):
        return multi_lora_add(*arguments(made, y, x=x, a=a, b=b)).square().sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    leaves = leaves_of(made)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    expected = torch.autograd.grad(run(*leaves), leaves)

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_its_products_are_the_branches_alone(lora):
    """Forward both factors; backward dx, dS, dA, S again and dB."""
    made = lora((3, 0, 4), (2, 8, 5), features=(6, 7))
    y, x, a, b = leaves_of(made)
    low_rank = 2 * (3 * 2 + 4 * 5)

    with FlopCounterMode(display=False) as counter:
        added = multi_lora_add(*arguments(made, y, x=x, a=a, b=b))
        forward = counter.get_total_flops()
        added.sum().backward()

    assert forward == low_rank * 13
    assert counter.get_total_flops() - forward == low_rank * (2 * 13 + 6)


@pytest.mark.parametrize(
    "change",
    [{"rows": 3}, {"dtype": torch.float32}, {"columns": 4}],
    ids=str,
)
def test_what_was_made_of_another_input_is_refused(lora, change):
    """y must have x's tokens and type, and the adapters' columns."""
    made = lora((3, 4), (2, 3))
    y = torch.zeros(1, change.get("rows", 7), change.get("columns", 5))

    with pytest.raises(AdapterTableError, match="T0502"):
        multi_lora_add(*arguments(made, y.to(change.get("dtype", torch.float64))))
