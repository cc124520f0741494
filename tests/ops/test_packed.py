"""How long packed adapters are kept, and what they are known by."""

from __future__ import annotations

import pytest
import torch

from tlora_fx.ops.kernels import device_tables, packed
from tlora_fx.ops.kernels.support import Site


@pytest.fixture
def site():
    """A small site."""
    return Site(32, 48, "float32", "float32", 16, 16, 8, "out_in", False, 64, 90)


def pair():
    """A and B of two jobs."""
    return torch.zeros(8, 32), torch.zeros(8, 48)


def tables():
    """The copies of a site's tables, which nobody else holds."""
    ranks, none = torch.tensor([0, 3, 8], dtype=torch.int32), torch.zeros(2, dtype=torch.float64)
    given = ranks, none + 1, none, torch.tensor(5)
    made = device_tables.site_tables(given, 8, 16, torch.device("cpu"), capturing=False)
    device_tables._sites.clear()
    return made


@pytest.mark.parametrize("gone", ["a", "b"])
def test_buffers_go_with_either_adapter(site, gone):
    """Another tensor may come to lie where it was."""
    adapters = dict(zip("ab", pair(), strict=True))
    held = packed.packed_for(**adapters, site=site, jobs=2)
    assert packed.packed_for(**adapters, site=site, jobs=2) is held

    del adapters[gone]

    assert all(one is not held for one in packed._packed.values())


def test_what_was_packed_by_tables_that_are_gone_is_not_current(site):
    """Tables that were made alike since then may lie at the same address."""
    a, b = pair()
    held = packed.packed_for(a, b, site, 2)
    old = tables()
    noted = packed.contents(held, a, b, old)
    assert noted == packed.contents(held, a, b, old)

    del old

    assert noted != packed.contents(held, a, b, tables())
