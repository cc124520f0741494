"""Operators of several processes, and of rows in parts: sums over a group, nano-batches."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.parallel.processes import run_processes
from tlora_fx.errors import NanoBatchesWrong, TensorGroupMissing
from tlora_fx.ops import parallel, tp_copy, tp_cross_entropy, tp_reduce, use_group
from tlora_fx.ops.parallel import cut_sequences, remember_starts
from tlora_fx.ops.torch_compile import mark_compile_caches

SIZE, NAME = 2, "tp"
TARGETS = torch.tensor([0, 3, 4, 7, -100])
WEIGHTS = torch.arange(1.0, 6.0, dtype=torch.float64)


@pytest.fixture(autouse=True)
def no_groups():
    """Leave no name behind."""
    yield
    parallel._ranks.clear()


def region(x, share):
    """Whole values in, a sum of every process's part out."""
    return tp_reduce(torch.tanh(tp_copy(x, NAME)) * share, NAME)


def cut_loss(logits, rank):
    """The loss of logits of which this process uses its columns only."""
    wide = logits.shape[1] // SIZE
    return tp_cross_entropy(logits[:, rank * wide : (rank + 1) * wide], TARGETS, NAME)


def differences() -> list[float]:
    """How far results and gradients are from those of one process, eager and traced."""
    use_group(NAME, dist.group.WORLD)
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(5, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    own = slice(rank * 4, rank * 4 + 4)
    found = []
    for compiled in (False, True):
        run, lose = (_traced(f) if compiled else f for f in (region, cut_loss))
        y, loss = run(x, rank + 1), lose(logits, rank)
        wanted, plain = torch.tanh(x) * 3, F.cross_entropy(logits, TARGETS, reduction="none")
        pairs = [(y, wanted), (loss, plain), (_gradient(y, x), _gradient(wanted, x))]
        pairs.append((_gradient(loss, logits)[:, own], _gradient(plain, logits)[:, own]))
        found += [float((one - other).detach().abs().max()) for one, other in pairs]
    return found


def _traced(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def _gradient(result, leaf):
    weighted = result * WEIGHTS if result.dim() == 1 else result
    return torch.autograd.grad(weighted.sum(), leaf)[0]


def test_two_processes_give_what_one_gives():
    """Results and gradients, eager and traced; a target that no loss counts gives 0."""
    assert max(max(found) for found in run_processes(SIZE, differences)) < 1e-14


def test_a_process_alone_sums_with_nobody():
    """Both are the identity, and the loss is torch's."""
    use_group(NAME, None)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(5, 8)

    assert torch.equal(region(x, 2), torch.tanh(x) * 2)
    assert torch.equal(_gradient(region(x, 2), x), _gradient(torch.tanh(x) * 2, x))
    expected = F.cross_entropy(logits, TARGETS, reduction="none")
    assert torch.equal(tp_cross_entropy(logits, TARGETS, NAME), expected)


@pytest.mark.parametrize("operator", [tp_copy, tp_reduce])
def test_a_name_without_a_group_is_an_error(operator):
    """Silence would train on parts of sums; shapes alone need no group."""
    with pytest.raises(TensorGroupMissing, match="use_group"):
        operator(torch.ones(2), NAME)

    assert operator(torch.ones(2, device="meta"), NAME).shape == (2,)


def test_a_name_without_a_group_is_an_error_when_compiled():
    """Compiled code would hold the identity for good."""
    with pytest.raises(Exception, match="no process group stands behind"):
        torch.compile(tp_reduce, fullgraph=True, backend="aot_eager")(torch.ones(2), NAME)


def test_compiled_code_is_kept_apart_by_groups():
    """torch's caches on disk know names of operators only."""
    mark_compile_caches()
    before = torch.compiler.config.cache_key_tag
    use_group(NAME, None)
    mark_compile_caches()

    assert torch.compiler.config.cache_key_tag != before


ops = torch.ops.tlora_fx
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=20)


def starts_of(lengths):
    return [0, *accumulate(lengths)]


def table(*values):
    return torch.tensor(values, dtype=torch.int32)


@given(LENGTHS, st.integers(1, 8), st.integers(0, 100))
def test_each_run_costs_at_most_a_sequence_more_than_its_share(lengths, count, linear):
    """Runs are whole sequences, none is empty while there are enough, and costs are balanced."""
    cuts = cut_sequences(starts_of(lengths), count, linear)

    costs = [length * (linear + length) for length in lengths]
    runs = [sum(costs[low:high]) for low, high in pairwise(cuts)]
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(lengths), count + 1)
    assert sum(high > low for low, high in pairwise(cuts)) == min(count, len(lengths))
    if len(lengths) >= count:
        assert max(runs) <= sum(costs) / count + max(costs)


