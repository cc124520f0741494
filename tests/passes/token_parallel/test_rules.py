"""The rule table: how operators carry the row's axis, held against what the operators do."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import tlora_fx.passes.token_parallel.rules  # noqa: F401  (registers its rules)
from tlora_fx.passes.token_parallel.rules import RULES, MixesTokens, find_rule, rule

aten = torch.ops.aten
# Sizes that are all different; the row has seven tokens.
T = 7
X = (1, T, 4, 6)


def axis_after(target, args, held, kwargs=None):
    """Where the rule puts the row, and where it really lies.

    args    example values; tensors of `held` (argument positions, or (position, place) in lists)
            hold the row at the dimension given
    """
    graph = fx.Graph()
    nodes = {}

    def note(value, axis):
        node = graph.placeholder("x")
        node.meta["val"] = value
        nodes[node] = axis
        return node

    symbolic = []
    for place, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            symbolic.append(note(arg, held.get(place)))
        elif isinstance(arg, (list, tuple)) and any(isinstance(a, torch.Tensor) for a in arg):
            symbolic.append(
                [note(a, held.get((place, n))) if isinstance(a, torch.Tensor) else a
                 for n, a in enumerate(arg)]
            )  # fmt: skip
        else:
            symbolic.append(arg)
    call = graph.call_function(target, tuple(symbolic), kwargs or {})
    call.meta["val"] = target(*args, **(kwargs or {}))
    found = find_rule(target)
    assert found is not None
    return found(call, lambda arg: nodes.get(arg) if isinstance(arg, fx.Node) else None)


def really(target, args, place, dim, kwargs=None):
    """The dimensions of the result that change when one token of the row changes."""
    before = target(*args, **(kwargs or {}))
    moved = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    part = moved[place].select(dim, 3)
    part.copy_(torch.randn(part.shape, dtype=part.dtype))
    after = target(*moved, **(kwargs or {}))
    changed = (before != after).nonzero()
    return [d for d in range(before.dim()) if set(changed[:, d].tolist()) == {3}
            and before.shape[d] % T == 0]  # fmt: skip


def drawn(*shape):
    """Random numbers in float64."""
    return torch.randn(shape, dtype=torch.float64)


# What a gather takes, for each of seven tokens.
PLACES = torch.arange(T * 3).reshape(1, T, 3) % 5
CARRIED = {
    "linear": (aten.linear.default, (drawn(1, T, 6), drawn(4, 6)), 1),
    "matmul": (aten.matmul.default, (drawn(1, T, 6), drawn(6, 4)), 1),
    "transpose": (aten.transpose.int, (drawn(*X), 1, 2), 1),
    "mT": (aten.mT.default, (drawn(1, 4, T, 6),), 2),
    "permute": (aten.permute.default, (drawn(*X), [2, 0, 3, 1]), 1),
    "unsqueeze": (aten.unsqueeze.default, (drawn(1, T, 6), 1), 1),
    "mean": (aten.mean.dim, (drawn(*X), [2]), 1),
    "mean kept": (aten.mean.dim, (drawn(*X), [-1], True), 1),
    "std, not kept": (aten.std.dim, (drawn(T, 5, 6), [1], True), 0),
    "std, kept": (aten.std.dim, (drawn(T, 5, 6), [1], True, True), 0),
    "logsumexp": (aten.logsumexp.default, (drawn(*X), [2]), 1),
    "pad": (aten.pad.default, (drawn(T, 5, 6), [0, 0, 3, 0]), 0),
    "conv1d": (aten.conv1d.default, (drawn(T, 5, 6), drawn(4, 5, 3)), 0),
    "softmax": (aten.softmax.int, (drawn(1, T, 6), -1), 1),
    "layer_norm": (aten.layer_norm.default, (drawn(1, T, 6), [6]), 1),
    "select": (aten.select.int, (drawn(1, T, 6), 0, 0), 1),
    "slice": (aten.slice.Tensor, (drawn(1, T, 6), 2, 1, 4), 1),
    "index": (aten.index.Tensor, (drawn(*X), [None, None, torch.tensor([1, 3])]), 1),
    "diff": (aten.diff.default, (drawn(1, T, 6),), 1),
    "repeat": (aten.repeat.default, (drawn(1, T, 6), [1, 1, 3]), 1),
    "repeat, more dimensions": (aten.repeat.default, (drawn(T, 6), [2, 1, 1, 3]), 0),
    "repeat_interleave": (aten.repeat_interleave.self_int, (drawn(1, T, 6), 2, -1), 1),
    "tril": (aten.tril.default, (drawn(T, 6, 6),), 0),
    "add": (aten.add.Tensor, (drawn(1, T, 6), drawn(6)), 1),
    "cumsum": (aten.cumsum.default, (drawn(1, T, 6), 2), 1),
    "vector_norm": (aten.linalg_vector_norm.default, (drawn(1, T, 6), 2, [-1], True), 1),
    "einsum": (aten.einsum.default, ("bth,ho->bto", [drawn(1, T, 6), drawn(6, 4)]), None),
    "sdpa": (aten.scaled_dot_product_attention.default, tuple(drawn(T, 2, 5, 6) for _ in "qkv"), 0),
    "argsort": (aten.argsort.default, (drawn(1, T, 60),), 1),
    "polar": (aten.polar.default, (drawn(1, T, 6), drawn(1, T, 6)), 1),
    "view_as_complex": (aten.view_as_complex.default, (drawn(1, T, 3, 2),), 1),
    "view_as_real": (aten.view_as_real.default, (torch.polar(drawn(T, 6), drawn(T, 6)),), 0),
}


@pytest.mark.parametrize("name", [name for name, case in CARRIED.items() if case[2] is not None])
def test_a_rule_follows_the_row(name):
    """Where the rule says that the row lies, and only there, a changed token shows."""
    target, args, dim = CARRIED[name]

    axis = axis_after(target, args, {0: dim})

    assert axis in really(target, args, 0, dim)


def test_an_einsum_follows_its_letter():
    """The row's letter stands where the row goes."""
    target, args, _ = CARRIED["einsum"]

    assert axis_after(target, args, {(1, 0): 1}) == 1


