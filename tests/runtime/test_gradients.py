"""Gradients by lists: what torch.nn.utils makes of the same tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tlora_fx.runtime.optim.optimizer import Gradients

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@st.composite
def parameters(draw: st.DrawFn) -> list[nn.Parameter]:
    """Views of one storage a dtype, some transposed, some without a gradient."""
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2))
    made, seed = [], draw(st.integers(0, 99))
    for place in range(draw(st.integers(0, 6))):
        dtype = dtypes[place % len(dtypes)]
        rows, width, first = (draw(st.integers(low, 5)) for low in (1, 1, 0))
        values = torch.randn(
            first + rows * width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        view = values.to(dtype)[first:].view(rows, width)
        param = nn.Parameter(torch.zeros_like(view))
        if draw(st.booleans()):
            param, view = nn.Parameter(param.detach().t()), view.t()
        if draw(st.integers(0, 3)):
            param.grad = view
        made.append(param)
    return made


def copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """The same numbers in other storage, of the same layout."""
    made = []
    for param in params:
        made.append(nn.Parameter(param.detach().clone()))
        made[-1].grad = None if param.grad is None else param.grad.clone()
    return made


@given(params=parameters(), largest=st.sampled_from([0.01, 0.7, 1e6]))
def test_norm_and_clipping_are_those_of_torch(params, largest):
    """Whatever dtypes, layouts and missing gradients there are, bit by bit."""
    theirs = copies(params)
    held = [param.grad for param in theirs if param.grad is not None]
    wide = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in held]
    expected = torch.nn.utils.get_total_norm(wide)
    gradients = Gradients(params)

    norm = gradients.norm()
    gradients.clip(float(norm), largest)

    dtype = torch.float32
    for each in wide:
        dtype = torch.promote_types(dtype, each.dtype)
    total = torch.tensor(float(expected), dtype=dtype)
    torch.nn.utils.clip_grads_with_norm_(theirs, largest, total)
    assert torch.equal(norm, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients.tensors, held, strict=True))


@given(params=parameters())
def test_all_gradients_are_zeroed_where_they_are(params):
    """The tensors stay, and so does what lies around them."""
    before = [param.grad for param in params]

    Gradients(params).zero()

    assert all(param.grad is one for param, one in zip(params, before, strict=True))
    assert not any(one.any() for one in before if one is not None)


def test_another_tensor_ends_a_list():
    """A list holds for the tensors that it was made of, not for what they were replaced by."""
    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    params[0].grad = torch.ones(3)
    gradients = Gradients(params)
    held: list[bool] = [gradients.holds()]
    given: list[Tensor | None] = [torch.ones(3), None]

    for one in given:
        params[0].grad = one
        held.append(gradients.holds())

    assert held == [True, False, False]
    params[1].grad = torch.ones(3)
    assert not gradients.holds()
