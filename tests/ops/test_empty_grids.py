"""Compiled kernels over tensors without rows launch nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch._inductor.runtime import triton_heuristics

from tlora_fx.ops.empty_grids import mend


class Dividing:
    """As torch 2.11 writes a launch."""

    mode = "python"

    def generate(self, meta):
        self.prefix = ["y_grid_raw_ = -(ynumel // -4)", "y_grid_div_ = -(y_grid_raw_ // -65535)"]
        self.y_grid = "-((y_grid_raw_) // -(y_grid_div_))"


def layers_and_blocks(grid, rows):
    """What a launch over so many rows comes to."""
    scope = {"ynumel": rows}
    for line in grid.prefix:
        exec(line, scope)
    return scope["y_grid_div_"], eval(grid.y_grid, scope)


@pytest.mark.parametrize("rows", [0, 1, 7, 300_000])
def test_a_launch_without_rows_has_no_blocks(rows):
    """With rows it has as many as before."""

    class Mended(Dividing):
        pass

    mend(Mended)
    mend(Mended)
    grid, before = Mended(), Dividing()
    grid.generate({})
    before.generate({})

    if rows:
        assert layers_and_blocks(grid, rows) == layers_and_blocks(before, rows)
    else:
        assert layers_and_blocks(grid, 0) == (0, 0)
        with pytest.raises(ZeroDivisionError):
            layers_and_blocks(before, 0)


def test_torchs_own_class_launches_nothing_without_rows():
    """Whatever version it is."""
    kind = type("Own", (triton_heuristics.Grid2DWithYZOverflow,), {})
    mend(kind)
    grid = kind(inductor_meta={})
    grid.generate({"XBLOCK": 4, "YBLOCK": 4})

    assert layers_and_blocks(SimpleNamespace(prefix=grid.prefix, y_grid=grid.y_grid), 0) == (0, 0)
    assert layers_and_blocks(grid, 9)[1] == 3
