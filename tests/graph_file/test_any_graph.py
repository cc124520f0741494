"""parse(print(g)) == g for graphs that nobody wrote by hand."""

from __future__ import annotations

import operator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.graph_file.test_document import assert_same_nodes
from tlora_fx.graph_file import graph_text, graphs_of_text
from tlora_fx.ir.graph import (
    AdapterSite,
    Block,
    GroupGraph,
    JobGraph,
    LayerPlan,
    TensorRef,
    derive,
    note,
    record,
)
from tlora_fx.ir.shapes import fake_like, give_value
from tlora_fx.ir.verifier import fingerprint, named_graphs

aten = torch.ops.aten
TEXT = st.text(max_size=6)
NAME = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
PATH = st.lists(st.one_of(NAME, st.integers(0, 40).map(str)), max_size=4).map(".".join)
DTYPE = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16])
TAGS = st.fixed_dictionaries(
    {},
    optional={
        "path": PATH,
        "source": TEXT,
        "role": st.sampled_from(["shared", "adapter", "backbone", "table", "loss", "another"]),
        "jobs": st.lists(st.sampled_from(["a", "b", "c d"]), unique=True).map(tuple),
        "axis": st.one_of(st.none(), st.integers(0, 3)),
        "site": PATH,
        "part": st.none(),
        "rate": st.floats(),
    },
)
SITES = st.lists(
    st.builds(
        AdapterSite,
        st.builds("{}.{}.{}".format, NAME, st.integers(0, 3), NAME),
        st.integers(0, 9),
        st.floats(),
        st.floats(0, 1),
        st.sampled_from(["lora", "dora"]),
    ),
    unique_by=lambda site: site.path,
    max_size=9,
)


@st.composite
def graphs(draw, mode):
    """Operators on one another, with any tags, and origins over two passes."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(2, 3, device="meta").transpose(0, draw(st.integers(0, 1)))
    nodes = [x]
    for index in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["weight", "unary", "binary", "split", "cast", "mul"]))
        a, b = draw(st.sampled_from(nodes)), draw(st.sampled_from(nodes))
        if kind == "weight":
            path = f"w{index}." + draw(NAME)
            node = graph.create_node("get_attr", path)
            node.meta["tensor"] = TensorRef(
                draw(st.sampled_from(["base", "job", "constant", "buffer"])),
                draw(st.one_of(st.just(path), PATH)), (2, 3), draw(DTYPE),
            )  # fmt: skip
            node.meta["val"] = fake_like(mode, (2, 3), draw(DTYPE))
        elif kind == "split":
            parts = graph.call_function(aten.split.Tensor, (a, 1, draw(st.integers(0, 1))))
            give_value(parts, mode)
            node = graph.call_function(operator.getitem, (parts, 0))
            give_value(node, mode)
            node = graph.call_function(aten.expand.default, (node, list(a.meta["val"].shape)))
        elif kind == "cast":
            node = graph.call_function(aten.to.dtype, (a, draw(DTYPE)))
        elif kind == "mul":
            node = graph.call_function(aten.mul.Tensor, (a, draw(st.floats())))
        elif kind == "binary" and a.meta["val"].shape == b.meta["val"].shape:
            node = graph.call_function(aten.add.Tensor, (a, b), {"alpha": draw(st.integers(1, 3))})
        else:
            node = graph.call_function(aten.sin.default, (a,))
        if node.op == "call_function":
            give_value(node, mode)
        node.meta.update(draw(TAGS))
        if draw(st.booleans()):
            derive(node, a)
            note(node, draw(TEXT), draw(st.one_of(TEXT, st.floats(), st.booleans())))
        nodes.append(node)
    graph.output(nodes[-1])
    return graph


@st.composite
def jobs(draw):
    """A group of a base and two jobs, two of which share their graphs, or one job."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    layers = tuple(f"model.{draw(NAME)}.{n}" for n in range(draw(st.integers(1, 3))))
    made = []
    for name in ("", "a"):
        block = Block("part", draw(graphs(mode)), layers, draw(st.booleans()))
        constant = torch.tensor(draw(st.lists(st.floats(), max_size=3)), dtype=draw(DTYPE))
        made.append(
            JobGraph(
                name,
                draw(graphs(mode)),
                draw(st.sampled_from(["packed", "batch"])),
                LayerPlan(layers, dict.fromkeys(layers, layers[0]), draw(st.booleans())),
                {"part": block},
                {site.path: site for site in draw(SITES)},
                {"c": constant},
                draw(st.lists(st.tuples(TEXT, TEXT), max_size=2)),
                frozenset(draw(st.lists(PATH))),
                draw(st.dictionaries(TEXT, TEXT, max_size=2)),
            )
        )
        record(named_graphs(made[-1]), "trace", name or "base")
        record(named_graphs(made[-1]), "a pass", name or "base")
    if draw(st.booleans()):
        return made[-1]
    base, one = made
    group = GroupGraph(base, [one, one.for_job("c d", {s.path: s for s in draw(SITES)})])
    group.root, group.exact = draw(graphs(mode)), draw(st.booleans())
    group.notes = draw(st.lists(st.tuples(TEXT, TEXT), max_size=2))
    record(named_graphs(group), "a pass", "group")
    return group


@settings(max_examples=15)
@given(jobs())
def test_any_graphs_are_read_as_they_were(given_graphs):
    """Nodes, values, tags, origins, and what jobs have; written again, the text is the same."""
    text = graph_text(given_graphs)
    read = graphs_of_text(text)

    assert graph_text(read) == text
    assert fingerprint(read) == fingerprint(given_graphs)
    every = zip(*map(owners_of, (given_graphs, read)), strict=True)
    for one, two in every:
        assert_same_nodes(one, two)
        assert one.repeated == two.repeated
        assert repr((one.sites, one.plan, one.notes, one.facts)) == repr(
            (two.sites, two.plan, two.notes, two.facts)
        )


def owners_of(graphs):
    """The base and jobs."""
    return [graphs] if isinstance(graphs, JobGraph) else [graphs.base, *graphs.jobs]
