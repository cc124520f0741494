"""What rules say of pieces holds of real ones: operators on pieces give the results' pieces."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

import tlora_fx.passes.tensor_parallel.rules  # noqa: F401  (registers its rules)
from tlora_fx.ir.graph import TensorRef
from tlora_fx.passes.tensor_parallel.rules import (
    RULES,
    CannotCarry,
    NeedsRuns,
    Operands,
    Runs,
    carried,
    resize_parts,
    resized,
    rule,
)

aten = torch.ops.aten
PIECES = 2
ONE = torch.arange(2 * 3 * 4 * 8, dtype=torch.float64).reshape(2, 3, 4, 8).sin()
TWO = ONE.cos()

# Operator, its arguments, the cut of tensors of the operator's shape, and the result's.
CARRIED = [
    (aten.silu.default, (ONE,), 2, 2),
    (aten.mul.Tensor, (ONE, TWO), 2, 2),
    (aten.mul.Tensor, (ONE, 2.0), 3, 3),
    (aten.to.dtype, (ONE, torch.float32), 2, 2),
    (aten.dropout.default, (ONE, 0.5, False), 2, 2),
    (aten.view.default, (ONE, [2, 3, 32]), 2, 2),
    (aten.view.default, (ONE, [2, 3, 2, 2, 8]), 2, 2),
    (aten.view.default, (ONE, [2, 3, 1, 32]), 2, 3),
    (aten.reshape.default, (ONE, [2, 3, -1, 8]), 2, 2),
    (aten.view.default, (ONE, [6, 4, 8]), 2, 1),
    (aten.view.default, (ONE, [6, 32]), 0, 0),
    (aten.unsqueeze.default, (ONE, 1), 2, 3),
    (aten.unsqueeze.default, (ONE, 3), 2, 2),
    (aten.squeeze.dim, (ONE.view(1, 6, 4, 8), 0), 2, 1),
    (aten.transpose.int, (ONE, 1, 2), 2, 1),
    (aten.permute.default, (ONE, [0, 2, 3, 1]), 3, 2),
    (aten.slice.Tensor, (ONE, 3, 0, 4), 2, 2),
    (aten.select.int, (ONE, 1, 2), 2, 1),
    (aten.split.Tensor, (ONE, 4, 3), 2, (2, 2)),
    (aten.chunk.default, (ONE, 2, -1), 2, (2, 2)),
    (aten.unbind.int, (ONE, 0), 2, (1, 1)),
    (aten.expand.default, (ONE[:, :, :, None, :], [2, 3, 4, 5, 8]), 2, 2),
    (aten.flatten.using_ints, (ONE, 2, 3), 2, 2),
    (aten.flatten.using_ints, (ONE, 0, 1), 3, 2),
    (aten.mean.dim, (ONE, [-1], True), 2, 2),
    (aten.sum.dim_IntList, (ONE, [1]), 2, 1),
    (aten.softmax.int, (ONE, -1), 2, 2),
    (aten.layer_norm.default, (ONE, [8]), 2, 2),
    (aten.cat.default, ([ONE, TWO], -1), 2, 2),
    (aten.bmm.default, (ONE.view(6, 4, 8), TWO.view(6, 8, 4)), 0, 0),
    (aten.scaled_dot_product_attention.default, (ONE, ONE, TWO), 0, 0),
]  # fmt: skip
# 24 columns of three runs, or 12 heads of two columns each.
JOINED = torch.arange(2 * 3 * 24, dtype=torch.float64).reshape(2, 3, 24).sin()
QKV, KV, HEADS_OF = Runs(2, (12, 8, 4)), Runs(2, (8, 4)), Runs(2, (6, 4, 2))
END = 2**63 - 1
OF_RUNS = [
    (aten.silu.default, (JOINED,), QKV, QKV),
    (aten.add.Tensor, (JOINED, JOINED.cos()), QKV, QKV),
    (aten.transpose.int, (JOINED, 1, 2), QKV, Runs(1, QKV.sizes)),
    (aten.view.default, (JOINED, [6, 24]), QKV, Runs(1, QKV.sizes)),
    (aten.view.default, (JOINED, [2, 3, 12, 2]), QKV, HEADS_OF),
    (aten.view.default, (JOINED.view(2, 3, 12, 2), [2, 3, -1]), HEADS_OF, QKV),
    (aten.flatten.using_ints, (JOINED.view(2, 3, 12, 2), 2, 3), HEADS_OF, QKV),
    (aten.select.int, (JOINED, 1, 2), QKV, Runs(1, QKV.sizes)),
    (aten.mean.dim, (JOINED, [1], True), QKV, QKV),
    (aten.slice.Tensor, (JOINED, 1, 0, 2), QKV, QKV),
    (aten.slice.Tensor, (JOINED, 2, 0, 12), QKV, 2),
    (aten.slice.Tensor, (JOINED, -1, 12, -4), QKV, 2),
    (aten.slice.Tensor, (JOINED, 2, 20, END), QKV, 2),
    (aten.slice.Tensor, (JOINED, 2, 12, END), QKV, KV),
    (aten.slice.Tensor, (JOINED, 2, 0, END), 2, 2),
    (aten.slice.Tensor, (JOINED.view(2, 3, 12, 2), 2, 6, 10), HEADS_OF, 2),
    (aten.split_with_sizes.default, (JOINED, [12, 12], 2), QKV, (2, KV)),
    (aten.split.sizes, (JOINED, [12, 8, 4], -1), QKV, (2, 2, 2)),
    (aten.split.Tensor, (JOINED, 8, 2), Runs(2, (8, 8, 8)), (2, 2, 2)),
    (aten.split.Tensor, (JOINED, 2, 1), QKV, (QKV, QKV)),
    (aten.chunk.default, (JOINED, 2, -1), Runs(2, (12, 12)), (2, 2)),
]  # fmt: skip
REFUSED_OF_RUNS = [
    (aten.view.default, (JOINED, [2, 3, 6, 4]), QKV, "folds the runs"),
    (aten.view.default, (JOINED, [2, 3, 4, 6]), QKV, "folds the runs"),
    (aten.softmax.int, (JOINED, -1), QKV, "normalises"),
    (aten.unbind.int, (JOINED, 0), QKV, "parts of several runs"),
    (aten.bmm.default, (JOINED.view(24, 2, 3), JOINED.view(24, 3, 2)), Runs(0, QKV.sizes),
     "parts of several runs"),
]  # fmt: skip
# What an operator asks for: where runs should end.
ASKED = [
    (aten.slice.Tensor, (JOINED, 2, 0, 16), 2, {0, 16, 24}),
    (aten.slice.Tensor, (JOINED, 2, 0, 16), QKV, {0, 12, 16, 20, 24}),
    (aten.split.sizes, (JOINED, [12, 8, 4], -1), 2, {0, 12, 20, 24}),
    (aten.split.Tensor, (JOINED, 8, -1), 2, {0, 8, 16, 24}),
    (aten.chunk.default, (JOINED[..., :16], 2, -1), Runs(2, (12, 4)), {0, 8, 12, 16}),
]
REFUSED = [
    (aten.mean.dim, (ONE, [-1], True), 3, "reduces over"),
    (aten.view.default, (ONE, [2, 12, 8]), 2, "folds the pieces"),
    (aten.view.default, (ONE, [2, 3, 32]), 3, "folds the pieces"),
    (aten.slice.Tensor, (ONE, 2, 0, 2), 2, "takes a part"),
    (aten.split.Tensor, (ONE, 2, 2), 2, "in one matrix"),
    (aten.cat.default, ([ONE, TWO], 2), 2, "appends"),
    (aten.softmax.int, (ONE, -1), 3, "normalises"),
    (aten.dropout.default, (ONE, 0.5, True), 2, "mask"),
    (aten.squeeze.default, (ONE,), 2, "every dimension"),
    (aten.cumsum.default, (ONE, 1), 2, "no rule"),
    (aten.scaled_dot_product_attention.default, (ONE, ONE, TWO), 2, "by heads"),
]


def call_of(target, args, cut):
    """A graph of one call on tensors that are all cut alike, and what rules are told of it."""
    graph = fx.Graph()
    cuts, tensors = {}, []

    def placed(value):
        if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            return [placed(one) for one in value]
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"value_{len(tensors)}")
        node.meta["val"], cuts[node] = value, cut
        tensors.append(value)
        return node

    node = graph.call_function(target, tuple(map(placed, args)))
    node.meta["val"] = target(*args)
    graph.output(node)
    return graph, Operands(node, PIECES, cuts), tensors


def piece(value, cut, index):
    if isinstance(value, (list, tuple)):
        return [piece(one, own, index) for one, own in zip(value, cut, strict=True)]
    if isinstance(cut, Runs):
        runs = value.split(cut.sizes, cut.dim)
        return torch.cat([piece(run, cut.dim, index) for run in runs], cut.dim)
    size = value.shape[cut] // PIECES
    return value.narrow(cut, index * size, size)


@pytest.mark.parametrize(("target", "args", "cut", "expected"), CARRIED + OF_RUNS)
def test_an_operator_on_a_piece_gives_the_piece_of_its_result(target, args, cut, expected):
    """For every piece, along the dimension that the rule names."""
    graph, operands, tensors = call_of(target, args, cut)
    whole = operands.node.meta["val"]

    found = carried(operands)
    if not isinstance(found, tuple):
        resized(operands.node, found, PIECES)
    resize_parts(operands.node, operands.cuts, PIECES)
    run = fx.GraphModule({}, graph)

    assert found == expected
    for index in range(PIECES):
        made = run(*(piece(value, cut, index) for value in tensors))
        wanted = piece(whole, found, index)
        for one, other in zip(*(x if isinstance(x, (list, tuple)) else [x] for x in (made, wanted)),
                              strict=True):  # fmt: skip
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("target", "args", "cut", "reason"), REFUSED + REFUSED_OF_RUNS)
def test_what_needs_more_than_a_piece_is_refused_with_its_reason(target, args, cut, reason):
    """The reason is what a note tells users."""
    _, operands, _ = call_of(target, args, cut)

    with pytest.raises(CannotCarry, match=reason):
        carried(operands)


def test_a_piece_does_not_meet_the_whole_of_another_value():
    """One factor cut, the other whole: refused, unless the other is the same along the cut."""
    _, operands, _ = call_of(aten.mul.Tensor, (ONE, TWO), 2)
    whole = operands.node.args[1]
    del operands.cuts[whole]

    with pytest.raises(CannotCarry, match="the whole of 'value_1'"):
        carried(operands)

    whole.meta["val"] = TWO[:, :, :1]
    assert carried(operands) == 2


HEADS = torch.randn(5, 4, 8, dtype=torch.float64)
ROW = (
    torch.tensor([0, 2, 5], dtype=torch.int32),
    torch.tensor(3, dtype=torch.int32),
    torch.tensor([0, 5], dtype=torch.int32),
    torch.tensor([[1, 0]]),
    torch.arange(5, dtype=torch.int32),
    torch.tensor(7),
)


def attention(dropout, cuts=3):
    """Attention of which the first so many of query, key and value are cut by heads."""
    given = (HEADS, HEADS[:, :2], HEADS[:, 2:], *ROW, 0.3, True, -1, 0.0, None, dropout)
    graph, operands, _ = call_of(torch.ops.tlora_fx.packed_attention.default, given, 1)
    for node in list(operands.cuts)[cuts:]:
        del operands.cuts[node]
    return graph, operands


def test_heads_attend_by_themselves():
    """Two query heads to a key head, in the piece as in the whole; lse holds heads first."""
    graph, operands = attention(0.0)

    assert carried(operands) == (1, 0)
    run, (out, _) = fx.GraphModule({}, graph), operands.node.meta["val"]
    own = (HEADS[:, 2:], HEADS[:, 1:2], HEADS[:, 3:])
    torch.testing.assert_close(run(*own, *ROW)[0], piece(out, 1, 1))


@pytest.mark.parametrize(("dropout", "cuts", "reason"), [
    (0.1, 3, "number of the head"), (0.0, 2, "not all cut by heads"),
])  # fmt: skip
def test_attention_needs_all_of_its_inputs_by_heads_and_no_masks(dropout, cuts, reason):
    """Masks of weights are drawn by the head's number in the whole."""
    with pytest.raises(CannotCarry, match=reason):
        carried(attention(dropout, cuts)[1])


