"""`quantized_linear`: against a product with the matrix that a table decodes by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.quantised import decoded
from tlora_fx.errors import FrozenGradientError, MissingPackageError, QuantizedLinearError
from tlora_fx.ops import quantized, quantized_linear
from tlora_fx.ops.quantized import FORMS, quantised

SHAPE = [12, 128]
# How far a number may move, of the largest of its block or row; half of the widest gap.
STEPS = {"nf4": 0.16, "int8": 0.5 / 127, "float8": 1 / 16}
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def made(form, dtype=torch.float32, shape=SHAPE, device="cpu"):
    """A matrix, what is stored of it, and x."""
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(*shape, generator=draw).to(device, dtype)
    x = torch.randn(2, 5, shape[1], generator=draw).to(device, dtype)
    return weight, [quantised(form, part, weight) for part in (0, 1)], x


@pytest.mark.parametrize("form", FORMS)
def test_numbers_move_by_a_step_at_most(form):
    """What is stored decodes to the matrix, within the form's widest gap."""
    weight, stored, _ = made(form)
    block = 64 if form == "nf4" else SHAPE[1]
    largest = weight.view(-1, block).abs().amax(1, keepdim=True)

    moved = (decoded(form, stored, SHAPE) - weight).view(-1, block).abs()

    assert bool((moved <= STEPS[form] * largest).all())
    assert bool(moved.any())


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("form", FORMS)
def test_output_and_gradient_are_those_of_the_decoded_matrix(form, dtype):
    """x Wᵀ + bias, and dy W."""
    _, stored, x = made(form, dtype)
    bias = torch.randn(SHAPE[0], dtype=dtype)
    dense = decoded(form, stored, SHAPE).double()
    dy = torch.randn(2, 5, SHAPE[0], dtype=dtype)

    y = quantized_linear(x.requires_grad_(), stored, bias, form, SHAPE)
    (dx,) = torch.autograd.grad(y, x, dy)

    pairs = (
        (y, x.detach().double() @ dense.t() + bias.double()),
        (dx, dy.double() @ dense),
    )
    for found, expected in pairs:
        assert found.dtype == dtype
        assert (found.double() - expected).norm() <= ROUNDED[dtype] * expected.norm()


@pytest.mark.parametrize("form", FORMS)
def test_a_nan_stays_in_its_token(form):
    """Other tokens keep their bits, forward and backward."""
    _, stored, x = made(form)
    dy = torch.ones(2, 5, SHAPE[0])

    def run(poison):
        given, grad = x.clone(), dy.clone()
        if poison:
            given[0, 2], grad[0, 2] = float("nan"), float("nan")
        y = quantized_linear(given.requires_grad_(), stored, None, form, SHAPE)
        (dx,) = torch.autograd.grad(y, given, grad)
        return [torch.cat([t[0, :2], t[0, 3:], t[1]]) for t in (y.detach(), dx)]

    for clean, beside in zip(run(False), run(True), strict=True):
        assert torch.equal(clean, beside)


@pytest.mark.parametrize("form", FORMS)
def test_shapes_are_known_without_the_library(form, monkeypatch):
    """On the meta device a pass learns what will be stored."""
    weight, stored, _ = made(form)
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)

    for part, real in enumerate(stored):
        fake = quantised(form, part, weight.to("meta"))
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("form", FORMS)
def test_without_the_library_the_error_names_the_extra(form, monkeypatch):
    """Quantising and multiplying need it."""
    weight, stored, x = made(form)
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)

    with pytest.raises(MissingPackageError, match=r"tlora-fx\[quant\]"):
        quantised(form, 0, weight)
    with pytest.raises(MissingPackageError, match=FORMS[form].package):
        quantized_linear(x, stored, None, form, SHAPE)


@pytest.mark.parametrize("form", FORMS)
def test_quantized_linear_passes_opcheck(form):
    """Schema, fake, autograd registration and AOT dispatch hold; the backward stands alone."""
    _, stored, x = made(form)
    # torch looks for changed inputs by arithmetic on them, which float8 does not have.
    checks = CHECKS[1:] if form == "float8" else CHECKS
    backward = torch.ops.tlora_fx.quantized_linear_backward.default
    for operator, given in (
        (quantized_linear, (x.requires_grad_(), stored, None, form, SHAPE)),
        (backward, (torch.randn(3, SHAPE[0]), stored, form, SHAPE)),
    ):
        torch.library.opcheck(operator, given, test_utils=checks)


def test_no_tokens_give_no_rows():
    """A row may be empty."""
    for form in FORMS:
        _, stored, x = made(form)
        empty = x[:, :0].detach().requires_grad_()
        y = quantized_linear(empty, stored, None, form, SHAPE)
        y.sum().backward()
        assert y.shape == (2, 0, SHAPE[0])
        assert empty.grad.shape == empty.shape


def test_each_direction_counts_one_product():
    """Two operations a multiply-add."""
    _, stored, x = made("int8")
    with FlopCounterMode(display=False) as counter:
        quantized_linear(x.requires_grad_(), stored, None, "int8", SHAPE).sum().backward()

    assert counter.get_total_flops() == 2 * 2 * 10 * SHAPE[0] * SHAPE[1]


def test_a_trained_bias_is_refused():
    """It would get no gradient."""
    _, stored, x = made("int8")
    bias = torch.zeros(SHAPE[0], requires_grad=True)
    with pytest.raises(FrozenGradientError, match="T0505"):
        quantized_linear(x, stored, bias, "int8", SHAPE).sum().backward()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"form": "int3"}, "no such form"),
        ({"form": "float8"}, "float8_e4m3fn"),
        ({"shape": [12, 64]}, "parts of a matrix"),
        ({"x": torch.zeros(3, 5)}, "parts of a matrix"),
        ({"x": torch.zeros(3, 128, dtype=torch.float64)}, "float64"),
        ({"bias": torch.zeros(3)}, "bias must fit"),
        ({"form": "nf4", "shape": [12, 96]}, "multiple of 64"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change, told):
    """Before anything runs, with what was expected."""
    _, stored, x = made("int8")
    given = {"x": x, "stored": stored, "bias": None, "form": "int8", "shape": SHAPE} | change
    with pytest.raises(QuantizedLinearError, match=told):
        quantized_linear(*given.values())


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 7, 300, 2000])
def test_cuda_equals_the_decoded_matrix(form, tokens):
    """In bfloat16, for each number of tokens at which a library changes its kernel."""
    pytest.importorskip(FORMS[form].package)
    shape = [256, 512]
    _, stored, _ = made(form, torch.bfloat16, shape, "cuda")
    x = torch.randn(1, tokens, shape[1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dense = decoded(form, stored, shape).double()
    dy = torch.randn(1, tokens, shape[0], device="cuda", dtype=torch.bfloat16)

    y = quantized_linear(x, stored, None, form, shape)
    (dx,) = torch.autograd.grad(y, x, dy)

    pairs = ((y, x.detach().double() @ dense.t()), (dx, dy.double() @ dense))
    for found, expected in pairs:
        assert (found.double() - expected).norm() <= ROUNDED[torch.bfloat16] * expected.norm()
