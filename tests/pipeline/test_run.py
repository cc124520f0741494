"""What the pipeline checks after each pass, and what it tells those who watch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import fx
from torch.fx import replace_pattern

from tests.models import error_of
from tests.pipeline.graphs import Does, add_relu, aten, relu_of, small_graph
from tlora_fx.errors import GraphInvalid, NotOutlinable, PassFailed, PassMisreports
from tlora_fx.ir.graph import TensorRef, ancestry, derive, origin_of
from tlora_fx.ir.shapes import propagate
from tlora_fx.ir.storage import stored_as
from tlora_fx.pipeline import Halted, Instrument, Pipeline, Runner, rewrite_allowed
from tlora_fx.rewriting import inline_block


def run(*what, **options):
    """Run functions as passes on a small graph, which is returned."""
    graph = small_graph()
    Runner(Pipeline(tuple(Does(item) for item in what)), **options).run_job(graph)
    return graph


def uses_before_made(graph):
    """Leave a value that is used before it is made."""
    relu = relu_of(graph)
    with graph.root.inserting_before(relu):
        made = graph.root.call_function(aten.add.Tensor, (relu, relu))
    made.meta["val"] = relu.meta["val"]


def wrong_shape(graph):
    """Leave an operator that does not take its arguments."""
    relu = relu_of(graph)
    with graph.root.inserting_after(relu):
        made = graph.root.call_function(aten.view.default, (relu, [7, 7]))
    made.meta["val"] = relu.meta["val"]


def other_type(graph):
    """Make relu, which stays, give another dtype."""
    relu = relu_of(graph)
    with graph.root.inserting_before(relu):
        made = graph.root.call_function(aten.to.dtype, (relu.args[0], torch.float64))
    relu.update_arg(0, made)


def two_outputs(graph):
    """Return twice."""
    graph.root.output(relu_of(graph))


def behind_the_output(graph):
    """Make a node where fx makes it if nobody says where."""
    graph.root.placeholder("y")


def raises(graph):
    """Raise in the middle of a rewrite."""
    node = relu_of(graph)
    raise KeyError(str(node.target))


@pytest.mark.parametrize(
    ("what", "error", "told"),
    [
        (uses_before_made, GraphInvalid, "relu"),
        (wrong_shape, GraphInvalid, "view"),
        (other_type, GraphInvalid, "changed the type of a value that it kept"),
        (two_outputs, GraphInvalid, "does not end in one output"),
        (behind_the_output, GraphInvalid, "a node behind the output"),
        (raises, PassFailed, "%relu "),
    ],
    ids=["order", "shape", "type", "outputs", "behind", "raises"],
)
def test_a_pass_that_breaks_a_graph_is_named_with_the_node(what, error, told):
    """Linting finds a wrong order, propagation a wrong shape, values another type."""
    text = error_of(lambda: run(what), error)

    assert "does" in text
    assert told in text


def without_values(graph):
    """Forget all of the nodes."""
    for node in graph.root.nodes:
        node.meta.clear()


def without_a_value(graph):
    """Add an input, and say nothing of it."""
    relu = relu_of(graph)
    with graph.root.inserting_before(relu):
        relu.update_arg(0, graph.root.placeholder("y"))


def other_layer(graph):
    """Call what nobody has."""
    relu = relu_of(graph)
    with graph.root.inserting_after(relu):
        made = graph.root.call_module("nowhere", (relu,))
    relu.replace_all_uses_with(made, lambda user: user is not made)


def a_method(graph):
    """Call a method, as fx does for a tensor's."""
    relu = relu_of(graph)
    with graph.root.inserting_before(relu):
        made = graph.root.call_method("contiguous", (relu.args[0],))
        relu.update_arg(0, made)


def stored_at_one_path(graph):
    """Give a tensor the path at which another is stored."""
    for name in ("gate", "up"):
        with_tensor(graph.root)
        node = next(iter(graph.root.nodes))
        node.meta["tensor"] = TensorRef("base", f"mlp.{name}", (2, 3), torch.float32)


