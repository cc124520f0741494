"""The chunked loss against a plain cross entropy."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tlora_fx.model.loss import ChunkedLoss

HIDDEN, WORDS = 6, 11


@pytest.fixture
def head():
    """A linear head in float64."""
    torch.manual_seed(0)
    return nn.Linear(HIDDEN, WORDS).double()


def inputs(lines):
    """Hidden states of 20 tokens, target rows of three jobs, the second without any."""
    torch.manual_seed(1)
    shape = (4, 5, HIDDEN) if lines else (1, 20, HIDDEN)
    hidden = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([0, 2, 3, 7, 8, 12, 19])
    targets = torch.randint(WORDS, (7,))
    return hidden, rows, targets, torch.tensor([0, 3, 3, 7], dtype=torch.int32)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_chunks_of_any_size_give_each_jobs_sum_and_gradients(head, lines, chunk, frozen):
    """Also where a chunk holds rows of two jobs, in both forms."""
    loss = ChunkedLoss(head.requires_grad_(not frozen), WORDS, (), lines=lines, frozen=frozen)
    loss.chunk_rows = chunk
    hidden, rows, targets, segments = inputs(lines)
    weights = torch.tensor([0.3, 5.0, 0.7], dtype=torch.float64)
    if chunk > 2:
        # Of a head that is trained they are exact.
        loss.weights = torch.tensor([0.3, 0.0, 2.0]) if frozen else weights

    found = loss(hidden, rows, targets, segments)
    (found * weights).sum().backward()

    again = hidden.detach().clone().requires_grad_()
    logits = head(again.reshape(-1, HIDDEN)[rows])
    every = F.cross_entropy(logits, targets, reduction="none")
    expected = torch.stack([every[:3].sum(), every.new_zeros(()), every[3:].sum()])
    mine, head.weight.grad = head.weight.grad, None
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(hidden.grad, again.grad)
    torch.testing.assert_close(mine, head.weight.grad)


def test_a_gradient_taken_ahead_has_the_bits_of_one_that_is_not(head):
    """Where the weights are known."""
    hidden, *rest = inputs(lines=False)
    hidden, head = hidden.detach().float().requires_grad_(), head.float().requires_grad_(False)
    weights = torch.tensor([1 / 3, 0.0, 1 / 7], dtype=torch.float64)
    found = []
    for frozen in (False, True):
        loss = ChunkedLoss(head, WORDS, (), frozen=frozen)
        loss.weights = weights
        hidden.grad = None
        (loss(hidden, *rest) * weights).sum().backward()
        found.append(hidden.grad)

    assert torch.equal(*found)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("chunk", [3, 100])
def test_rows_that_fill_up_change_no_gradient(head, frozen, chunk):
    """A captured row names its last target's row again, without the label."""
    loss = ChunkedLoss(head.requires_grad_(not frozen), WORDS, (), frozen=frozen)
    loss.chunk_rows = chunk
    hidden, rows, targets, segments = inputs(lines=False)
    filled = torch.cat([rows, rows[-1:].expand(5)]), F.pad(targets, (0, 5), value=-100)
    more = segments + torch.tensor([0, 0, 0, 5], dtype=torch.int32)
    found = []
    for row in ((rows, targets, segments), (*filled, more)):
        hidden.grad = None
        sums = loss(hidden, *row)
        sums.sum().backward()
        found.append((sums.detach(), hidden.grad))

    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("lines", [False, True])
def test_what_chunks_begin_with_is_done_to_every_row(head, lines, frozen):
    """As if the hidden states had come so; when a model is evaluated, too."""
    loss = ChunkedLoss(head.requires_grad_(not frozen), WORDS, (), lines=lines, frozen=frozen)
    loss.chunk_rows = 3
    norm = nn.RMSNorm(HIDDEN).double().requires_grad_(False)
    hidden, *rest = inputs(lines)
    found = []
    for begun in (False, True):
        hidden.grad = None
        sums = loss(hidden, *rest, finish=norm) if begun else loss(norm(hidden), *rest)
        sums.sum().backward()
        loss.predicted = []
        with torch.no_grad():
            loss(hidden, *rest, finish=norm) if begun else loss(norm(hidden), *rest)
        found.append((sums.detach(), hidden.grad, *loss.predicted))
        loss.predicted = None

    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize(
    ("frozen", "known", "products"), [(False, False, 4), (False, True, 3), (True, False, 2)]
)
def test_logits_are_computed_once(head, frozen, known, products):
    """One product for them, one for the hidden states' gradient, and one for a trained head's.

    A trained head whose weights are not known computes them twice.
    """
    loss = ChunkedLoss(head.requires_grad_(not frozen), WORDS, (), frozen=frozen)
    hidden, *rest = inputs(lines=False)
    loss.weights = torch.ones(3) if known else None

    with FlopCounterMode(display=False) as counted:
        loss(hidden, *rest).sum().backward()

    assert counted.get_total_flops() == products * 2 * 7 * HIDDEN * WORDS