@pytest.mark.parametrize(
    ("target", "args", "axis"),
    [
        (aten.slice_scatter.default, (drawn(1, T, 6), drawn(1, T, 2), 2, 3, 5), 1),
        (aten.select_scatter.default, (drawn(4, T, 6), drawn(T, 6), 0, 1), 1),
    ],
    ids=["a slice", "a place"],
)
def test_a_write_follows_both_of_its_inputs(target, args, axis):
    """What is written into, and what is written."""
    held = 1 if args[0].dim() == args[1].dim() else 0

    found = axis_after(target, args, {0: axis, 1: held})

    assert found == axis
    assert found in really(target, args, 1, held)


@pytest.mark.parametrize(
    ("source", "dim", "held"),
    [(drawn(1, 5, 6), 1, {2: 1}), (drawn(1, T, 6), 2, {0: 1, 2: 1})],
    ids=["of a table", "of each token's own"],
)
def test_a_gather_follows_its_index(source, dim, held):
    """A token's index reads a table, or what the token itself holds."""
    args = [source, dim, PLACES]
    other = PLACES.clone()
    other[0, 3] = (other[0, 3] + 1) % 5
    changed = (aten.gather.default(*args) != aten.gather.default(source, dim, other)).nonzero()

    axis = axis_after(aten.gather.default, args, held)

    assert {3} == set(changed[:, axis].tolist())


def test_a_gather_takes_one_index_for_all_tokens():
    """An index that was expanded along the row is the same for each of them."""
    graph = fx.Graph()
    source, table = graph.placeholder("source"), graph.placeholder("table")
    index = graph.call_function(aten.expand.default, (table, [T, 5, 3]))
    call = graph.call_function(aten.gather.default, (source, -1, index))
    for node, shape in ((source, (T, 5, 6)), (table, (1, 5, 3)), (index, (T, 5, 3))):
        node.meta["val"] = drawn(*shape)
    found = find_rule(call.target)
    assert found is not None

    assert found(call, {source: 0}.get) == 0
    table.meta["val"] = drawn(T, 5, 3)
    with pytest.raises(MixesTokens, match="by their place"):
        found(call, {source: 0}.get)


