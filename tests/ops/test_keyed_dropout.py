"""`keyed_dropout`: which elements, which bits, which gradient."""

import pytest
import torch

from tlora_fx.errors import MaskKeyError, SegmentError
from tlora_fx.ops import keyed_dropout


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
