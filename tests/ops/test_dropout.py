"""Keyed masks: layout, rates, independence; `keyed_dropout`: which elements, bits, gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlora_fx.errors import MaskKeyError, SegmentError
from tlora_fx.ops import dropout as module
from tlora_fx.ops import keep_mask, keep_scale, keyed_dropout


@pytest.fixture
def drawn(row):
    """Four jobs, one without tokens, one without dropout."""
    return row((3, 0, 4, 1), (0.3, 0.5, 0.0, 0.6))


def test_dropout_multiplies_by_the_jobs_masks(drawn):
    """Each element is dropped or scaled as its job, token and column say."""
    x = torch.randn(1, 8, 11, dtype=torch.float64)
    out = keyed_dropout(x, *drawn.mask_tables(), 2)

    torch.testing.assert_close(out, x * drawn.multiplier(11), rtol=1e-15, atol=0)


def test_a_job_without_dropout_keeps_every_bit(drawn):
    """Rows of a job of rate 0 are untouched, NaN and negative zero included."""
    x = torch.randn(8, 5)
    x[4, 1], x[4, 2] = float("nan"), -0.0
    out = keyed_dropout(x, *drawn.mask_tables(), 1)

    assert torch.equal(out[3:7].view(torch.int32), x[3:7].view(torch.int32))


def test_the_gradient_passes_the_same_mask(drawn):
    """gradcheck and gradgradcheck hold in float64."""
    x = torch.randn(1, 8, 3, 3, dtype=torch.float64, requires_grad=True)

    def run(x):
        return keyed_dropout(x, *drawn.mask_tables(), 2)

    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)


def test_batch_form_counts_tokens_of_a_unit(row):
    """In x [B, S, I] a job's rows hold S tokens each."""
    made = row((1, 2), (0.3, 0.5), tokens_per_unit=3)
    made.token_index = made.token_index.view(3, 3)
    x = torch.randn(3, 3, 9, dtype=torch.float64)
    out = keyed_dropout(x, *made.mask_tables(), 2)

    torch.testing.assert_close(out.view(9, 9), x.view(9, 9) * made.multiplier(9))


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_the_result_is_a_new_contiguous_tensor(row, rate):
    """Even without any dropout the input is not handed back, whatever its strides."""
    made = row((6,), (rate,))
    x = torch.randn(10, 6, dtype=torch.float64).t()
    out = keyed_dropout(x, *made.mask_tables(), 1)

    assert out.is_contiguous()
    assert out.data_ptr() != x.data_ptr()
    torch.testing.assert_close(out, x * made.multiplier(10))


def test_a_nan_stays_in_its_job(row):
    """A NaN in one job leaves its neighbours bitwise unchanged."""
    made = row((3, 3), (0.3, 0.3))
    x = torch.randn(6, 8)
    clean = keyed_dropout(x, *made.mask_tables(), 1)
    x[:3] = float("nan")

    assert torch.equal(keyed_dropout(x, *made.mask_tables(), 1)[3:], clean[3:])


@pytest.mark.parametrize("gradient", [False, True])
def test_keyed_dropout_passes_opcheck(drawn, gradient):
    """Schema, fake, autograd registration and AOT dispatch hold."""
    x = torch.randn(8, 2, 5, requires_grad=gradient).transpose(1, 2)

    torch.library.opcheck(keyed_dropout, (x, *drawn.mask_tables(), 1))


def test_other_rows_do_not_recompile(row, compiles):
    """One compilation serves other lengths, segments, rates and keys."""
    rows = [row((4, 3), (0.1, 0.0)), row((2, 7), (0.3, 0.5), step=9), row((0, 6), (0.3, 0.5))]
    calls = [(torch.randn(1, made.tokens, 4), *made.mask_tables()) for made in rows]

    assert compiles(lambda x, *tables: keyed_dropout(x, *tables, 2) + 1, calls) == 1


def test_meta_tensors_take_no_tables(drawn):
    """On the meta device only shapes are computed."""
    x = torch.empty(1, 8, 4, device="meta")

    assert keyed_dropout(x, *drawn.mask_tables(), 2).shape == (1, 8, 4)


def test_tokens_must_fit_the_tables(drawn):
    """Another number of tokens than segments or token_index name is an error."""
    rates, segments, keys, token_index, site = drawn.mask_tables()
    with pytest.raises(SegmentError):
        keyed_dropout(torch.randn(9, 4), rates, segments, keys, token_index, site, 1)
    with pytest.raises(MaskKeyError):
        keyed_dropout(torch.randn(8, 4), rates, segments, keys, token_index[1:], site, 1)


def mask_of(made, columns):
    """The keep mask of a row."""
    rates, segments, keys, token_index, site = made.mask_tables()
    return keep_mask(rates, segments, keys, token_index, site, columns)


@given(seed=st.integers(0, 2**32 - 1), step=st.integers(0, 2**32 - 1), columns=st.integers(1, 21))
def test_columns_take_their_halves_of_words(row, seed, step, columns):
    """Each element of a mask equals the one that Python integers give."""
    made = row((3, 0, 2), (0.3, 0.5, 0.0), (seed, 1, 2), step)
    mask = mask_of(made, columns)

    assert torch.equal(mask, made.multiplier(columns) > 0)


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


def test_scales_follow_the_exact_threshold():
    """Kept values are scaled by 65536 over the number of kept 16-bit values."""
    assert keep_scale(0.05) == 65536 / (65536 - 3277)
    assert keep_scale(0.0) == 1.0


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
