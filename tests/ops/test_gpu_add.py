"""`multi_lora_add` on generated kernels on CUDA, at the widths of narrow projections."""

from __future__ import annotations

import pytest
import torch

from tests.ops.token_scale import token_scale
from tlora_fx.ops import keep_mask, multi_lora_add
from tlora_fx.ops.kernels import dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS, RANKS, RATES = (700, 1, 0, 129, 1400), (16, 1, 8, 32, 5), (0.05, 0.0, 0.3, 0.1, 0.0)
DEVICE, DTYPE = "cuda", torch.bfloat16


def dropped(made):
    """What dropout multiplies with, float64."""
    rates, segments, keys, index, number = made.row.mask_tables()
    keep = keep_mask(rates, segments, keys, index, number, made.x.shape[-1])
    return keep * token_scale(rates, segments, made.row.tokens).to(DEVICE)[:, None]


@pytest.mark.parametrize("rates", [(0.0,) * 5, RATES], ids=["keep", "drop"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_branches_behind_another_operator_are_as_exact_as_pytorch(lora, monkeypatch, width, rates):
    """In bfloat16; the third and fourth call start what the second one noted."""
    made = lora(
        LENGTHS, RANKS, rates, features=(1024, width), dtype=DTYPE,
        adapter_dtype=torch.float32, compute=DTYPE, bias=False, device=DEVICE,
    )  # fmt: skip
    tables, calls, real = made.arguments()[5:], [], dispatch.add_forward
    monkeypatch.setattr(dispatch, "add_forward", lambda *given: (calls.append(1), real(*given))[1])
    leaves = made.leaves()
    y = torch.nn.functional.linear(made.x, made.weight)
    dy = torch.randn_like(y)

    def run():
        found = multi_lora_add(y, *leaves, *tables, max_rank=32, drops=any(rates))
        return (found.detach(), *torch.autograd.grad(found, leaves, dy))

    first, *again = [run() for _ in range(4)]
    monkeypatch.setenv("TLORA_FX_KERNELS", "off")
    plain = run()
    made.weight = torch.zeros_like(made.weight)
    branches = made.reference(*leaves, dropped(made))
    exact = (y + branches.detach(), *torch.autograd.grad(branches, leaves, dy.double()))

    assert len(calls) == 4
    for later in again:
        assert all(torch.equal(one, other) for one, other in zip(first, later, strict=True))
    for ours, theirs, wanted in zip(first, plain, exact, strict=True):
        assert (ours - wanted).norm() <= 2 * (theirs - wanted).norm()
