"""Counter-based random numbers: known answers, equal on every device, whatever the cut."""

import pytest
import torch

from tlora_fx.ops import site_id, uniform_at, uniform_rows
from tlora_fx.ops.philox import philox

KNOWN = """
00000000 00000000 00000000 00000000  00000000 00000000  5f6fb709 0d893f64 4f121f81 4f730a48
ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  5207ddc2 45165e59 4d8ee751 8c52f662
243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  4dfccaba 190a87f0 c47362ba b6b5242a
"""


@pytest.mark.parametrize("line", KNOWN.strip().splitlines())
def test_seven_rounds_give_the_known_answers(line):
    """Philox4x32-7 equals the vectors that Random123 publishes: counter, key, words."""
    numbers = [int(word, 16) for word in line.split()]
    counter, key, expected = numbers[:4], numbers[4:6], numbers[6:]
    c0, c1, c2, c3 = map(torch.tensor, counter)
    found = philox(c0, c1, c2, c3, (key[0], key[1]))

    assert [int(word) for word in found] == expected


def test_uniform_numbers_do_not_depend_on_the_cut():
    """Any elements of a tensor are the numbers that the whole tensor has there."""
    whole = uniform_at(torch.arange(42).view(6, 7), (1, 2))

    assert torch.equal(uniform_at(torch.arange(21, 35).view(2, 7), (1, 2)), whole[3:5])
    assert torch.equal(uniform_at(torch.tensor([40, 3]), (1, 2)), whole.flatten()[[40, 3]])


def test_numbers_of_many_keys_are_those_of_each():
    """Drawn together, whatever their number of words."""
    rows = uniform_rows(11, 7, [3, 2**31 - 1, 0])

    for site, row in zip((3, 2**31 - 1, 0), rows, strict=True):
        assert torch.equal(row, uniform_at(torch.arange(11), (7, site)))


def test_uniform_numbers_are_uniform_and_exact():
    """Values lie in (0, 1], follow the stated formula, and reach beyond 2**34 elements."""
    many = uniform_at(torch.arange(100_000), (3, 4))
    far = uniform_at(torch.arange(4) + (5 << 34), (3, 4))
    zero = torch.tensor(0)
    expected = philox(zero, zero + 5, zero, zero + 2**32 - 1, (3, 4))

    assert many.min() > 0
    assert many.max() <= 1
    assert abs(many.mean() - 0.5) < 0.01
    assert abs(many.var() - 1 / 12) < 0.01
    assert far.tolist() == [((int(w) >> 8) + 0.5) / 2**24 for w in expected]


def test_a_site_has_a_lasting_number():
    """The number of a module path never changes: checkpoints depend on it."""
    assert site_id("model.layers.0.self_attn.q_proj") == 1146837278
    assert 0 <= site_id("") < 2**31
