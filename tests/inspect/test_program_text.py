"""A program as text: its code, and what goes by a name."""

from __future__ import annotations

import pytest

from tests.inspect.programs import fused, lowered
from tlora_fx.errors import NodeNotFound
from tlora_fx.inspect.program_text import (
    find,
    match_lines,
    program_lines,
    render_program,
    source_lines,
)

ONE = "group/up_proj:multi_lora_linear"


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.up_proj", "layers.0.mlp.up_proj", "mlp.up_proj", "up_proj",
     "layers_0_1:up_proj", ONE],
)  # fmt: skip
def test_a_node_goes_by_many_names(name):
    """A module's path with any layer or none, the node's own name, its key."""
    (match,) = find(lowered(), name)

    assert match.graph == "layers_0_1"
    assert match.nodes[-1].key == ONE


@pytest.mark.parametrize(
    ("name", "told"),
    [("layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj"), ("mlp.up_proj", "mlp.up_proj"),
     ("down", "layers_0_1:down")],
)  # fmt: skip
def test_a_match_says_which_layer_was_meant(name, told):
    """The whole path where one layer was named."""
    assert find(lowered(), name)[0].name == told


def test_a_module_holds_what_jobs_have_there():
    """The operator and its bank."""
    (match,) = find(lowered(), "mlp.up_proj")

    assert [node.kind for node in match.nodes] == ["tensor", "tensor", "call"]


def test_a_module_without_nodes_of_its_own_holds_its_childrens():
    """`mlp` computes nothing here, its linears do."""
    (match,) = find(lowered(), "layers.0.mlp")

    assert {node.module for node in match.nodes} == {"mlp.up_proj", "mlp.down_proj"}


def test_a_tensor_is_found_by_its_name_in_the_base():
    """With the layer's number, though layers share the code."""
    (match,) = find(lowered(), "model.layers.1.norm.weight")

    assert match.nodes[0].bytes == 32


def test_a_name_in_several_graphs_gives_them_all():
    """Root and layer both have a value called hidden."""
    assert [match.name for match in find(lowered(), "hidden")] == [
        "root:hidden", "layers_0_1:hidden"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["mlp_up_proj_lora_a", "layers_0_1.mlp_up_proj_lora_a"])
def test_a_tensor_is_found_as_errors_call_it(name):
    """And as graph files do."""
    assert [match.name for match in find(lowered(), name)] == ["layers_0_1:mlp.up_proj.lora.a"]


def test_a_wrong_name_is_told_the_nearest():
    """With the layer that was asked for first."""
    with pytest.raises(NodeNotFound, match=r"nearest +model\.layers\.1\.mlp\.up_proj"):
        find(lowered(), "model.layers.1.mlp.upproj")


def test_a_name_that_is_near_nothing_is_told_what_there_is():
    """Modules of the model, each of which would have been found."""
    with pytest.raises(NodeNotFound) as caught:
        find(lowered(), "foo")

    assert "nearest" not in caught.value.facts
    named = caught.value.facts["modules"].partition(" and ")[0].split(", ")
    assert "model.layers.0.mlp.up_proj" in named
    assert all(find(lowered(), name) for name in named)


def test_a_match_holds_all_its_ancestors():
    """Back to the trace, those that are gone too."""
    program = lowered()
    (match,) = find(program, ONE)

    assert match.ancestry["base/up_proj:linear"].made_by == "trace"
    assert len(match.ancestry) == len(program.history)


def page(program, name: str, width: int = 120) -> str:
    """The page as plain text."""
    lines = [line for match in find(program, name) for line in match_lines(program, match, width)]
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)


@pytest.mark.parametrize(
    ("file", "make", "name"),
    [("lowered", lowered, "layers.1.mlp.up_proj"), ("branches", fused, "layers.1.mlp.up_proj"),
     ("norm", fused, "norm")],
    ids=["lowered", "branches", "norm"],
)  # fmt: skip
def test_the_page_reads_as_accepted(file, make, name, golden):
    """The whole text, as somebody looked at it."""
    golden(f"inspect/node-{file}.txt", page(make(), name))


@pytest.mark.parametrize("width", [72, 80, 100])
@pytest.mark.parametrize("name", ["mlp.up_proj", "norm", "model.layers.0"])
def test_a_page_fits_the_terminal(name, width):
    """No line is wider, but code."""
    program = fused()
    code = {line for g in program.graphs for node in g.nodes for line in node.code.splitlines()}
    lines = [line for line in page(program, name, width).splitlines() if line not in code]

    assert max(map(len, lines)) <= width


def test_users_and_arguments_are_named():
    """Both ways along the graph."""
    text = page(lowered(), "layers_0_1:up_proj")

    assert "reads        norm" in text
    assert "read by      down" in text


def test_provenance_goes_back_to_the_trace():
    """Which pass made the node, and of what."""
    text = page(lowered(), "layers_0_1:up_proj")

    assert "made by      lower-adapters, of" in text
    assert "trace: base/up_proj:linear" in text


def test_the_code_of_a_state_reads_as_accepted(golden):
    """The whole text, as somebody looked at it."""
    golden("inspect/code-fused.txt", render_program(fused()))


def test_statements_are_coloured_by_whom_they_serve():
    """Shared ones calmly, each job's in its own colour, a lowered one as for several."""
    styles = {text.strip(): style for line in program_lines(fused()) for text, style in line}
    one = {text.strip(): style for line in program_lines(lowered()) for text, style in line}

    def of(found, name: str) -> str:
        return next(style for text, style in found.items() if text.startswith(f"{name} ="))

    assert of(styles, "norm") == "shared"
    assert of(styles, "lora_A_0") == "job 0"
    assert of(styles, "lora_A_1") == "job 1"
    assert of(one, "up_proj") == "adapters"


def test_the_code_that_trains_is_shown_letter_by_letter(quickstart, quickstart_stages):
    """Colours add nothing to ssm.py, and no statement is left without one."""
    lines = source_lines(quickstart.source, quickstart_stages[-1].program)
    plain = [text for line in lines for text, style in line if not style and " = " in text]

    assert ["".join(text for text, _ in line) for line in lines] == quickstart.source.splitlines()
    assert [line for line in plain if line.startswith("        ")] == []
