"""Graphs written and read back are the same, and further passes run on them as on the originals."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from torch import fx

from tests.models import base_of, error_of, job
from tests.pipeline.graphs import relu_of, small_graph
from tests.sampled import sampled
from tests.traced import KINDS
from tlora_fx.compiler import DEFAULT_PIPELINE, prepare, resolve_pipeline, run_passes
from tlora_fx.errors import GraphFileNotReadable, GraphNotStorable
from tlora_fx.graph_file import Document, from_document, graph_text, to_document
from tlora_fx.ir.graph import ancestry
from tlora_fx.ir.shapes import segment_size
from tlora_fx.ir.verifier import fingerprint, named_graphs, owners
from tlora_fx.model.source import group_source
from tlora_fx.pipeline import Runner
from tlora_fx.tools.bisect import run_everywhere, trace_states

PLACES = range(len(DEFAULT_PIPELINE.split(",")) + 1)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """States of jobs of all kinds in a form, and the source of the whole compilation."""

    @cache
    def make(form):
        folder = tmp_path_factory.mktemp(form)
        base = base_of(folder, "llama", "float32", num_hidden_layers=2, attention=form)
        jobs = [job(kind, base, **spec) for kind, spec in KINDS.items()]
        states = trace_states(prepare(jobs), resolve_pipeline())
        return states, group_source(run_passes(jobs), "llama")

    return make


def form_of(value):
    """What is to be kept of a node's value."""
    if isinstance(value, torch.Tensor):
        return str(value.shape), str(value.stride()), value.dtype, value.device.type
    if isinstance(value, (tuple, list)):
        return [form_of(item) for item in value]
    return str(value)


def assert_same_nodes(one, two):
    """Names, arguments, values, tags and origins of all nodes."""
    for mine, theirs in zip(owners(one), owners(two), strict=True):
        for (left, graph), (right, other) in zip(
            named_graphs(mine), named_graphs(theirs), strict=True
        ):
            assert left == right
            for node, read in zip(graph.nodes, other.nodes, strict=True):
                assert node.format_node() == read.format_node()
                assert form_of(node.meta.get("val")) == form_of(read.meta.get("val"))
                assert tags_of(node) == tags_of(read)
                assert history(node) == history(read)


def tags_of(node):
    """Tags, but those that tests compare otherwise; nodes by their names."""
    rest = {"val", "run", "origin"}
    return {tag: str(value) for tag, value in node.meta.items() if tag not in rest}


def history(node):
    """Every origin behind a node."""
    origin = node.meta["origin"]
    return [(o.key, o.made_by, o.target) for o in (origin, *ancestry(origin))]


@pytest.mark.parametrize(
    ("form", "place"),
    [
        *sampled([("packed", place) for place in PLACES]),
        ("batch", PLACES[-1]),
        *(pytest.param("batch", place, marks=pytest.mark.slow) for place in PLACES[::4]),
    ],
)
def test_a_state_is_read_as_it_was_and_compiles_on_alike(compiled, form, place):
    """After each pass: same fingerprint, same nodes, and the next pass makes the same of them."""
    states, source = compiled(form)
    group = states.after(place).group

    document = to_document(group)
    read = from_document(document)

    assert document.left_out == []
    assert fingerprint(read) == fingerprint(group)
    assert_same_nodes(group, read)
    if place == PLACES[-1]:
        assert group_source(read, "llama") == source
        return
    run_everywhere(Runner(states.pipeline), place + 1, read)
    later = states.after(place + 1).group
    assert fingerprint(read) == fingerprint(later)
    assert_same_nodes(later, read)


def test_the_length_of_a_segment_has_a_name(compiled):
    """T2 is that of the third job; the number that stands for it is nowhere."""
    states, _ = compiled("packed")
    group = states.after(DEFAULT_PIPELINE.split(",").index("fuse-backbone") + 1).group

    document = to_document(group)

    for place in range(len(group.jobs)):
        assert f"[1, T{place}, " in document.text
        assert str(segment_size(place)) not in document.text
    assert_same_nodes(group, from_document(document))


def test_one_jobs_graph_is_kept_too(compiled):
    """What job passes rewrite."""
    states, _ = compiled("packed")
    graph = states.after(2).group.jobs[0]

    read = from_document(to_document(graph))

    assert (read.name, read.form, read.sites, read.plan) == (
        graph.name, graph.form, graph.sites, graph.plan,
    )  # fmt: skip
    assert_same_nodes(graph, read)


def test_jobs_of_one_structure_share_graphs_after_reading(tmp_path):
    """And have numbers of their own."""
    base = base_of(tmp_path, "llama", "float32", num_hidden_layers=2)
    ranks = {"a": 2, "b": 4}
    jobs = [job(name, base, r=rank, target_modules=["q_proj"]) for name, rank in ranks.items()]
    group = run_passes(jobs, stop_after="fold-layers")

    one, two = from_document(to_document(group)).jobs

    assert one.root is two.root
    assert [site.rank for graph in (one, two) for site in graph.sites.values()] == [2, 2, 4, 4]


def test_constants_keep_their_values(compiled):
    """Numbers that model code writes into tensors."""
    states, _ = compiled("packed")
    group = states.after(len(PLACES) - 1).group
    group.constants["table"] = torch.tensor([[1, -3]], dtype=torch.int32)

    read = from_document(to_document(group))

    assert torch.equal(read.constants["table"], group.constants["table"])


