"""Which products of a model a library computes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tlora_fx.cost.facts import library_products


def outer(x, y):
    return x[:, :, None] @ y[:, None, :]


def inner(x, y):
    return x @ y.t()


def batched(x, y):
    return torch.bmm(x[:, None, :], y[:, :, None])


def linear(x, y):
    return torch.nn.functional.linear(x, y) + torch.addmm(x[:, :3], x, y.t())


@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (outer, ()),
        (inner, ("aten.mm",)),
        (batched, ("aten.bmm",)),
        (linear, ("aten.addmm", "aten.linear")),
    ],
)
def test_products_that_add_something_up_are_found(made, expected, tracing_mode):
    how = {"tracing_mode": tracing_mode, "pre_dispatch": made is linear}
    graph = make_fx(made, **how)(torch.ones(3, 5), torch.ones(3, 5)).graph

    assert library_products(SimpleNamespace(graphs=lambda: [graph])) == expected