def nothing_to_inline(graph):
    """Inline a call of an operator."""
    inline_block(graph, relu_of(graph))


def stored_by(form):
    """A pass that stores a frozen tensor in a form."""
    return lambda graph: stored_as(TensorRef("base", "w", (2, 3), torch.float32), form) and None


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (without_values, "no node of a graph has a value"),
        (without_a_value, "%y : [num_users=1] = placeholder"),
        (other_layer, "a graph calls a layer that no block runs"),
        (a_method, "graphs call operators, such as torch.ops.aten.clone.default, and no methods"),
        (stored_at_one_path, "a graph stores two tensors at one path"),
        (nothing_to_inline, "this is no call of a block"),
        (stored_by(partial(torch.transpose, dim0=0, dim1=1)), "that calls a partial or lambda"),
        (stored_by(torch.matmul), "does not run on these tensors"),
        (lambda graph: fx.GraphModule(graph.root), "fx.GraphModule(graph.owning_module, graph)"),
        (
            lambda graph: fx.GraphModule({}, with_tensor(graph.root)),
            "fx.GraphModule(graph.owning_module, graph)",
        ),
    ],
)
def test_a_mistake_of_an_author_is_told_with_what_to_do(what, told):
    """None is an assertion of ours."""
    text = error_of(lambda: run(what), (GraphInvalid, PassFailed, NotOutlinable))

    assert told in text
    assert "AssertionError" not in text


def with_tensor(graph):
    """The graph with a stored tensor in front."""
    with graph.inserting_before(next(iter(graph.nodes))):
        node = graph.get_attr("mlp.weight")
    node.meta["val"] = next(n for n in graph.nodes if "val" in n.meta).meta["val"]
    return graph


def relu(x):
    """The pattern, as fx traces it."""
    return aten.relu.default(x)


def neg(x):
    """What is put in its place."""
    return aten.neg.default(x)


def test_what_fx_offers_runs_in_a_pass():
    """Dead code goes, also beside layers and tensors; a GraphModule shares the graph."""

    def rewrites(graph):
        root = with_tensor(graph.root)
        with root.inserting_before(relu_of(graph)):
            root.call_module("layers.0", (relu_of(graph).args[0],))
        module = fx.GraphModule(root.owning_module, root)
        replace_pattern(module, relu, neg)
        root.lint()
        assert root.eliminate_dead_code()
        made = relu_of(graph)
        made.meta["val"] = made.args[0].meta["val"]

    graph = run(rewrites)

    assert [str(node.target) for node in graph.root.nodes] == ["x", "aten.neg.default", "output"]
    assert graph.root.owning_module is None


def test_a_node_says_where_a_pass_failed():
    """The node that the pass was at stands in the error."""
    text = error_of(lambda: run(raises), PassFailed)

    assert "node    %relu " in text
    assert "KeyError" in text


@pytest.mark.parametrize("claim", [True, False])
def test_a_pass_that_lies_about_its_change_is_refused(claim):
    """The graph's fingerprint decides what changed."""

    def lies(graph):
        if not claim:
            add_relu(graph)
        return claim

    assert "does" in error_of(lambda: run(lies), PassMisreports)


@pytest.mark.parametrize("claim", [True, False, None])
def test_a_pass_that_says_what_is_true_or_nothing_passes(claim):
    """A claim that holds is fine, and none is needed."""

    def honest(graph):
        if claim is not False:
            add_relu(graph)
        return claim

    run(honest)


class Seen(Instrument):
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def started(self, pipeline):
        self.told.append("started")

    def traced(self, subject, graphs):
        self.told.append(f"traced {subject}")

    def before(self, event):
        self.told.append(f"before {event.place} {event}")

    def after(self, done):
        self.told.append(f"after {done.place} changed {done.changed!r}")

    def failed(self, event, error):
        self.told.append(f"failed {event.place} {error.code}")