def test_a_python_function_cannot_be_kept():
    """The error names the node and what it calls."""
    graph = small_graph()
    relu_of(graph).target = torch.relu

    text = error_of(lambda: to_document(graph), GraphNotStorable)

    assert "relu" in text
    assert "torch.ops" in text


def test_an_object_among_arguments_cannot_be_kept():
    """The error names its kind and the node."""
    graph = small_graph()
    relu_of(graph).kwargs = {"how": object()}

    text = error_of(lambda: to_document(graph), GraphNotStorable)

    assert "builtins.object" in text
    assert "in the arguments of relu" in text


def test_a_value_that_cannot_be_kept_names_its_node():
    """A graph has thousands."""
    graph = small_graph()
    relu_of(graph).meta["val"] = object()

    assert "in the value of relu" in error_of(lambda: to_document(graph), GraphNotStorable)


@pytest.mark.parametrize("other", [fx.Graph(), torch.nn.Linear(2, 2)], ids=["graph", "module"])
def test_what_is_no_group_and_no_job_is_refused(other):
    """A compiled model has one."""
    text = error_of(lambda: graph_text(other), GraphNotStorable)

    assert f"found     {type(other).__name__}" in text
    assert "give its `group`" in text


def test_a_method_cannot_be_kept():
    """It would be looked up by name on whatever comes when the file is read."""
    graph = small_graph()
    relu = relu_of(graph)
    with graph.root.inserting_after(relu):
        graph.root.call_method("tofile", (relu, "name"))

    assert "call_method tofile" in error_of(lambda: to_document(graph), GraphNotStorable)


def test_a_tag_that_cannot_be_kept_is_told():
    """All else is kept."""
    graph = small_graph()
    relu_of(graph).meta["hint"] = object()

    document = to_document(graph)

    (told,) = document.left_out
    assert told == "job 'one': relu_default: hint (builtins.object)"
    assert "hint" not in relu_of(from_document(document)).meta


def refusal(damage, graph=None):
    """What is said of a document once its text is damaged."""
    document = to_document(graph or small_graph())
    damaged = damage(document.text)
    assert damaged != document.text
    return error_of(lambda: from_document(Document(damaged)), GraphFileNotReadable)


def swapped(old, new):
    """Damage: one text in place of another, the first time that it stands there."""
    return lambda text: text.replace(old, new, 1)


@pytest.mark.parametrize("number", [2, 99], ids=["json", "later"])
def test_a_document_of_another_format_is_refused(number):
    """With both numbers."""
    text = refusal(swapped("graphs(3", f"graphs({number}"))

    assert "expected  3" in text
    assert f"found     {number}" in text
    assert "the version that wrote it" in text


RELU = "aten.relu.default(x)"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: re.sub(r"  x.* = input.*\n", "", text), "does not stand before it"),
        (swapped(RELU, "aten.relu.default(y)"), "does not stand before it"),
        (swapped("aten.relu", "aten.sin"), "fingerprint"),
        (swapped(RELU, "builtins.eval(x)"), "builtins.eval"),
        (swapped(RELU, "aten.relu.default(spell(7))"), "says what no graph file says"),
        (swapped(RELU, "aten.relu.default(x for x in 3)"), "says what no graph file says"),
        (swapped(RELU, "x.tofile()"), "x.tofile"),
        (swapped("input()", 'input("x=print()")'), "placeholder x=print()"),
        (swapped(RELU, "base('x\"]')"), "get_attr x"),
        (swapped(RELU, RELU + "; import os"), "says what no graph file says"),
        (swapped(RELU, "("), "cannot be read"),
        (swapped("  relu_default", "  x"), "one name"),
        (swapped("job(", "jab("), "says what no graph file says"),
        (lambda text: re.sub(r"job\(.*\n", "", text), "names no job"),
        (lambda text: re.sub(r"mode\(.*\n", "", text), "does not hold together"),
        (swapped("root()", 'block("b", "l", 0, 999999999)'), "at most 100000"),
        (swapped("f32[2, 3]", 'tensor(f32[9999999], device="cpu", mode=None)'), "without a mode"),
    ],
)
def test_a_damaged_document_is_refused(damage, said):
    """Whatever is wrong with it, the error says that the file is."""
    assert said in refusal(damage)


def test_an_error_names_the_line():
    """For those who edit graphs."""
    text = to_document(small_graph()).text
    number = next(i for i, line in enumerate(text.splitlines(), 1) if RELU in line)

    assert f"line    {number}\n" in refusal(swapped(RELU, "aten.relu.default(y)"))


def test_a_constant_that_is_cut_is_refused():
    """Its bytes stand on its line."""
    graph = small_graph()
    graph.constants["c"] = torch.ones(2)

    assert "does not hold together" in refusal(swapped("AACAPwAAgD8=", "AACAPw=="), graph)


def test_an_edited_text_is_read_without_its_fingerprint():
    """A new operator needs neither value nor tags: it is run for its value."""
    text = to_document(small_graph()).text
    edited = re.sub(r"fingerprint.*\n", "", text)
    edited = re.sub(r"returns\(relu_default\)", "returns(again)", edited)
    edited = edited.replace("  output", "  again = aten.sin.default(relu_default)\n  output", 1)

    graph = from_document(Document(edited))

    again = next(node for node in graph.root.nodes if node.name == "again")
    assert form_of(again.meta["val"]) == form_of(relu_of(graph).meta["val"])
