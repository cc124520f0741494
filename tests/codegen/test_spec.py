"""What a kernel is specialised on, and what it refuses."""

from __future__ import annotations

import pytest

from tlora_fx.codegen.spec import KernelSpec, Tile
from tlora_fx.errors import KernelSpecError, UnknownKernel


def test_an_unknown_kind_gets_the_nearest_one():
    """A typing mistake in a kind names the kind that was meant."""
    with pytest.raises(UnknownKernel, match=r"(?s)T0701.*nearest +forward"):
        KernelSpec("foward", 32, 32)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("dtype", "int8", "bfloat16, float16"),
        ("adapter_dtype", "half", "bfloat16, float16"),
        ("inner", 0, "at least 1"),
        ("outer", -1, "at least 1"),
        ("sites", 5, "1 to 4"),
        ("rank_block", 8, "a power of two from 16 on"),
        ("rank_block", 48, "a power of two from 16 on"),
        ("job_capacity", 60, "a power of two"),
        ("weight_layout", "oi", "out_in or in_out"),
        ("extend", "both", "tail or copy"),
    ],
)
def test_a_wrong_field_is_refused_with_what_it_may_be(field, value, expected):
    """The error says the field, what is allowed, and what was given."""
    with pytest.raises(KernelSpecError) as caught:
        KernelSpec(**{"kind": "pack", "inner": 32, "outer": 32, field: value})

    assert f"with this value of {field}" in str(caught.value)
    assert expected in str(caught.value)
    assert repr(value) in str(caught.value)


def test_the_text_of_a_spec_makes_it_again():
    """What stands in a generated file is Python for the spec, defaults left out."""
    tile = Tile(rows=64, columns=128, depth=32, warps=4, stages=3)
    spec = KernelSpec("shrink", 64, 32, dropout=True, tile=tile)

    assert "bias" not in spec.text()
    assert eval(spec.text(), {"KernelSpec": KernelSpec, "Tile": Tile}) == spec