def test_an_instrument_is_told_of_every_pass():
    """Traced, before and after each pass, and how the graph changed."""
    seen = Seen()

    def tags(graph):
        relu_of(graph).meta["site"] = "here"

    run(add_relu, tags, lambda graph: None, instruments=[seen])

    assert seen.told == [
        "traced job one",
        "before 1 does on job one", "after 1 changed 'code'",
        "before 2 does on job one", "after 2 changed 'tags'",
        "before 3 does on job one", "after 3 changed ''",
    ]  # fmt: skip


def test_an_instrument_is_told_of_a_failure():
    """Then the error goes on to the caller."""
    seen = Seen()

    error_of(lambda: run(add_relu, wrong_shape, instruments=[seen]), GraphInvalid)

    assert seen.told[-1] == "failed 2 T0212"


def test_a_run_halts_before_an_event():
    """The graphs are as they were before that pass."""
    graph = small_graph()
    runner = Runner(Pipeline((Does(add_relu), Does(raises))), halt_at=2)

    with pytest.raises(Halted) as halted:
        runner.run_job(graph)

    assert halted.value.event.place == 2
    assert len(graph.root.nodes) == 4


def test_rewrites_beyond_the_limit_are_held_back():
    """A pass asks before each rewrite; what it asked for is written down."""

    def twice(graph):
        for number in range(2):
            if rewrite_allowed(f"relu {number}"):
                add_relu(graph)

    graph = small_graph()
    runner = Runner(Pipeline((Does(twice),)), limits={1: 1})
    runner.run_job(graph)

    assert runner.rewrites[1].descriptions == ["relu 0", "relu 1"]
    assert len(graph.root.nodes) == 4


def test_without_checks_only_shapes_are_propagated():
    """`verify="none"` takes a pass's word, not a graph that cannot run."""
    run(lambda graph: True, verify="none")

    error_of(lambda: run(wrong_shape, verify="none"), GraphInvalid)


def test_every_node_knows_who_made_it_from_what():
    """A node that a pass adds is the pass's; one that it keeps stays the tracer's."""
    graph = run(add_relu)

    x, first, second, _ = graph.root.nodes
    assert [origin_of(node).made_by for node in (x, first, second)] == ["trace", "trace", "does"]
    assert origin_of(first) in list(ancestry(origin_of(second)))
    keys = [origin_of(node).key for node in graph.root.nodes]
    assert len(set(keys)) == len(keys)


def test_what_is_no_claim_is_refused():
    """A pass returns True, False or nothing."""
    assert "no claim" in error_of(lambda: run(lambda graph: 3), PassMisreports)


def test_a_new_node_never_takes_the_key_of_one_that_it_was_made_of():
    """A relu in place of a relu still knows the first one."""

    def again(graph):
        old = relu_of(graph)
        with graph.root.inserting_after(old):
            made = graph.root.call_function(aten.relu.default, old.args)
        made.meta["val"] = old.meta["val"]
        derive(made, old)
        old.replace_all_uses_with(made)
        graph.root.erase_node(old)

    graph = run(again, again)

    origin = origin_of(relu_of(graph))
    assert [item.made_by for item in ancestry(origin)] == ["does", "trace"]
    assert len({origin.key, *(item.key for item in ancestry(origin))}) == 3


@pytest.mark.parametrize("change", ["type", "count"])
def test_a_layer_is_called_with_what_its_code_takes(group_after, change):
    """As many values, of the same dtypes and dimensions."""
    passes = "drop-export-noise,tag-roles,fold-layers,check-token-parallel,fuse-backbone"
    group = group_after(passes, "plain", fresh=True)
    call = next(node for node in group.root.nodes if node.op == "call_module")
    if change == "type":
        hidden = call.args[0]
        with group.root.inserting_before(call):
            half = group.root.call_function(aten.to.dtype, (hidden, torch.bfloat16))
        call.update_arg(0, half)
    else:
        call.args = call.args[:-1]

    assert "called with other values" in error_of(
        lambda: propagate(group.root, group.blocks), GraphInvalid
    )