def test_tables_of_a_nano_batch_are_its_part_of_the_row_s():
    """Sequences of 3, 1, 4 and 2 tokens; the first job has two of them, the second has none."""
    cuts, *own = ops.nano_tables(table(0, 3, 4, 8, 10), table(0, 4, 4, 10), 2, 0)

    assert cuts.tolist() == [0, 4, 10]
    assert [value.tolist() for value in own] == [
        [0, 3, 4], 3, [0, 4, 4, 4],
        [0, 4, 6], 4, [0, 0, 0, 6],
    ]  # fmt: skip


def test_more_nano_batches_than_sequences_leave_empty_ones():
    """The last ones have no token, and tables that say so."""
    cuts, *own = ops.nano_tables(table(0, 5), table(0, 5), 3, 10)

    assert cuts.tolist() == [0, 5, 5, 5]
    assert [value.tolist() for value in own[3:6]] == [[0], 0, [0, 0]]


def test_what_was_remembered_is_not_read():
    """Starts that the host knows stand for those on the device."""
    seqlens = table(0, 9, 9, 9)
    remember_starts(seqlens, table(0, 2, 4, 9))

    cuts, *_ = ops.nano_tables(seqlens, table(0, 9), 3, 0)

    assert cuts.tolist() == [0, 2, 4, 9]


@given(LENGTHS, st.integers(1, 5))
def test_joining_undoes_splitting(lengths, count):
    """In the forward and in the backward."""
    row = torch.randn(1, sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    cuts, *_ = ops.nano_tables(table(*starts_of(lengths)), table(0, sum(lengths)), count, 7)
    weight = torch.randn_like(row)

    joined = ops.nano_join([2 * part for part in ops.nano_split(row, cuts, 1)], cuts, row, 1)
    (joined * weight).sum().backward()

    assert torch.equal(joined, 2 * row)
    assert torch.equal(row.grad, 2 * weight)


def test_operators_follow_torch_s_rules():
    """Schemas, fakes and gradients, by torch.library.opcheck."""
    row = torch.randn(1, 6, 2, dtype=torch.float64, requires_grad=True)
    cuts = table(0, 2, 6)
    parts = [part.detach().requires_grad_() for part in ops.nano_split(row, cuts, 1)]

    torch.library.opcheck(ops.nano_split.default, (row, cuts, 1))
    torch.library.opcheck(ops.nano_join.default, (parts, cuts, row.detach(), 1))
    torch.library.opcheck(ops.nano_tables.default, (table(0, 2, 6), table(0, 6), 2, 5))


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.nano_split(torch.zeros(1, 6), table(0, 2, 5), 1),
        lambda: ops.nano_split(torch.zeros(1, 6), table(0, 4, 2, 6), 1),
        lambda: ops.nano_join([torch.zeros(1, 6)], table(0, 3, 6), torch.zeros(1, 6), 1),
        lambda: ops.nano_tables(table(0, 6), table(0, 6), 0, 5),
    ],
    ids=["short", "falling", "parts", "count"],
)
def test_tables_of_another_row_are_refused(call):
    """With an error that names both."""
    with pytest.raises(NanoBatchesWrong):
        call()
