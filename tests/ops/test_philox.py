"""Keyed random numbers: known answers, layout, rates, independence."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora_fx.errors import MaskKeyError, SegmentError
from tlora_fx.ops import keep_mask, keep_scale, random_uniform, site_id, token_scale, uniform_at
from tlora_fx.ops import philox as module
from tlora_fx.ops.philox import philox

KNOWN = """
00000000 00000000 00000000 00000000  00000000 00000000  5f6fb709 0d893f64 4f121f81 4f730a48
ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  5207ddc2 45165e59 4d8ee751 8c52f662
243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  4dfccaba 190a87f0 c47362ba b6b5242a
"""

TRITON = """
import torch, triton, triton.language as tl

@triton.jit
def draw(out, k0, token, block, site, N: tl.constexpr):
    i = tl.arange(0, N).to(tl.uint32)
    zero = i * 0
    key = k0.to(tl.uint64)
    r0, r1, r2, r3 = tl.philox(key, token + i, block + zero, site + zero, zero, 7)
    for j in tl.static_range(4):
        r = r0 if j == 0 else r1 if j == 1 else r2 if j == 2 else r3
        tl.store(out + j * N + i, r.to(tl.int64))

out = torch.zeros(4, 16, dtype=torch.int64)
draw[(1,)](out, (5 << 32) | 9, 100, 3, 77, 16)
from tlora_fx.ops.philox import philox
n = torch.arange(100, 116)
mine = torch.stack(philox(n, n * 0 + 3, n * 0 + 77, n * 0, (9, 5)))
assert torch.equal(out & 0xFFFFFFFF, mine), (out, mine)
"""


def mask_of(made, columns):
    """The keep mask of a row."""
    rates, segments, keys, token_index, site = made.mask_tables()
    return keep_mask(rates, segments, keys, token_index, site, columns)


@pytest.mark.parametrize("line", KNOWN.strip().splitlines())
def test_seven_rounds_give_the_known_answers(line):
    """Philox4x32-7 equals the vectors that Random123 publishes: counter, key, words."""
    numbers = [int(word, 16) for word in line.split()]
    counter, key, expected = numbers[:4], numbers[4:6], numbers[6:]
    c0, c1, c2, c3 = map(torch.tensor, counter)
    found = philox(c0, c1, c2, c3, (key[0], key[1]))

    assert [int(word) for word in found] == expected


def test_triton_draws_the_same_words(tmp_path):
    """tl.philox with seven rounds, in Triton's interpreter, gives our words."""
    pytest.importorskip("triton")
    script = tmp_path / "draw.py"
    script.write_text(TRITON)
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], check=False, env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), step=st.integers(0, 2**32 - 1), columns=st.integers(1, 21))
def test_columns_take_their_halves_of_words(row, seed, step, columns):
    """Each element of a mask equals the one that Python integers give."""
    made = row((3, 0, 2), (0.3, 0.5, 0.0), (seed, 1, 2), step)
    mask = mask_of(made, columns)

    assert torch.equal(mask, made.multiplier(columns) > 0)


@settings(deadline=None, max_examples=25)
@given(rate=st.floats(0.001, 0.999), seed=st.integers(0, 2**32 - 1))
def test_the_keep_rate_is_the_stated_one(row, rate, seed):
    """The kept share of 64k elements lies within six standard deviations of 1 - rate."""
    made = row((256,), (rate,), (seed,))
    kept = mask_of(made, 256).double().mean().item()

    exact = 1 - round(rate * 65536) / 65536
    assert abs(kept - exact) <= 6 * (exact * (1 - exact) / 65536) ** 0.5 + 1e-9


def test_a_mask_is_independent_of_neighbours_and_order(row):
    """A job's mask stays when it is alone, moved, or among others."""
    alone = mask_of(row((5,), (0.4,), (9,)), 30)
    among = row((3, 5, 4), (0.1, 0.4, 0.9), (9, 9, 2))
    moved = row((5, 3), (0.4, 0.1), (9, 1))

    assert torch.equal(mask_of(among, 30)[3:8], alone)
    assert torch.equal(mask_of(moved, 30)[:5], alone)


