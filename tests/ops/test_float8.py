"""`float8_rows` and `float8_linear`: against float64 on what was rounded, and who touches whom."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.sampled import sampled
from tlora_fx.errors import FrozenGradientError, QuantizedLinearError
from tlora_fx.ops import float8_linear, float8_rows
from tlora_fx.ops.float8 import (
    BACKWARDS,
    CODES,
    LARGEST,
    no_product,
    product_parts,
    require_products,
)
from tlora_fx.ops.quantized import quantised

# Of a normal number of e4m3, which has three bits behind the point.
STEP = 1 / 16
HALF = 5e-3  # bfloat16's own rounding, of a norm
OUTER, INNER = 48, 64


def drawn(device="cpu", outer=OUTER, inner=INNER, tokens=7):
    """A matrix, x and dy."""
    draw = torch.Generator().manual_seed(3)
    shapes = (outer, inner), (1, tokens, inner), (1, tokens, outer)
    tensors = [torch.randn(*shape, generator=draw) for shape in shapes]
    return [tensor.to(device, torch.bfloat16) for tensor in tensors]


def stored(weight, backward="copy", turned=False):
    return [form(weight) for _, form in product_parts(backward, turned)]


def both(x, dy, parts, backward, bias=None):
    """y, and the gradient of x."""
    x = x.clone().requires_grad_()
    y = float8_linear(x, *float8_rows(x), parts, bias, backward)
    return y.detach(), *torch.autograd.grad(y, x, dy)


def decoded(rounded):
    codes, scale = rounded
    return codes.double() * scale.double()


def apart(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def expected_of(x, dy, parts, backward, bias=0):
    """What both must be, in float64: products of what is rounded."""
    codes, scales = parts[0].double(), parts[1].double()
    y = decoded(float8_rows(x)) @ (codes * scales).t() + bias
    if backward == "restore":
        return y, dy.double() @ (codes * scales).to(torch.bfloat16).double()
    return y, decoded(float8_rows(dy, parts[1].view(-1))) @ codes


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=2, max_size=9),
    st.integers(-60, 20),
)
def test_a_row_moves_by_a_step_at_most(numbers, power):
    """Of each number that is not lost below the least that the row's scale can tell."""
    row = torch.tensor([numbers], dtype=torch.float32) * 2.0**power
    codes, scale = float8_rows(row)

    assert codes.dtype == CODES
    assert scale.shape == (1, 1)
    lost = torch.finfo(CODES).smallest_normal * STEP * scale.double()
    allowed = torch.maximum(row.double().abs() * STEP, lost) * (1 + 1e-6)
    assert bool(((decoded((codes, scale)) - row.double()).abs() <= allowed).all())


def test_the_largest_number_of_a_row_is_the_largest_code():
    """Whatever the size of a row; zeros stay zeros."""
    rows = torch.randn(4, 32, dtype=torch.bfloat16) * torch.tensor([[1e-6], [1.0], [1e30], [0.0]])
    codes, _ = float8_rows(rows)

    assert codes[:3].float().abs().amax(1).tolist() == [LARGEST] * 3
    assert not codes[3].float().any()


@pytest.mark.parametrize("backward", BACKWARDS)
def test_output_and_gradient_are_products_of_what_is_rounded(backward):
    """y, with a bias, and dx, whose matrix is that of the forward."""
    weight, x, dy = drawn()
    bias = torch.randn(OUTER, dtype=torch.bfloat16)
    parts = stored(weight, backward)

    y, dx = both(x, dy, parts, backward, bias)

    assert y.dtype == dx.dtype == torch.bfloat16
    expected = expected_of(x, dy, parts, backward, bias.double())
    assert apart(y, expected[0]) < HALF
    assert apart(dx, expected[1]) < HALF
    # What rounding itself costs.
    assert apart(y, x.double() @ weight.double().t() + bias.double()) < STEP
    assert apart(dx, dy.double() @ weight.double()) < STEP


def test_a_matrix_is_rounded_as_torchao_does_and_may_be_stored_turned():
    """torchao rounds scales to the matrix's dtype, ours stay wide; GPT-2's Conv1D has [in, out]."""
    pytest.importorskip("torchao")
    weight, _, _ = drawn()
    codes, scales, columns = stored(weight)

    torch.testing.assert_close(scales, quantised("float8", 1, weight), rtol=2**-8, atol=0)
    theirs = decoded([quantised("float8", part, weight) for part in (0, 1)])
    assert apart(decoded((codes, scales)), weight.double()) <= apart(theirs, weight.double()) * 1.01
    assert torch.equal(columns.float(), codes.float().t())
    for own, other in zip((codes, scales, columns), stored(weight.t(), turned=True), strict=True):
        assert other.is_contiguous()
        assert torch.equal(own.float(), other.float())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e6])