PAIRS = torch.tensor([[0, 2], [1, 0], [2, 3], [3, 1], [0, 1], [2, 0], [3, 2]])


@pytest.mark.parametrize(
    ("target", "args", "held"),
    [
        (aten.scatter.src, (drawn(T, 4), 1, PAIRS, drawn(T, 2)), (0, 2, 3)),
        (aten.scatter.value, (drawn(T, 4), 1, PAIRS, 1.0), (0, 2)),
        (aten.scatter_add.default, (drawn(T, 4), -1, PAIRS, drawn(T, 2)), (0, 2, 3)),
        (aten.index_add.default, (drawn(T, 4), 1, PAIRS[0], drawn(T, 2)), (0, 3)),
        (torch.ops.tlora_fx.expert_linear.default,
         (drawn(T, 6), drawn(4, 5, 6), drawn(4, 5), PAIRS, False), (0, 3)),
        (torch.ops.tlora_fx.expert_linear.default,
         (drawn(T, 2, 6), drawn(4, 6, 5), None, PAIRS, True), (0, 3)),
    ],
)  # fmt: skip
def test_routing_follows_the_row(target, args, held):
    """A token's experts, and what they make of it, stand where the token stands."""
    axis = axis_after(target, args, dict.fromkeys(held, 0))

    assert axis in really(target, args, 0, 0)


def test_one_hot_adds_a_dimension_behind_the_row():
    """Each token's own number says where its one stands."""
    assert axis_after(aten.one_hot.default, (torch.arange(T)[None], 9), {0: 1}) == 1


@pytest.mark.parametrize("kept", [False, True])
def test_the_largest_of_each_token_and_its_place_hold_the_row(kept):
    """Two results, one behind the other."""
    x = drawn(5, T, 6)

    assert axis_after(aten.max.dim, (x, 0, kept), {0: 1}) == (kept, kept)
    assert axis_after(aten.argmax.default, (x, 0, kept), {0: 1}) == kept
    assert axis_after(aten.max.other, (x, x[:1]), {0: 1, 1: 1}) == 1


def reshaped(shape, dim, turn):
    """Where the rule puts the row after a reshape; sizes equal to T are symbols."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    kinds = [DimDynamic.DYNAMIC if size == T else DimDynamic.STATIC for size in shape]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = mode.from_tensor(torch.empty(shape, device="meta"), symbolic_context=context)
    target, args = turn(x.meta["val"].shape[dim])
    call = graph.call_function(target, (x,))
    with mode:
        call.meta["val"] = target(x.meta["val"], *args)
    found = find_rule(target)
    assert found is not None
    return found(call, lambda arg: dim)


@pytest.mark.parametrize(
    ("shape", "dim", "turn", "place"),
    [
        ((1, T, 6), 1, lambda t: (aten.squeeze.dim, (0,)), 0),
        ((1, T, 24), 1, lambda t: (aten.view.default, ([1, t, 4, 6],)), 1),
        ((1, T, 6), 1, lambda t: (aten.view.default, ([-1, 6],)), 0),
        ((T, 4, 6), 0, lambda t: (aten.reshape.default, ([1, t * 4, 6],)), 1),
        ((5, 4, T, 6), 2, lambda t: (aten.view.default, ([20, t, 6],)), 1),
    ],
)
def test_a_reshape_keeps_the_row_in_order(shape, dim, turn, place):
    """Dimensions inside or outside of the row may be folded; the row's is found again."""
    assert reshaped(shape, dim, turn) == place


@pytest.mark.parametrize(
    ("shape", "dim", "turn"),
    [
        ((4, T, 6), 1, lambda t: (aten.view.default, ([4 * t, 6],))),
        ((4, T, 6), 1, lambda t: (aten.view.default, ([t, 24],))),
        ((4, T), 1, lambda t: (aten.reshape.default, ([-1],))),
    ],
)
def test_a_reshape_across_the_row_is_refused(shape, dim, turn):
    """The row behind another dimension cannot be cut into jobs."""
    with pytest.raises(MixesTokens, match="folds the row"):
        reshaped(shape, dim, turn)


