"""Rows cut along their tokens: sums of pieces, gathers, splits and jobs' tables."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from tests.planners.processes import run_processes
from tlora_fx.errors import TensorGroupMissing
from tlora_fx.ops import (
    forget_groups,
    tp_copy,
    tp_gather,
    tp_scatter,
    tp_segments,
    tp_split,
    use_group,
)
from tlora_fx.ops.sequence_parallel import _scattered, _summed_in_pieces, piece_size
from tlora_fx.ops.tensor_groups import place_of

SIZE, NAME = 2, "tp"
ROWS = (9, 8, 7, 5, 3, 2, 1, 0)


@pytest.fixture(autouse=True)
def no_groups():
    """Leave no name behind."""
    yield
    forget_groups()


def between(x, like, weight):
    """A norm with a trained weight on pieces, between a sum and what computes parts of a sum."""
    piece = tp_scatter(x, 1, SIZE, NAME) + tp_split(like, 1, SIZE, NAME)
    scaled = piece * torch.rsqrt(piece.pow(2).mean(-1, keepdim=True) + 1e-6)
    scaled = scaled * tp_copy(weight, NAME)
    whole = [tp_gather(scaled, like.shape[1], 1, SIZE, part, NAME) for part in (True, False)]
    return whole[0], whole[1]


def on_one(x, like, weight):
    """The same by one process."""
    whole = x + like
    return whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def differences(tokens: int, run=between) -> float:
    """How far results and gradients are from those of one process."""
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(tokens)
    x, like, *more = torch.randn(4, 1, tokens, 6, generator=draw, dtype=torch.float64)
    weight = torch.randn(6, generator=draw, dtype=torch.float64)
    leaves = [leaf.requires_grad_() for leaf in (x, like, weight)]
    y = on_one(*leaves)
    wanted = (y, *torch.autograd.grad((y * 3 * more[0] + y * more[1]).sum(), leaves))
    part, alike = run(x * (rank + 1) / 3, like, weight)
    # What each process computes a part of sums up to 3 * more[0]; the other loss all compute.
    loss = (part * (rank + 1) * more[0]).sum() + (alike * more[1]).sum()
    dx, dlike, dweight = torch.autograd.grad(loss, leaves)
    dx *= 3 / (rank + 1)
    pairs = zip((part, dx, dlike, dweight), wanted, strict=True)
    found = [float((one - other).detach().abs().max()) for one, other in pairs if one.numel()]
    return max(found, default=0.0)


def all_rows() -> float:
    """Rows of many tokens, of few, and of none."""
    use_group(NAME, dist.group.WORLD)
    return max(differences(tokens) for tokens in ROWS)


def all_traced() -> tuple[float, int]:
    """The same by compiled code, and how often it was compiled."""
    use_group(NAME, dist.group.WORLD)
    counted = CompileCounterWithBackend("aot_eager")

    def run(*given):
        for value in given[:2]:
            torch._dynamo.mark_dynamic(value, 1)
        return traced(*given)

    traced = torch.compile(between, fullgraph=True, backend=counted)
    # A piece of one token is run as it is (see compiled.py).
    return max(differences(n, run) for n in ROWS if piece_size(n, SIZE) > 1), counted.frame_count


def both_ways() -> bool:
    """Whether both ways to sum give the same; gloo scatters sums of float64."""
    use_group(NAME, dist.group.WORLD)
    draw = torch.Generator().manual_seed(dist.get_rank())
    rows = [torch.randn(1, tokens, 3, generator=draw, dtype=torch.float64) for tokens in ROWS]
    pairs = [(_scattered(x, 1, place), _summed_in_pieces(x, 1, place))
             for x in rows if (place := place_of(NAME, x))]  # fmt: skip
    return len(pairs) == len(ROWS) and all(torch.equal(one, other) for one, other in pairs)


def tables(tokens: int) -> list[int]:
    """Where jobs with 2, 0 and 3 tokens, and with what is left, have them in this piece."""
    use_group(NAME, dist.group.WORLD)
    bounds = torch.tensor([0, 2, 2, 5, tokens], dtype=torch.int32)
    return tp_segments(bounds, tokens, SIZE, NAME).tolist()


def test_pieces_give_what_one_process_gives():
    """Results and all gradients, whether or not tokens divide, to the last bits."""
    assert max(run_processes(SIZE, all_rows)) < 1e-14


def test_compiled_code_serves_rows_of_any_size():
    """Compiled once, for sizes that divide and for others."""
    for apart, compiled in run_processes(SIZE, all_traced):
        assert apart < 1e-14
        assert compiled == 1


def test_jobs_find_their_tokens_in_a_piece():
    """Seven tokens: four there, three and a zero, which is the last job's, here."""
    assert run_processes(SIZE, tables, 7) == [[0, 2, 2, 4, 4], [0, 0, 0, 1, 4]]


def test_gpus_sum_in_pieces_what_cpus_sum_whole():
    """The same bits, whether or not tokens divide, and for rows of none."""
    assert all(run_processes(SIZE, both_ways))


def test_a_process_alone_holds_whole_rows():
    """All are the identity."""
    use_group(NAME, None)
    x = torch.randn(1, 5, 3, dtype=torch.float64)

    assert torch.equal(tp_scatter(x, 1, SIZE, NAME), x)
    assert torch.equal(tp_split(x, 1, SIZE, NAME), x)
    assert torch.equal(tp_gather(x, 5, 1, SIZE, True, NAME), x)
    assert tp_segments(torch.tensor([0, 5]), 5, SIZE, NAME).tolist() == [0, 5]


def test_shapes_need_no_group():
    """Graphs are checked before there is one; real tensors without one are an error."""
    x = torch.empty(1, 5, 3, device="meta")

    assert tp_scatter(x, 1, SIZE, NAME).shape == (1, 3, 3)
    assert tp_split(x, 1, SIZE, NAME).shape == (1, 3, 3)
    assert tp_gather(x, 9, 1, SIZE, False, NAME).shape == (1, 9, 3)
    with pytest.raises(TensorGroupMissing, match="use_group"):
        tp_split(torch.ones(1, 5, 3), 1, SIZE, NAME)
