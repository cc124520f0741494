"""Joint graphs, lined up without provenance."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.inspect.programs import lowered
from tlora_fx.inspect.diff import ProgramDiff, difference, difference_lines
from tlora_fx.inspect.joint_diff import joint_differences
from tlora_fx.inspect.schema import JointEntry, JointNode, Program

LAYERS = ["model.layers.0", "model.layers.1"]
LINEAR = "tlora_fx.multi_lora_forward"


def value(name, target, inputs, fate, arguments="(%, {})", size=1_000, flop=0.0):
    """A value of a joint graph."""
    return JointNode(name, target, inputs, arguments, "[1, 512, 32]", flop, size, fate)


def nodes(start: int = 0, scale: str = "0.5"):
    """A norm, a product, and their backward; every trace numbers them from somewhere."""
    mul, lora, back = (f"mul_{start}", f"lora_{start}", f"mul_{start + 1}")
    return [
        value(mul, "aten.mul.Tensor", ["primals_1"], "kept"),
        value(lora, LINEAR, [mul], "kept", flop=4e6),
        value(back, "aten.mul.Tensor", ["tangents_1", mul], "backward", f"(%, %, {scale}, {{}})"),
        value(f"mul_{start + 2}", "aten.mul.Tensor", [back], "backward"),
    ]


def entry(*given, traced=()):
    """A joint graph of two layers."""
    row = "2 jobs, 2 sequences of 128 tokens each"
    return JointEntry("layers_0_1", LAYERS, row, ["mine"], 0.5, list(given), list(traced))


def changes(before, after):
    """What changed: words, and the name of the value."""
    diffs = joint_differences([entry(*before)], [entry(*after)])
    return [(change.what, change.node.id) for diff in diffs for change in diff.changes]


def test_other_numbers_in_names_are_no_difference():
    """Every trace gives its own."""
    assert joint_differences([entry(*nodes())], [entry(*nodes(start=7))]) == []


def test_what_a_pass_puts_between_is_added_and_its_reader_changed():
    """All else is what it was, whatever its number."""
    first, second = nodes(), nodes(start=3)
    half = value("half", "aten.mul.Scalar", [second[2].id], "backward")
    second[3:] = [half, replace(second[3], inputs=["half"])]

    assert changes(first, second) == [("added", "half"), ("changed", second[-1].id)]
    assert changes(second, first) == [("removed", "half"), ("changed", first[-1].id)]


def test_other_numbers_among_arguments_are_a_change():
    """The value is not said to be gone, and another to be there."""
    assert changes(nodes(), nodes(scale="0.25")) == [("changed", "mul_1")]


def test_what_becomes_of_a_value_is_told():
    """With the bytes that are no longer kept, and the operations that are done again."""
    first = nodes()
    second = [first[0], replace(first[1], fate="again"), *first[2:]]
    (diff,) = joint_differences([entry(*first)], [entry(*second)])

    assert [(c.what, c.node.id) for c in diff.changes] == [("kept → again", "lora_0")]
    assert (diff.before.kept_bytes, diff.after.kept_bytes) == (2_000, 1_000)
    assert (diff.before.again_flop, diff.after.again_flop) == (0, 4e6)


@pytest.mark.parametrize("turned", [False, True])
def test_beside_a_state_without_the_stage_stands_the_graph_as_traced(turned):
    """So what the passes and the budget do is seen, on whichever side they are."""
    staged = [entry(replace(nodes()[0], fate="again"), *nodes()[1:], traced=nodes())]
    (diff,) = joint_differences([], staged) if not turned else joint_differences(staged, [])

    assert diff.alone
    assert [c.what for c in diff.changes] == [("again → kept" if turned else "kept → again")]


def program(*given) -> Program:
    """A small program with a joint graph."""
    return replace(lowered(), joint=[entry(*given, traced=nodes())])


def shown() -> ProgramDiff:
    """A difference with all that there can be."""
    first, second = nodes(), nodes(start=3)
    half = value("half", "aten.mul.Scalar", [second[2].id], "backward")
    second[1] = replace(second[1], fate="again")
    second[3:] = [half, replace(second[3], inputs=["half"])]
    return difference(program(*first), program(*second), ("before", "after"))


def test_the_page_reads_as_accepted(golden):
    """The whole text, as somebody looked at it."""
    lines = difference_lines(shown())
    page = "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)
    golden("inspect/diff-joint.txt", page)


@pytest.mark.parametrize("width", [72, 80, 100])
def test_the_page_fits_the_terminal(width):
    """No line is wider."""
    lines = difference_lines(shown(), width)
    assert max(sum(len(text) for text, _ in line) for line in lines) <= width


def test_it_survives_json():
    """The program, and the difference."""
    assert Program.from_json(program(*nodes()).to_json()) == program(*nodes())
    assert ProgramDiff.from_json(shown().to_json()) == shown()
