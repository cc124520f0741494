"""What people call nodes."""

from __future__ import annotations

import pytest

from tests.inspect.programs import lowered
from tlora_fx.errors import NodeNotFound
from tlora_fx.inspect.program_text import find

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
