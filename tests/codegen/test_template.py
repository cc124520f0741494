"""From a template to text: marks, names, and functions of the device library."""

from __future__ import annotations

import ast

import pytest

from tlora_fx.codegen.spec import KernelSpec, Tile
from tlora_fx.codegen.template import fill, mask_word, module


@pytest.mark.parametrize(
    ("width", "columns", "bits"), [(96, 64, 32), (72, 64, 8), (96, 16, 8), (14336, 128, 32)]
)
def test_masks_are_read_by_words_where_rows_and_tiles_have_whole_ones(width, columns, bits):
    """A row of bits has whole words, and so has a tile's part of it."""
    assert mask_word(width, columns) == bits


def test_marked_lines_stay_where_their_flag_is_true():
    """`#?` takes a flag, its negation, and several of them."""
    text = "a  #? yes\nb  #? no\nc  #? not no\nd  #? yes and not no\ne  #? yes and no\nf"

    assert fill(text, {"yes": True, "no": False}) == "a\nc\nd\nf\n"


def test_blocks_are_kept_or_dropped_whole():
    """`#? flag [` to `#]`, one inside another."""
    text = "#? outer [\na\n#? inner [\nb\n#]\nc\n#]\nd"

    assert fill(text, {"outer": True, "inner": False}) == "a\nc\nd\n"
    assert fill(text, {"outer": False, "inner": True}) == "d\n"


def test_lines_and_blocks_are_repeated_with_their_number():
    """`#* name` counts $k from 0 to below the value."""
    text = "x$k,  #* sites\n#* sites [\na${k}_\n    b  #? deep\n#]"

    assert fill(text, {"sites": 2, "deep": True}) == "x0,\nx1,\na0_\n    b\na1_\n    b\n"


def test_names_are_put_in():
    """$name and ${name}; an unknown one is our own mistake."""
    assert fill("tl.$dtype, ${dtype}s", {"dtype": "float16"}) == "tl.float16, float16s\n"
    with pytest.raises(KeyError):
        fill("$nothing", {})


def test_a_block_without_an_end_is_our_own_mistake():
    """It would swallow the rest of the kernel."""
    with pytest.raises(AssertionError, match="no #]"):
        fill("#? a [\nb", {"a": True})


def test_shared_functions_stand_in_the_library_alone():
    """A kernel imports those that it calls, and holds none of them."""
    spec = KernelSpec("pack", 8, 8, arch=80, tile=Tile(1, 1, 1, 1, 1))
    text = module(spec, constants={}, functions=["job_of", "draw_bits"], body="pass")
    (given,) = (node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom))

    assert given.module == "tlora_fx.codegen.device_library"
    assert [name.name for name in given.names] == ["draw_bits", "job_of"]
    assert not any(isinstance(node, ast.FunctionDef) for node in ast.parse(text).body)
