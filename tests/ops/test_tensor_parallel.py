"""Where tensor-parallel processes meet: sums, copies and the loss of a cut vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.parallel.processes import run_processes
from tlora_fx.errors import TensorGroupMissing
from tlora_fx.ops import forget_groups, tp_copy, tp_cross_entropy, tp_reduce, use_group
from tlora_fx.ops.compile_caches import mark_compile_caches

SIZE, NAME = 2, "tp"
TARGETS = torch.tensor([0, 3, 4, 7, -100])
WEIGHTS = torch.arange(1.0, 6.0, dtype=torch.float64)


@pytest.fixture(autouse=True)
def no_groups():
    """Leave no name behind."""
    yield
    forget_groups()


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
