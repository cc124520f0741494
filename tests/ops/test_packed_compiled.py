"""Under torch.compile whoever makes x or dy leaves columns behind it, in its own code."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code

from tlora_fx.ops import lora, multi_lora_linear, multi_lora_linears
from tlora_fx.ops import tail_columns as tail_columns_op
from tlora_fx.ops.kernels import extend_weight, packed, strict, support

WIDTH, HIDDEN, TAIL_COLUMNS, TOKENS = 32, 48, 64, 11


@pytest.fixture
def seen(monkeypatch):
    """Traced graphs are made as if kernels served; what x and dys the operators were given."""
    torch._dynamo.reset()
    given, sites = [], packed._sites
    forward, backward = lora.loop_forward, lora.loop_input_gradient

    def note(kind, *values):
        given.extend((kind, one.shape[-1], one.stride(-2) - one.shape[-1]) for one in values)

    def noted_forward(x, biases, group):
        note("x", x)
        return forward(x, biases, group)

    def noted_backward(dys, group, need_dx):
        note("dy", *dys)
        return backward(dys, group, need_dx)

    def served_sites(like, group):
        with monkeypatch.context() as patch:
            patch.setattr(support, "kernel_group", support.KernelGroup.of)
            return sites(like, group)

    monkeypatch.setattr(packed, "_sites", served_sites)
    monkeypatch.setattr(lora, "loop_forward", noted_forward)
    monkeypatch.setattr(lora, "loop_input_gradient", noted_backward)
    yield given
    torch._dynamo.reset()


@pytest.fixture
def block(lora):
    """Makes a norm, two linears on it, their gated product, and one linear behind it."""

    def make(extended=True, drops=False):
        sizes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        rates = (0.3, 0.0) if drops else (0.0, 0.0)
        made = [lora((6, 5), (3, 2), rates, features=own, dtype=torch.float32) for own in sizes]
        for one in made if extended else ():
            one.weight = extend_weight(one.weight, TAIL_COLUMNS)
        *pair, last = [one.arguments() for one in made]
        lists = [list(column) for column in zip(*pair, strict=True)]
        row = [column[0] for column in lists[8:11]]

        def run(h, *leaves):
            x = torch.nn.functional.rms_norm(h, (WIDTH,))
            one, other = multi_lora_linears(
                x, lists[1], lists[2], list(leaves[0:2]), list(leaves[2:4]), *lists[5:8], *row,
                lists[11], torch.float32, 3, drops,
            )  # fmt: skip
            inner = torch.nn.functional.silu(one) * other
            return h + multi_lora_linear(inner, *last[1:3], *leaves[4:6], *last[5:], 3, drops)

        up, gate, down = made
        leaves = (up.x, up.a, gate.a, up.b, gate.b, down.a, down.b)
        return run, [one.detach().clone().requires_grad_() for one in leaves]

    return make


def step(run, leaves):
    """Output and gradients."""
    y = run(*leaves)
    return y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)


X = [("x", WIDTH, 2 * TAIL_COLUMNS), ("x", HIDDEN, TAIL_COLUMNS)]
DY = [("dy", WIDTH, TAIL_COLUMNS), ("dy", HIDDEN, TAIL_COLUMNS), ("dy", HIDDEN, TAIL_COLUMNS)]
TIGHT = [(kind, columns, 0) for kind, columns, _ in (*X, *DY)]


def test_producers_write_into_wider_buffers(seen, block, monkeypatch):
    """Inductor's code makes x and dys in rows with tail columns, and copies none of them."""
    # Compiling takes long, and where kernels write can be read.
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
    run, leaves = block()
    compiled = torch.compile(run, fullgraph=True)

    with torch._inductor.config.patch(fx_graph_cache=False):
        _, codes = run_and_get_code(lambda: step(compiled, leaves))

    assert seen == [*X, *DY]
    made = re.findall(rf"empty_strided_cpu\(\(1, {TOKENS}, (\d+)\)", "\n".join(codes))
    assert {int(width) for width in made} == {
        1,
        WIDTH + 2 * TAIL_COLUMNS,
        WIDTH + TAIL_COLUMNS,
        HIDDEN + TAIL_COLUMNS,
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, [*X, *DY]), ({"drops": True}, [*X, *TIGHT[2:]]), ({"extended": False}, TIGHT)],
    ids=["plain", "dropout", "weights"],
)
def test_numbers_are_those_without_tail_columns(seen, block, given, expected):
    """Room is left where concat-K can use it: not in dy under dropout, not at weights without."""
    run, leaves = block(**given)
    wanted = step(run, leaves)
    assert seen == TIGHT
    seen.clear()

    found = step(torch.compile(run, fullgraph=True, backend="aot_eager"), leaves)

    assert seen == expected
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("drops", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("rows", [64, 16])
@pytest.mark.parametrize("outers", [(32, 16), (96, 48)], ids=["narrow", "wide"])
def test_joined_weights_have_their_gradients_side_by_side(seen, lora, drops, outers, rows):
    """All y are one tensor in a traced graph, and so are all dy, with columns behind them."""
    rates = (0.3, 0.0) if drops else (0.0, 0.0)
    made = [lora((6, 5), (3, 2), rates, features=(WIDTH, n), dtype=torch.float32) for n in outers]
    lists = [list(column) for column in zip(*(one.arguments() for one in made), strict=True)]
    plain, joined = lists[1], packed.join(lists[1], rows)
    row = [column[0] for column in lists[8:11]]

    def run(weights, h, *leaves):
        x = torch.nn.functional.rms_norm(h, (WIDTH,))
        one, other = multi_lora_linears(
            x, weights, lists[2], list(leaves[:2]), list(leaves[2:]), *lists[5:8], *row, lists[11],
            torch.float32, 3, drops,
        )  # fmt: skip
        return one.sin() + torch.cat([other.cos(), other], -1)

    first, second = made
    leaves = [
        one.detach().clone().requires_grad_()
        for one in (first.x, first.a, second.a, first.b, second.b)
    ]
    wanted = step(partial(run, plain), leaves)
    seen.clear()
    compiled = torch.compile(partial(run, joined), fullgraph=True, backend="aot_eager")

    found = step(compiled, leaves)

    tail_columns = packed.joined_columns(rows, 2)
    width = 0 if drops else tail_columns
    one, other = outers
    assert seen == [
        ("x", WIDTH, tail_columns),
        ("dy", one, other + width),
        ("dy", other, one + width),
    ]
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("tail_columns", [0, 16])
def test_inductors_code_puts_parts_beside_each_other(tail_columns):
    """Parts that it computes, one that it was given, one that others read, one twice."""
    torch._dynamo.reset()

    def run(x, given):
        part = x.sin()
        whole = torch.ops.tlora_fx.append_tail_columns(
            [part, given, part, torch.ops.tlora_fx.append_tail_columns([x.cos()], 0)], tail_columns
        )
        return whole[..., : whole.shape[-1] - tail_columns] * 1.0, part + 1

    x, given = torch.randn(1, 7, 16), torch.randn(1, 7, 32)
    tail_columns_op.teach_inductor()

    found = torch.compile(run, fullgraph=True, dynamic=True)(x, given)

    wanted = torch.cat([x.sin(), given, x.sin(), x.cos()], -1), x.sin() + 1
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("shapes", "rows", "step", "tail_columns"),
    [
        (((32, 32), (16, 32), (16, 32)), (9, 16, 9), 16, 64),
        (((32, 32), (16, 32), (16, 32)), (9, 17, 9), 32, 128),
        (((32, 32), (16, 32), (16, 32)), (9, 33, 9), 64, 192),
        (((48, 32), (48, 32)), (9, 9), 32, 64),
        (((48, 32), (48, 32)), (9, 33), 64, 128),
        (((48, 32), (16, 32)), (9, 9), 0, 64),
        (((32, 32), (16, 32), (16, 32)), (70, 9, 9), 0, 128),
        (((48, 32), (48, 32)), (70, 70), 0, 128),
        (((32, 32),), (9,), 0, 64),
    ],
    ids=[
        "narrow",
        "narrow 17",
        "narrow 33",
        "wide",
        "wide 33",
        "wide and narrow",
        "many rows",
        "many rows of wide",
        "alone",
    ],
)
def test_weights_are_joined_where_sums_are_short(monkeypatch, shapes, rows, step, tail_columns):
    """As q, k and v are, each with whole rank blocks; numbers stay."""
    monkeypatch.setenv("TLORA_FX_KERNELS", "interpret")
    given = [torch.randn(shape) for shape in shapes]

    found = packed.extended_weights(given, rows)

    assert packed.step_of(found) == step
    assert found[0].stride(0) - found[0].shape[1] == tail_columns
    assert len({weight.untyped_storage().data_ptr() for weight in found}) == (
        1 if step else len(given)
    )
    assert all(one.equal(other) for one, other in zip(found, given, strict=True))


def test_strict_mode_leaves_no_tail_columns(seen, block):
    """It runs the fused plan only."""
    run, leaves = block()
    with strict():
        step(torch.compile(run, fullgraph=True, backend="aot_eager"), leaves)

    assert seen == TIGHT


def test_exported_programs_leave_no_tail_columns(seen, block):
    """They run as they are, where tail columns would be a copy."""
    run, leaves = block()

    class Module(torch.nn.Module):
        forward = staticmethod(run)

    program = torch.export.export(Module(), tuple(leaves)).run_decompositions()
    seen.clear()
    program.module()(*leaves)

    assert seen == TIGHT[:2]
