"""A site's bank: one leaf for all jobs, views for each."""

from __future__ import annotations

import pytest
import torch

from tlora_fx.ir.graph import AdapterSite
from tlora_fx.model.adapter_bank import AdapterBank


@pytest.fixture
def bank():
    """Jobs of rank 3, none, and 2, on a linear of 5 to 7."""
    sites = [AdapterSite("x", 3, 0.5, 0.1), None, AdapterSite("x", 2, 2.0, 0.0)]
    made = AdapterBank(sites, (5, 7), torch.float64, 11)
    made.materialize(torch.device("cpu"))
    return made


def test_tables_hold_each_jobs_numbers(bank):
    """Offsets of ranks, scalings, rates; nothing for the job without an adapter."""
    assert bank.ranks.tolist() == [0, 3, 3, 5]
    assert bank.scales.tolist() == [0.5, 0.0, 2.0]
    assert bank.rates.tolist() == [0.1, 0.0, 0.0]
    assert int(bank.site) == 11
    assert [bank.serves(job) for job in range(3)] == [True, False, True]


def test_a_jobs_parameters_are_views_in_pefts_shapes(bank):
    """A [r, in] and B [out, r]; what is written into them is in the bank."""
    a, b = bank.job_parameters(2)
    with torch.no_grad():
        a.fill_(3)
        b.copy_(torch.arange(14.0).view(7, 2))

    assert (a.shape, b.shape) == ((2, 5), (7, 2))
    assert (bank.a[3:] == 3).all()
    assert not bank.a[:3].any()
    assert bank.b[3].tolist() == [0, 2, 4, 6, 8, 10, 12]


def test_gradients_of_the_bank_show_in_the_views(bank):
    """A backward into the leaf is a gradient of each job's parameters."""
    a, _ = bank.job_parameters(0)
    (bank.a * torch.arange(25.0, dtype=torch.float64).view(5, 5)).sum().backward()

    assert torch.equal(a.grad, torch.arange(15.0, dtype=torch.float64).view(3, 5))


def test_an_empty_bank_lies_on_meta():
    """Compiling allocates nothing."""
    made = AdapterBank([AdapterSite("x", 4, 1.0, 0.0)], (8, 8), torch.float32, 0)

    assert made.a.is_meta
    assert not made.ranks.is_meta
