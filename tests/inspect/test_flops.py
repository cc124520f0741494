"""What operators cost, and a training step against what torch counts while it runs."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from tests.models import (
    FAMILIES,
    OLD_TRANSFORMERS,
    SHALLOW,
    base_of,
    job,
    mixed_jobs,
    ready,
    row_of,
    tokens,
)
from tests.sampled import sampled
from tlora_fx.inspect.flops import FlopCounter, training_cost
from tlora_fx.model.source import size_names

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


LENGTH = 12


def odd_jobs(base):
    """Jobs with branches that run as they are, and layers that nothing trains."""
    two = ["q_proj", "v_proj"]
    return [
        job("plain", base, r=8, target_modules=[*two, "down_proj"], layers_to_transform=[1, 2]),
        job("dora", base, r=3, target_modules=two, use_dora=True, layers_to_transform=[2]),
        job("copy", base, r=3, target_modules=["q_proj"], modules_to_save=["lm_head"],
            layers_to_transform=[1]),
    ]  # fmt: skip


@pytest.mark.parametrize("family", sampled(["llama", "gemma2", "falcon", "gpt2", "lfm2"], 2))
def test_training_costs_what_torch_counts(family, tmp_path):
    """To the operation: packed and padded rows, odd branches, layers below the first adapter."""
    if family == "falcon" and OLD_TRANSFORMERS:
        pytest.skip("this Falcon's rotary tables grow with lines and tokens, which is told as ?")
    base = base_of(tmp_path, family, dtype="float32", **SHALLOW.get(family, {}))
    jobs = odd_jobs(base) if family == "gemma2" else mixed_jobs(base, FAMILIES[family].targets)
    model = ready(jobs)
    row = row_of(model, [tokens([LENGTH], seed=number) for number in range(len(jobs))])
    with FlopCounterMode(display=False) as counter:
        model(row).sum().backward()
    cost = training_cost(model.group, FlopCounter(model.group.form, size_names(model.group)))
    rows, targets = LENGTH * len(jobs), (LENGTH - 1) * len(jobs)
    found = (cost.token + cost.length * LENGTH) * rows + cost.row

    # The loss takes rows with a target only, and computes its logits again in the backward where a
    # job trains something in the head.
    config = model.backbone.config
    head = 2 * config.hidden_size * config.vocab_size
    own = head * (LENGTH - 1) if family == "gemma2" else 0  # the copy's logits, again
    again = targets if own else 0
    found += head * (again - 2 * (rows - targets)) + own - 3 * bool(own) * head

    assert not cost.unknown
    assert counter.get_total_flops() == pytest.approx(found, rel=1e-9)