MIXED = {
    "sum over the row": (aten.sum.dim_IntList, (drawn(1, T, 6), [1]), {0: 1}),
    "std of everything": (aten.std.default, (drawn(T, 5, 6), True), {0: 0}),
    "std over the row": (aten.std.dim, (drawn(T, 5, 6), [0], True), {0: 0}),
    "the largest of the row": (aten.topk.default, (drawn(1, T, 6), 2, 1), {0: 1}),
    "tokens more": (aten.pad.default, (drawn(1, T, 6), [0, 0, 3, 0]), {0: 1}),
    "a convolution over the row": (aten.conv1d.default, (drawn(1, 5, T), drawn(4, 5, 3)), {0: 2}),
    "a convolution of one line": (aten.conv1d.default, (drawn(5, T), drawn(4, 5, 3)), {0: 1}),
    "softmax over the row": (aten.softmax.int, (drawn(1, T, 6), 1), {0: 1}),
    "every with every": (aten.matmul.default, (drawn(1, T, 6), drawn(1, 6, T)), {0: 1, 1: 2}),
    "weights over the row": (aten.matmul.default, (drawn(1, T, T), drawn(1, T, 6)), {0: 1, 1: 1}),
    "a slice of the row": (aten.slice.Tensor, (drawn(1, T, 6), 1, 1, 4), {0: 1}),
    "two tokens as one number": (aten.view_as_complex.default, (drawn(6, 2),), {0: 1}),
    "one token": (aten.select.int, (drawn(1, T, 6), 1, 0), {0: 1}),
    "rows end to end": (aten.cat.default, ([drawn(1, T, 6), drawn(1, T, 6)], 1),
                        {(0, 0): 1, (0, 1): 1}),
    "places of the row": (aten.index.Tensor, (drawn(T, 6), [torch.tensor([1, 3])]), {0: 0}),
    "a mask of the row": (aten.index.Tensor, (drawn(1, T, 6), [None, None, torch.ones(6) > 0]),
                          {0: 1}),
    "copies end to end": (aten.repeat.default, (drawn(1, T, 6), [1, 2, 1]), {0: 1}),
    "copies of everything": (aten.repeat.default, (drawn(T, 6), [2, 2, 1]), {0: 0}),
    "places for each token": (aten.repeat_interleave.self_int, (drawn(1, T, 6), 2, 1), {0: 1}),
    "places in a line": (aten.repeat_interleave.self_int, (drawn(1, T, 6), 2), {0: 1}),
    "as many as the row says": (aten.repeat_interleave.self_Tensor,
                                (drawn(5, T), torch.ones(T, dtype=torch.int64), 1), {1: 0}),
    "tokens by number": (aten.gather.default, (drawn(1, T, 6), 1, PLACES), {0: 1, 2: 1}),
    "tokens by a common number": (aten.gather.default, (drawn(1, T, 6), 1, PLACES[:, :2]), {0: 1}),
    "the first tokens": (aten.gather.default, (drawn(1, T, 6), 2, PLACES[:, :2]), {0: 1}),
    "a table by place": (aten.gather.default, (drawn(1, 20, 6), 2, PLACES), {2: 1}),
    "a token, another's index": (aten.gather.default, (drawn(1, 3 * T, 6), 2, PLACES),
                                 {0: 1, 2: 1}),
    "a write to some tokens": (aten.slice_scatter.default,
                               (drawn(1, T, 6), drawn(1, 2, 6), 1, 3, 5), {0: 1}),
    "a write to one token": (aten.select_scatter.default, (drawn(1, T, 6), drawn(1, 6), 1, 3),
                             {0: 1}),
    "a write of the row across": (aten.select_scatter.default,
                                  (drawn(T, T, 6), drawn(T, 6), 0, 1), {1: 0}),
    "neighbours": (aten.diff.default, (drawn(1, T),), {0: 1}),
    "a triangle": (aten.tril.default, (drawn(1, T, T),), {0: 1}),
    "two dimensions": (aten.add.Tensor, (drawn(T, T), drawn(T)), {0: 0, 1: 0}),
    "norm over the row": (aten.layer_norm.default, (drawn(1, T, 6), [T, 6]), {0: 1}),
    "attention": (aten.scaled_dot_product_attention.default,
                  tuple(drawn(2, T, 6) for _ in "qkv"), {0: 1, 1: 1, 2: 1}),
    "an einsum": (aten.einsum.default, ("bth,bsh->bts", [drawn(1, T, 6), drawn(1, T, 6)]),
                  {(1, 0): 1, (1, 1): 1}),
    "an order of the row": (aten.sort.default, (drawn(6, T),), {0: 1}),
    "a running sum": (aten.cumsum.default, (drawn(1, T, 6), 1), {0: 1}),
    "a split of the row": (aten.split.Tensor, (drawn(1, T, 6), 2, 1), {0: 1}),
    "the largest of all": (aten.max.default, (drawn(1, T, 6),), {0: 1}),
    "the place of the largest": (aten.argmax.default, (drawn(1, T, 6), 1), {0: 1}),
    "as wide as the row says": (aten.one_hot.default, (torch.arange(T),), {0: 0}),
    "writes along the row": (aten.scatter.src, (drawn(T, 4), 0, PAIRS % T, drawn(T, 2)),
                             {0: 0, 2: 0, 3: 0}),
    "adds along the row": (aten.scatter_add.default, (drawn(T, 4), 0, PAIRS % T, drawn(T, 2)),
                           {0: 0, 2: 0, 3: 0}),
    "writes by a common index": (aten.scatter.src, (drawn(T, 4), 1, PAIRS, drawn(T, 2)),
                                 {0: 0, 3: 0}),
    "writes of the first tokens": (aten.scatter.value, (drawn(T, 4), 1, PAIRS[:3], 1.0),
                                   {0: 0, 2: 0}),
    "writes into other tokens": (aten.scatter.value, (drawn(2 * T, 4), 1, PAIRS, 1.0),
                                 {0: 0, 2: 0}),
    "an index of the row": (aten.index_add.default, (drawn(4, 6), 0, PAIRS[:, 0], drawn(T, 6)),
                            {2: 0, 3: 0}),
    "added to tokens": (aten.index_add.default, (drawn(T, 6), 0, PAIRS[0], drawn(2, 6)), {0: 0}),
    "added by place": (aten.index_add.default, (drawn(T, 6), 0, PAIRS[0], drawn(2, 6)),
                       {0: 0, 3: 0}),
    "another's experts": (torch.ops.tlora_fx.expert_linear.default,
                          (drawn(T, 6), drawn(4, 5, 6), None, PAIRS, False), {0: 0}),
    "experts of the row": (torch.ops.tlora_fx.expert_linear.default,
                           (drawn(T, 6), drawn(T, 5, 6), None, PAIRS, False),
                           {0: 0, 1: 0, 3: 0}),
    "a weight of the row": (aten.linear.default, (drawn(5, 6), drawn(T, 6)), {1: 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_a_rule_refuses_what_mixes_tokens(name):
    """Each says how."""
    target, args, held = MIXED[name]

    with pytest.raises(MixesTokens):
        axis_after(target, args, held)


def test_pointwise_operators_need_no_rule():
    """They are tagged so by torch."""
    assert axis_after(aten.tanh.default, (drawn(1, T, 6),), {0: 1}) == 1


def test_an_operator_that_nobody_described_has_no_rule():
    """It becomes an error of the pass."""
    assert find_rule(aten.roll.default) is None


def test_others_can_teach_an_operator(monkeypatch):
    """The decorator that the error message names."""
    monkeypatch.setattr("tlora_fx.passes.token_parallel.rules.RULES", dict(RULES))

    @rule(aten.roll.default)
    def roll(node, axis_of):
        return axis_of(node.args[0])

    assert find_rule(aten.roll.default) is roll