def test_a_token_keeps_its_mask_in_another_micro_batch(row):
    """Tokens 4 and later of a step, in a row of their own, draw what the whole step drew."""
    whole = mask_of(row((10,), (0.4,)), 17)
    rest = mask_of(row((6,), (0.4,), start=(4,)), 17)

    assert torch.equal(rest, whole[4:])


@pytest.mark.parametrize("other", [{"seeds": (12,)}, {"step": 4}, {"site": 78}], ids=str)
def test_seed_step_and_site_each_change_the_mask(row, other):
    """Two masks with one different key part agree only by chance."""
    first = mask_of(row((64,), (0.5,)), 64)
    second = mask_of(row((64,), (0.5,), **other), 64)

    assert 0.45 < (first == second).double().mean() < 0.55


@pytest.mark.parametrize("count", [2, 3])
def test_pieces_of_the_columns_join_to_the_whole_mask(row, count):
    """A site's upper bits say where a piece of its columns begins."""
    made = row((5, 4), (0.4, 0.2))
    whole = mask_of(made, 48)
    size = 48 // count
    pieces = []
    for index in range(count):
        made.site_tensor = torch.tensor(made.site | (index * size // 8) << 32)
        pieces.append(mask_of(made, size))

    assert torch.equal(torch.cat(pieces, 1), whole)
    assert not torch.equal(pieces[0], pieces[1])


def test_pieces_do_not_show_in_a_mask(row, monkeypatch):
    """A mask drawn in many small pieces equals the one drawn at once."""
    made = row((40, 7), (0.3, 0.2))
    whole = mask_of(made, 50)
    monkeypatch.setattr(module, "_CPU_COUNTERS", 16)

    assert torch.equal(mask_of(made, 50), whole)


def test_scales_follow_the_exact_threshold(row):
    """Kept values are scaled by 65536 over the number of kept 16-bit values."""
    made = row((2, 1), (0.05, 0.0))

    assert keep_scale(0.05) == 65536 / (65536 - 3277)
    scales = token_scale(made.rate_table, made.segments, 3)
    assert scales.tolist() == [keep_scale(0.05)] * 2 + [1.0]


def test_uniform_numbers_do_not_depend_on_the_cut():
    """Any run of a tensor's elements holds the numbers that the whole tensor has there."""
    whole = random_uniform((6, 7), (1, 2))

    assert torch.equal(random_uniform((2, 7), (1, 2), offset=21), whole[3:5])
    assert torch.equal(uniform_at(torch.tensor([40, 3]), (1, 2)), whole.flatten()[[40, 3]])


def test_uniform_numbers_are_uniform_and_exact():
    """Values lie in (0, 1], follow the stated formula, and reach beyond 2**34 elements."""
    many = random_uniform((100_000,), (3, 4))
    far = random_uniform((4,), (3, 4), offset=5 << 34)
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


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"rates": (1.0,)}, MaskKeyError),
        ({"rates": (-0.1,)}, MaskKeyError),
        ({"rates": (float("nan"),)}, MaskKeyError),
        ({"seeds": (2**32,)}, MaskKeyError),
        ({"rates": (0.1, 0.1)}, MaskKeyError),
    ],
)
def test_wrong_mask_tables_are_named(row, change, error):
    """Rates outside [0, 1), keys beyond 32 bits and tables of another size are errors."""
    with pytest.raises(error):
        mask_of(row((4,), **({"rates": (0.1,)} | change)), 8)


@pytest.mark.parametrize("bounds", [[1, 4], [0, 5, 4], [0, 3], [0, 0]])
def test_segments_must_cover_the_tokens(row, bounds):
    """Segments that do not rise from 0 to the number of tokens are an error."""
    made = row((4,), (0.1,))
    made.segments = torch.tensor(bounds, dtype=torch.int32)
    made.rate_table = torch.full((len(bounds) - 1,), 0.1, dtype=torch.float64)
    with pytest.raises(SegmentError):
        mask_of(made, 8)
