"""`tlora-fx reduce`: synthetic failures of a fused graph of two jobs and two layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import error_of
from tlora_fx.cli import main
from tlora_fx.errors import GraphFileNotReadable, ReduceFails
from tlora_fx.graph_file import graphs_of_text, load_graphs
from tlora_fx.tools.reduce import Command, Reducer, needed

BRANCH = """
  {job}_A: f32[4, 4] = job("{job}.A") @ adapter("", "", jobs=("{job}",), site="w")
  {job}_x = tlora_fx.segment_read.default(h, segments, {n}, 1) @ adapter("w", "", jobs=("{job}",), site="")
  {job}_down = aten.linear.default({job}_x, {job}_A) @ adapter("w", "", jobs=("{job}",), site="w")
  {job}_y = tlora_fx.segment_read.default({y}, segments, {n}, 1) @ adapter("w", "", jobs=("{job}",), site="")
  {job}_sum = aten.add.Tensor({job}_y, {job}_down) @ adapter("w", "", jobs=("{job}",), site="w")
  {job}_write = tlora_fx.segment_write.default({y}, {job}_sum, segments, {n}, 1) @ adapter("w", "", jobs=("{job}",), site="w")
"""  # noqa: E501  (lines of graph files are as long as they are)
TEXT = f"""graphs(3)
job("", 0)
job("a", 0)
sites("layers", 0, 2, (["w"], 4, 1.0, 0.0))
job("b", 0)
sites("layers", 0, 2, (["w"], 4, 1.0, 0.0))
group(0, facts=["fuse-backbone"])
mode(0, s0=(8, 2), s1=(3, 2))
with graph(0, mode=0):
 with root():
  x: f32[1, s0, 4] = input() @ shared("", "", axis=1)
  unread: f32[1, s0, 4] = input() @ shared("", "", axis=1)
  segments: i32[s1] = input() @ shared("", "")
  one: f32[1, s0, 4] = layer("layers.0", x, segments) @ shared("layers.0", "", axis=1)
  two: f32[1, s0, 4] = layer("layers.1", one, segments) @ shared("layers.1", "", axis=1)
  sine = aten.sin.default(two) @ shared("norm", "", axis=1)
  output = returns(sine)
 with block("layers_0_1", "layers", 0, 2):
  h: f32[1, s0, 4] = input("x") @ shared("", "", axis=1)
  segments: i32[s1] = input() @ shared("", "")
  w: f32[4, 4] = base("w.weight") @ shared("", "")
  linear = aten.linear.default(h, w) @ shared("w", "", axis=1)
{BRANCH.format(job="a", n=0, y="linear")}
{BRANCH.format(job="b", n=1, y="a_write")}
  cosine = aten.cos.default(b_write) @ shared("mlp", "", axis=1)
  output = returns(cosine)
"""


def nodes_of(text):
    """Names of the nodes of root and blocks."""
    return [node.name for graph in graphs_of_text(text).graphs() for node in graph.nodes]


def calling(*names):
    """A failure that is there where all these operators are called."""

    def fails(text):
        graphs = [*graphs_of_text(text).graphs()]
        called = {str(node.target) for graph in graphs for node in graph.nodes}
        return all(any(name in target for target in called) for name in names)

    return fails


def test_only_what_the_failure_needs_is_left():
    """One job, one layer, no adapter, no input that nobody reads."""
    text = Reducer(calling("aten.cos")).reduce(TEXT)

    group = graphs_of_text(text)
    assert nodes_of(text) == ["x", "two", "output", "h", "cosine", "output"]
    assert [len(job.sites) for job in group.jobs] == [0]
    assert group.block_of("layers.1").instances == ("layers.1",)


def test_another_job_is_numbered_anew():
    """Of two jobs the second one is left, with its branch."""

    def fails(text):
        group = graphs_of_text(text)
        return "b" in group.job_names and "b_down" in nodes_of(text)

    text = Reducer(fails).reduce(TEXT)

    group = graphs_of_text(text)
    assert group.job_names == ["b"]
    assert [*group.jobs[0].sites] == ["layers.1.w"]
    read = next(n for g in group.graphs() for n in g.nodes if "segment_write" in str(n.target))
    assert read.args[3] == 0
    assert not {"linear", "cosine", "sine"} & set(nodes_of(text))


def test_a_smaller_file_is_valid():
    """Each that was judged is read back as one that was edited."""
    kept = []
    Reducer(calling("aten.sin"), keep=kept.append).reduce(TEXT)

    assert kept
    for text in kept:
        lines = text.splitlines(keepends=True)
        graphs_of_text("".join([lines[0], *lines[2:]]))


def test_a_step_that_breaks_graphs_is_not_judged():
    """A value of another shape stays what it is: nothing stands in for it."""
    wider = TEXT.replace("returns(sine)", "returns(wide)").replace(
        "  output = returns(wide)",
        "  wide = aten.cat.default([sine, sine], -1) @ shared('', '', axis=1)\n"
        "  output = returns(wide)",
        1,
    )

    assert "wide" in nodes_of(Reducer(lambda text: True).reduce(wider))


@given(st.lists(st.integers(), unique=True, max_size=20), st.data())
def test_parts_that_are_needed_are_found(numbers, data):
    """Exactly those, wherever each of them is needed by itself."""
    parts = [str(number) for number in numbers]
    wanted = set(data.draw(st.lists(st.sampled_from(parts)))) if parts else set()

    assert set(needed(parts, lambda kept: wanted <= set(kept))) == wanted


def test_a_failure_that_is_not_there_is_refused():
    """Before anything is tried."""
    assert "exit 0" in error_of(lambda: Reducer(lambda text: False).reduce(TEXT), ReduceFails)
    error_of(lambda: Reducer(lambda text: True).reduce("nothing"), GraphFileNotReadable)


def test_a_command_that_cannot_be_run_is_refused(tmp_path):
    """It is no verdict."""
    check = Command("no-such-command", tmp_path / "candidate.tfx")

    assert "the check cannot be run" in error_of(lambda: check(TEXT), ReduceFails)


def test_the_command_line_writes_the_smallest_file(tmp_path, capsys):
    """Beside the given one; how much is left is told at each step."""
    file = tmp_path / "bad.tfx"
    file.write_text(TEXT)

    with pytest.raises(SystemExit) as stop:
        main(["reduce", str(file), "--check", "grep -q 'aten.cos.default('"])
    out, err = capsys.readouterr()

    assert stop.value.code == 0
    assert len([*load_graphs(tmp_path / "bad.reduced.tfx").graphs()]) == 2
    assert "at first   2 jobs, 2 layers, 4 sites, " in err
    assert "0 sites, 6 nodes" in err
    assert "bad.reduced.tfx: " in out