def test_half_precision_logits_take_their_loss_in_float32(head):
    """The sum is wider than the model."""
    loss = ChunkedLoss(head.bfloat16(), WORDS, ())
    hidden, *rest = inputs(lines=False)

    assert loss(hidden.bfloat16(), *rest).dtype == torch.float32


def test_a_row_without_targets_has_a_loss_of_zero(head):
    """And a backward that runs."""
    loss = ChunkedLoss(head, WORDS, ())
    hidden = torch.randn(1, 3, HIDDEN, dtype=torch.float64, requires_grad=True)
    nothing = torch.empty(0, dtype=torch.int64)

    found = loss(hidden, nothing, nothing, torch.zeros(3, dtype=torch.int32))
    found.sum().backward()

    assert found.tolist() == [0.0, 0.0]
    assert not hidden.grad.any()


class Recording(nn.Module):
    """A head that keeps the tables that it was given."""

    def __init__(self, head) -> None:
        super().__init__()
        self.head = head
        self.seen: list[tuple[list[int], list[int]]] = []

    def forward(self, hidden, segments, token_index):
        """Logits."""
        self.seen.append((segments.tolist(), token_index.reshape(-1).tolist()))
        return self.head(hidden)


def test_a_head_with_adapters_gets_the_tables_of_its_chunk(head):
    """Segments count the chunk's rows; indices are those of the chosen tokens."""
    recording = Recording(head)
    loss = ChunkedLoss(recording, WORDS, ("segments", "token_index"))
    loss.chunk_rows = 4
    hidden, rows, targets, bounds = inputs(lines=False)
    segments = torch.tensor([0, 5, 6, 20], dtype=torch.int32)
    index = torch.arange(100, 120, dtype=torch.int32)[None]

    loss(hidden, rows, targets, bounds, segments, index)

    assert recording.seen == [
        ([0, 3, 3, 4], [100, 102, 103, 107]),
        ([0, 0, 0, 3], [108, 112, 119]),
    ]


@pytest.mark.parametrize(("words", "most"), [(128_256, 1040), (256_000, 512), (11_000_000, 64)])
def test_chunks_are_as_few_as_fit_and_begin_where_compiled_code_reads_fast(head, words, most):
    """No chunk's logits take more than 512 MiB in float32, and all chunks have as many, but 16."""
    loss = ChunkedLoss(head, words, ())

    for rows in (1, 17, *range(most - 1, most + 2), 1041, 2079, 4768, 8136, 15_873, 16_897):
        cuts = loss._cuts(rows)
        sizes = [stop - start for start, stop in pairwise(cuts)]

        assert (cuts[0], cuts[-1], len(sizes)) == (0, rows, -(-rows // most))
        assert all(start % 16 == 0 for start in cuts[:-1])
        assert 0 < min(sizes) <= max(sizes) <= most
        assert max(sizes) - min(sizes) < 32


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("pieces", [1, 2, 3, 16])
def test_a_fixed_number_of_pieces_gives_the_same_sums_and_gradients(head, lines, pieces):
    """Code that knows nothing of the row, as programs are exported."""
    loss = ChunkedLoss(head, WORDS, (), lines=lines)
    hidden, *row = inputs(lines)
    expected = loss(hidden, *row)
    (wanted,) = torch.autograd.grad(expected.sum(), hidden)

    loss.pieces = pieces
    found = loss(hidden, *row)

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), hidden)[0], wanted)


def test_pieces_are_filled_with_rows_of_the_last_job(head):
    """Tables cover what fills a piece, so that operators of the head accept them."""
    recording = Recording(head)
    loss = ChunkedLoss(recording, WORDS, ("segments", "token_index"))
    loss.pieces = 2
    hidden, rows, targets, bounds = inputs(lines=False)
    segments = torch.tensor([0, 5, 6, 20], dtype=torch.int32)
    index = torch.arange(100, 120, dtype=torch.int32)[None]

    loss(hidden, rows, targets, bounds, segments, index)

    assert recording.seen == [
        ([0, 3, 3, 5], [100, 102, 103, 107, 108]),
        ([0, 0, 0, 5], [112, 119, 0, 0, 0]),
    ]


def test_what_fills_pieces_reads_no_jobs_hidden_state(head):
    """A NaN in a row without a target reaches no gradient."""
    loss = ChunkedLoss(head, WORDS, ())
    loss.pieces = 2
    hidden, *row = inputs(lines=False)
    with torch.no_grad():
        hidden[0, 1] = torch.nan

    found = loss(hidden, *row)
    found.sum().backward()

    assert torch.isfinite(found).all()
    assert torch.isfinite(hidden.grad).all()