def test_no_token_touches_another_ones_bits(poison):
    """Neither by a NaN nor by a number so large that all others would be rounded away."""
    weight, x, dy = drawn()
    parts = stored(weight)
    clean = both(x, dy, parts, "copy")
    x[0, 2, 5], dy[0, 2, 7] = poison, poison
    beside = both(x, dy, parts, "copy")

    rest = [0, 1, 3, 4, 5, 6]
    for one, other in zip(clean, beside, strict=True):
        assert torch.equal(one[0, rest], other[0, rest])
        assert not torch.equal(one[0, 2], other[0, 2])


@pytest.mark.parametrize("backward", sampled(BACKWARDS))
def test_compiled_code_has_the_same_numbers(backward):
    """Rounding is no operator of its own there, so that it may become a part of what makes x."""
    weight, x, dy = drawn()
    parts = stored(weight, backward)
    graphs = []

    def note(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph

    from torch._dynamo.backends.common import aot_autograd

    run = torch.compile(both_of(parts, backward), backend=aot_autograd(fw_compiler=note))
    given = x.clone().requires_grad_()
    y = run(given)
    (dx,) = torch.autograd.grad(y, given, dy)

    for found, expected in zip((y, dx), both(x, dy, parts, backward), strict=True):
        assert torch.equal(found, expected)
    assert all("tlora_fx.float8_rows.default" not in names for names in graphs)
    assert "tlora_fx.float8_linear.default" in graphs[0]


def both_of(parts, backward):
    return lambda x: float8_linear(x, *float8_rows(x), parts, None, backward)


@pytest.mark.slow
def test_the_operators_pass_opcheck():
    """Fakes and AOT dispatch; torch looks for changed inputs by arithmetic that float8 lacks."""
    weight, x, dy = drawn()
    parts = stored(weight)
    codes, scale = float8_rows(x)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    linear = torch.ops.tlora_fx.float8_linear.default
    backward = torch.ops.tlora_fx.float8_input_gradient.default
    for operator, arguments in (
        (linear, (x.requires_grad_(), codes, scale, parts, None, "copy")),
        (backward, (*float8_rows(dy), parts[2])),
    ):
        torch.library.opcheck(operator, arguments, test_utils=checks)


def test_no_tokens_give_no_rows_and_a_product_is_counted_each_way():
    """A row may be empty; two operations a multiply-add."""
    weight, x, dy = drawn()
    parts = stored(weight)
    y, dx = both(x[:, :0], dy[:, :0], parts, "copy")
    assert (y.shape, dx.shape) == ((1, 0, OUTER), (1, 0, INNER))
    with FlopCounterMode(display=False) as counter:
        both(x, dy, parts, "copy")
    assert counter.get_total_flops() == 2 * 2 * 7 * OUTER * INNER


def test_what_does_not_fit_is_refused():
    """Types, sizes and a bias that would learn."""
    weight, x, _ = drawn()
    parts, (codes, scale) = stored(weight), float8_rows(x)
    for wrong in (
        (x.float(), codes, scale, parts, None),
        (x[:, :3], codes, scale, parts, None),
        (x, codes, scale[:, :, 0], parts, None),
        (x, codes.float(), scale, parts, None),
        (x, codes, scale, [parts[0], parts[1].t()], None),
        (x, codes, scale, parts, torch.zeros(3, dtype=torch.bfloat16)),
    ):
        with pytest.raises(QuantizedLinearError, match="multiplied in float8"):
            float8_linear(*wrong, "copy")
    bias = torch.zeros(OUTER, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(FrozenGradientError, match="T0505"):
        float8_linear(x, codes, scale, parts, bias, "copy").sum().backward()
    assert "bfloat16" in no_product((16, 16), torch.float32)
    assert "multiples of 16" in no_product((16, 24), torch.bfloat16)
    assert not no_product((16, 32), torch.bfloat16)


def test_an_older_gpu_is_told_what_to_do(monkeypatch):
    """Before anything is multiplied; the CPU has such products."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    require_products(torch.device("cpu"))
    with pytest.raises(QuantizedLinearError, match="leave products=true out"):
        require_products(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("tokens", [1, 7, 300, 2000])
def test_cuda_multiplies_what_is_rounded(backward, tokens):
    """For each number of tokens at which the library may change its kernel."""
    weight, x, dy = drawn("cuda", outer=512, inner=256, tokens=tokens)
    parts = stored(weight, backward)
    found = both(x, dy, parts, backward)
    for one, expected in zip(found, expected_of(x, dy, parts, backward), strict=True):
        assert apart(one, expected) < HALF


@pytest.mark.gpu
def test_on_cuda_no_token_touches_another_ones_bits():
    """As on the CPU."""
    weight, x, dy = drawn("cuda", outer=512, inner=256, tokens=300)
    parts = stored(weight)
    clean = both(x, dy, parts, "copy")
    x[0, 2, 5], dy[0, 2, 7] = 1e6, float("nan")
    beside = both(x, dy, parts, "copy")
    rest = [token for token in range(300) if token != 2]
    for one, other in zip(clean, beside, strict=True):
        assert torch.equal(one[0, rest], other[0, rest])