@pytest.mark.parametrize(("target", "args", "cut", "ends"), ASKED)
def test_what_parts_pieces_asks_for_runs_that_end_where_its_parts_do(target, args, cut, ends):
    """Together with those that are there already."""
    _, operands, _ = call_of(target, args, cut)

    with pytest.raises(NeedsRuns) as asked:
        carried(operands)
    assert (asked.value.ends, asked.value.size) == (ends, max(ends))


def test_parts_are_asked_for_together():
    """Three slices of one value; a slice along another dimension, or every second, is no part."""
    graph, operands, _ = call_of(aten.slice.Tensor, (JOINED, 2, 0, 12), 2)
    (source,) = operands.cuts
    for bounds in ((2, 12, 20), (2, 20, END), (1, 0, 1), (2, 0, 6, 2)):
        other = graph.call_function(aten.slice.Tensor, (source, *bounds))
        other.meta["val"] = aten.slice.Tensor(JOINED, *bounds)

    with pytest.raises(NeedsRuns) as asked:
        carried(operands)
    assert asked.value.ends == {0, 12, 20, 24}
    with pytest.raises(CannotCarry, match="takes a part"):
        carried(Operands(other, PIECES, operands.cuts))


def test_runs_meet_only_the_same_runs():
    """A piece of one run and one of several do not lie on each other; the same runs would do."""
    _, operands, _ = call_of(aten.add.Tensor, (JOINED, JOINED.cos()), QKV)
    operands.cuts[operands.node.args[1]] = 2

    with pytest.raises(NeedsRuns, match="other runs") as asked:
        carried(operands)
    assert asked.value.ends == {0, 12, 20, 24}


def test_a_stored_tensor_is_cut_by_the_runs_that_it_meets():
    """Such as a bias that a model adds by itself."""
    _, operands, _ = call_of(aten.add.Tensor, (JOINED, JOINED[0, 0]), QKV)
    bias = operands.node.args[1]
    del operands.cuts[bias]
    bias.op, bias.meta["tensor"] = "get_attr", TensorRef("base", "bias", (24,), torch.float64)

    assert carried(operands) == QKV
    assert operands.stored == {bias: Runs(0, QKV.sizes)}


def test_getitem_takes_the_cut_of_its_result():
    """Each of several results has its own."""
    graph, operands, _ = call_of(aten.chunk.default, (ONE, 2, -1), 2)
    operands.cuts[operands.node] = carried(operands)
    taken = graph.call_function(operator.getitem, (operands.node, 1))

    assert carried(Operands(taken, PIECES, operands.cuts)) == 2


def test_other_packages_teach_their_operators():
    """A rule is found for all overloads of an operator."""
    rule(aten.cumsum)(lambda call: call.cut(call.node.args[0]))
    try:
        assert carried(call_of(aten.cumsum.default, (ONE, 1), 2)[1]) == 2
    finally:
        del RULES[str(aten.cumsum)]
