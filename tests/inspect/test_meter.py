"""What single operators cost."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import flop_registry, register_flop_formula

from tlora_fx.inspect.flops import FlopCounter

aten = torch.ops.aten
LIBRARY = torch.library.Library("tlora_fx_test_meter", "DEF")
LIBRARY.define("odd(Tensor x) -> Tensor")
LIBRARY.impl("odd", torch.empty_like, "CompositeExplicitAutograd")
ODD = torch.ops.tlora_fx_test_meter.odd


class Sheet:
    """A graph with values of T tokens, and a counter for it."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.graph = fx.Graph()
        self.tokens = self.mode.shape_env.create_unbacked_symint()
        self.counter = FlopCounter("packed", {str(self.tokens): "T"})

    def value(self, *shape: int | str) -> fx.Node:
        """An input of this shape, T for the tokens."""
        node = self.graph.placeholder("x")
        sizes = [self.tokens if size == "T" else size for size in shape]
        with self.mode:
            node.meta["val"] = torch.empty(sizes, device="meta")
        return node

    def call(self, target, *args, shape=()) -> fx.Node:
        """A call whose value has this shape."""
        node = self.graph.call_function(target, args)
        node.meta["val"] = self.value(*shape).meta["val"]
        return node


@pytest.fixture
def sheet() -> Sheet:
    """An empty graph."""
    return Sheet()


def test_a_linear_costs_what_its_matrix_product_does(sheet):
    """It is made of others, of which one has a formula."""
    node = sheet.call(
        aten.linear.default, sheet.value(1, "T", 8), sheet.value(12, 8), shape=(1, "T", 12)
    )

    assert sheet.counter.node(node).token == 2 * 8 * 12


def test_the_registrys_formula_wins(sheet):
    """mm is counted by it."""
    node = sheet.call(aten.mm.default, sheet.value("T", 8), sheet.value(8, 12), shape=("T", 12))

    assert sheet.counter.node(node).token == 2 * 8 * 12


def test_arithmetic_costs_one_an_element(sheet):
    """The registry leaves it out."""
    node = sheet.call(aten.silu.default, sheet.value(1, "T", 8), shape=(1, "T", 8))

    assert sheet.counter.node(node).token == 8


def test_moving_data_costs_nothing(sheet):
    """A view."""
    node = sheet.call(aten.view.default, sheet.value(1, "T", 8), [-1, 8], shape=("T", 8))

    assert sheet.counter.node(node).flop_per_token == 0


def test_what_does_not_grow_costs_once_a_row(sheet):
    """A product of weights."""
    node = sheet.call(aten.mm.default, sheet.value(4, 8), sheet.value(8, 2), shape=(4, 2))

    assert sheet.counter.node(node).row == 2 * 4 * 8 * 2


def test_an_operator_that_nobody_knows_is_unknown(sheet):
    """It costs a question mark, never nothing."""
    node = sheet.call(ODD.default, sheet.value(1, "T", 8), shape=(1, "T", 8))

    assert sheet.counter.node(node).flop_per_token is None
    assert sheet.counter.trained(node, ()).unknown == ("odd",)


def test_an_operator_is_known_as_soon_as_its_formula_is_registered(sheet):
    """As a generated kernel registers its own."""
    node = sheet.call(ODD.default, sheet.value(1, "T", 8), shape=(1, "T", 8))
    register_flop_formula(ODD)(lambda shape, *args, out_shape=None, **kwargs: 5 * shape[1])
    try:
        assert sheet.counter.node(node).token == 5
    finally:
        del flop_registry[ODD]


def test_a_product_of_tokens_with_tokens_grows_with_the_length(sheet):
    """Scores of a row."""
    node = sheet.call(aten.mm.default, sheet.value("T", 8), sheet.value(8, "T"), shape=("T", "T"))

    assert sheet.counter.node(node).length == 2 * 8


@pytest.mark.parametrize(("learning", "products"), [((), 1), ((0,), 2), ((0, 1), 3)])
def test_a_backward_has_a_product_for_each_factor_that_learns(sheet, learning, products):
    """None for what is frozen."""
    factors = [sheet.value("T", 8), sheet.value(8, 12)]
    node = sheet.call(aten.mm.default, *factors, shape=("T", 12))
    cost = sheet.counter.trained(node, [factors[place] for place in learning])

    assert cost.token == products * 2 * 8 * 12
