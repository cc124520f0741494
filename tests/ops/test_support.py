"""What kernels leave to PyTorch, and how the log says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tlora_fx.ops import multi_lora_add
from tlora_fx.ops.kernels import support
from tlora_fx.ops.tables import SiteGroup


@pytest.fixture
def group(lora):
    """A site's x and tables, by the type of its base."""

    def make(dtype, **other):
        made = lora((3, 4), (2, 8), features=(32, 48), dtype=dtype, **other)
        x, weight, _, a, b, ranks, scales, rates, *row, site, compute = made.arguments()
        tables = [weight], [a], [b], [ranks], [scales], [rates], *row, [site], compute, 8, False
        return x, SiteGroup(*tables)

    return make


@pytest.fixture(autouse=True)
def with_triton(monkeypatch):
    """Whether it is installed is no matter here."""
    monkeypatch.setattr(support, "has_triton", lambda: True)
    monkeypatch.delenv("TLORA_FX_KERNELS", raising=False)


def test_bases_in_float32_are_pytorchs_until_asked_for(group, monkeypatch):
    """The reason says how to ask."""
    site = group(torch.float32)
    assert "TLORA_FX_KERNELS=on" in support.why_not(*site)

    monkeypatch.setenv("TLORA_FX_KERNELS", "on")
    assert support.why_not(*site) == ""


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"dtype": torch.float64}, "no kernels for torch.float64"),
        ({"dtype": torch.bfloat16, "compute": torch.float32}, "compute in torch.float32"),
        ({"dtype": torch.bfloat16}, ""),
    ],
    ids=["float64", "compute", "bfloat16"],
)
def test_types_decide_who_serves(group, other, reason):
    """In the default mode."""
    found = support.why_not(*group(**other))

    assert reason in found
    assert bool(found) == bool(reason)


def test_branches_behind_another_operator_say_it_too(lora, monkeypatch):
    """The log names shape and reason, once a shape."""
    said = []
    monkeypatch.setattr(support.logger, "info", lambda text, *parts: said.append(text % parts))
    made = lora((3, 4), (2, 8), features=(32, 49), dtype=torch.bfloat16)
    x, _, _, a, b, *tables = made.arguments()
    with FakeTensorMode(allow_non_fake_inputs=True):
        y, x, a, b = (
            torch.empty(one, device="cuda", dtype=x.dtype)
            for one in ((1, 7, 49), x.shape, a.shape, b.shape)
        )
        for _ in range(2):
            multi_lora_add(y, x, a, b, *tables)

    assert said == ["PyTorch serves the adapters of 32→49: sizes are not multiples of 16"]


def test_the_reason_is_logged_where_sizes_are_symbols(group, caplog):
    """`torch.compile` with dynamic shapes asks with sizes that cannot be hashed."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    x, site = group(torch.float32)

    def dynamic(value):
        return mode.from_tensor(
            value, symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * value.dim())
        )

    with mode, caplog.at_level("INFO", "tlora_fx.ops"):
        x, a, b, weight = (dynamic(value) for value in (x, site.a[0], site.b[0], site.weights[0]))
        site = replace(site, weights=[weight], a=[a], b=[b])
        assert support.kernel_group(torch.empty(x.shape, device="cuda"), site) is None

    assert "PyTorch serves the adapters" in caplog.text


@pytest.mark.parametrize(
    ("most", "block"), [(1, 16), (32, 16), (33, 32), (64, 32), (65, 64), (300, 64)]
)
def test_ranks_are_padded_to_blocks(most, block):
    """Half of a block of 64 would be padding for most jobs of ranks up to 64."""
    assert support.rank_block(most) == block
